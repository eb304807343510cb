"""The in-process harness: model call, tool calls, tool results, until the agent submits or stops.

It keeps the conversation append-only and hands every tool result back in call order. It opens nothing and
knows no particular tool. Depends on ``envs.base`` and the kernel.
"""

from __future__ import annotations

from dataclasses import replace

from tollway.envs.base import AgentRun, Harness, Model, Task, ToolAnswer, Toolset
from tollway.errors import BadRequest, ContextLengthExceeded
from tollway.messages import Message

__all__ = ["ToolLoop"]


class ToolLoop(Harness):
    """At most ``max_turns`` model calls; a reply without tool calls ends the run unsubmitted."""

    def __init__(self, *, max_turns: int, blank_tools: bool = False) -> None:
        self.max_turns = max_turns
        self.blank_tools = blank_tools
        """Show the model spaces instead of tool output: what it then still solves, it does not read."""

    async def run(self, task: Task, model: Model, tools: Toolset) -> AgentRun:
        """Work on ``task``. A context overflow ends the run as truncated; other model errors are raised."""
        messages = list(task.messages)
        turns, finish, cut = 0, "max_turns", 0.0
        while turns < self.max_turns and finish == "max_turns":
            try:
                reply = await model.chat(messages, tools.specs)
            except BadRequest as error:
                # By code: over HTTP the class does not always survive.
                if error.code != ContextLengthExceeded.code:
                    raise
                finish = "context"
                break
            turns += 1
            cut += reply.finish_reason == "length"
            messages.append(reply.message)
            if not reply.message.tool_calls:
                finish = "stopped"
                break
            for call in reply.message.tool_calls:
                answer = await tools.call(call)
                if answer.ends:
                    finish = "submitted"
                    break
                messages.append(self._tool_message(call.id, answer))
        facts = {**tools.facts, "turns": float(turns), "cut_replies": cut}
        return AgentRun(turns=turns, submitted=finish == "submitted", finish=finish, facts=facts)

    def _tool_message(self, call_id: str, answer: ToolAnswer) -> Message:
        message = Message(role="tool", content=answer.text, tool_call_id=call_id)
        # By encoded length, so that the model's positions stay what they would have been.
        return replace(message, content=" " * len(answer.text.encode())) if self.blank_tools else message
