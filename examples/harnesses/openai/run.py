"""The OpenAI SDK, through Chat Completions or Responses, pointed at one Tollway session.

usage: run.py [chat | chat-stream | responses | responses-stream | responses-stateless] [TASK]
"""

from __future__ import annotations

import sys
from pathlib import Path

import openai

sys.path.append(str(Path(__file__).resolve().parents[1]))
import two_tools

URL, TOKEN = two_tools.session()
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN)
MODEL = "policy"
SYSTEM = "You work in a directory. Use the tools."


def chat(task: str, *, stream: bool) -> str:
    """Chat Completions: the whole history travels each time."""
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        for name, (text, schema) in two_tools.TOOLS.items()
    ]
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for _ in range(two_tools.MAX_TURNS):
        request = {"model": MODEL, "messages": messages, "tools": tools}
        if stream:
            with CLIENT.chat.completions.stream(**request) as events:
                for event in events:
                    if event.type == "content.delta":
                        print(event.delta, end="", flush=True)
                message = events.get_final_completion().choices[0].message
            print()
        else:
            message = CLIENT.chat.completions.create(**request).choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            output = two_tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    raise RuntimeError("no answer")


def responses(task: str, *, stream: bool, stateless: bool) -> str:
    """Responses: the server remembers the history (``previous_response_id``), or, stateless, it is sent again."""
    tools = [
        {"type": "function", "name": name, "description": text, "parameters": schema, "strict": False}
        for name, (text, schema) in two_tools.TOOLS.items()
    ]
    items: list = [{"role": "user", "content": task}]
    previous = None
    for _ in range(two_tools.MAX_TURNS):
        request = {"model": MODEL, "input": items, "tools": tools, "instructions": SYSTEM}
        if stateless:
            request |= {"store": False, "include": ["reasoning.encrypted_content"]}
        elif previous is not None:
            request["previous_response_id"] = previous
        if stream:
            with CLIENT.responses.stream(**request) as events:
                for event in events:
                    if event.type == "response.output_text.delta":
                        print(event.delta, end="", flush=True)
                response = events.get_final_response()
            print()
        else:
            response = CLIENT.responses.create(**request)
        previous = response.id
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        outputs = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": two_tools.call(call.name, call.arguments),
            }
            for call in calls
        ]
        items = [*items, *(item.to_dict() for item in response.output), *outputs] if stateless else outputs
    raise RuntimeError("no answer")


def main() -> None:
    """Run one task and print the answer."""
    mode = sys.argv[1] if len(sys.argv) > 1 else "chat"
    task = sys.argv[2] if len(sys.argv) > 2 else two_tools.TASK
    if mode in ("chat", "chat-stream"):
        print(chat(task, stream=mode == "chat-stream"))
    elif mode in ("responses", "responses-stream", "responses-stateless"):
        print(responses(task, stream=mode == "responses-stream", stateless=mode == "responses-stateless"))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
