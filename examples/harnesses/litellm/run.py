"""litellm pointed at one Tollway session, through the route of your choice.

usage: run.py [openai | hosted_vllm | anthropic] [--stream] [TASK]

``openai`` and ``hosted_vllm`` speak Chat Completions, ``anthropic`` speaks Messages.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise the import downloads a price list
import litellm

sys.path.append(str(Path(__file__).resolve().parents[1]))
import two_tools

URL, TOKEN = two_tools.session()
BASES = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL}
SYSTEM = "You work in a directory. Use the tools."


def loop(route: str, task: str, *, stream: bool) -> str:
    """One tool loop; ``litellm.completion`` is the same call for every route."""
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        for name, (text, schema) in two_tools.TOOLS.items()
    ]
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for _ in range(two_tools.MAX_TURNS):
        reply = litellm.completion(
            model=f"{route}/policy",
            api_base=BASES[route],
            api_key=TOKEN,
            messages=messages,
            tools=tools,
            stream=stream,
        )
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            output = two_tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    raise RuntimeError("no answer")


def main() -> None:
    """Run one task and print the answer."""
    words = [word for word in sys.argv[1:] if word != "--stream"]
    route = words[0] if words else "openai"
    task = words[1] if len(words) > 1 else two_tools.TASK
    if route not in BASES:
        sys.exit(__doc__)
    print(loop(route, task, stream="--stream" in sys.argv))


if __name__ == "__main__":
    main()
