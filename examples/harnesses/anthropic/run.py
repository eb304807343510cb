"""The Anthropic SDK pointed at one Tollway session.

usage: run.py [messages | stream] [TASK]
"""

from __future__ import annotations

import sys
from pathlib import Path

import anthropic

sys.path.append(str(Path(__file__).resolve().parents[1]))
import two_tools

URL, TOKEN = two_tools.session()
CLIENT = anthropic.Anthropic(base_url=URL, api_key=TOKEN)  # without /v1: the SDK adds it
MODEL = "policy"
SYSTEM = "You work in a directory. Use the tools."


def messages(task: str, *, stream: bool) -> str:
    """Messages with thinking; content blocks are sent back as they came."""
    tools = [
        {"name": name, "description": text, "input_schema": schema} for name, (text, schema) in two_tools.TOOLS.items()
    ]
    history: list = [{"role": "user", "content": task}]
    request = {"model": MODEL, "system": SYSTEM, "messages": history, "tools": tools}
    print(f"the task takes {CLIENT.messages.count_tokens(**request).input_tokens} tokens")
    request |= {"max_tokens": 4096, "thinking": {"type": "enabled", "budget_tokens": 2048}}
    for _ in range(two_tools.MAX_TURNS):
        if stream:
            with CLIENT.messages.stream(**request) as events:
                for text in events.text_stream:
                    print(text, end="", flush=True)
                reply = events.get_final_message()
            print()
        else:
            reply = CLIENT.messages.create(**request)
        history.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
        if reply.stop_reason != "tool_use":
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": two_tools.call(block.name, block.input)}
            for block in reply.content
            if block.type == "tool_use"
        ]
        history.append({"role": "user", "content": results})
    raise RuntimeError("no answer")


def main() -> None:
    """Run one task and print the answer."""
    mode = sys.argv[1] if len(sys.argv) > 1 else "messages"
    task = sys.argv[2] if len(sys.argv) > 2 else two_tools.TASK
    if mode not in ("messages", "stream"):
        sys.exit(__doc__)
    print(messages(task, stream=mode == "stream"))


if __name__ == "__main__":
    main()
