"""The in-process harness: model call, tool calls, tool results, until the agent submits or stops.

It keeps the conversation append-only and hands every tool result back in call order. It opens nothing and
knows no particular tool. Depends on ``envs.base``, the section and the kernel.
"""

from __future__ import annotations

from dataclasses import replace

from tollway.envs.base import AgentRun, Desk, Environment, Harness, Task, ToolAnswer
from tollway.envs.config import EnvConfig
from tollway.errors import BadRequest, ContextLengthExceeded
from tollway.messages import Message

__all__ = ["ToolLoop"]


class ToolLoop(Harness):
    """At most ``max_turns`` model calls; a reply without tool calls ends the run unsubmitted."""

    def __init__(self, config: EnvConfig, environment: Environment) -> None:
        self.max_turns = config.max_turns
        self.blank_tools = config.blank_tools
        """Show the model spaces instead of tool output: what it then still solves, it does not read."""

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        """Work on ``task``. A context overflow ends the run as truncated; other model errors are raised."""
        tools = desk.tools
        messages = [*task.messages, *desk.opening]
        turns, finish, cut, answer = 0, "max_turns", 0.0, ""
        while turns < self.max_turns and finish == "max_turns":
            try:
                reply = await desk.model.chat(messages, tools.specs)
            except BadRequest as error:
                # By code: over HTTP the class does not always survive.
                if error.code != ContextLengthExceeded.code:
                    raise
                finish = "context"
                break
            turns += 1
            cut += reply.finish_reason == "length"
            messages.append(reply.message)
            answer = reply.message.content
            if not reply.message.tool_calls:
                finish = "stopped"
                break
            for call in reply.message.tool_calls:
                result = await tools.call(call)
                if result.ends:
                    finish = "submitted"
                    break
                messages.append(self._tool_message(call.id, result))
        facts = {**tools.facts, "turns": float(turns), "cut_replies": cut}
        return AgentRun(turns=turns, submitted=finish == "submitted", finish=finish, facts=facts, answer=answer)

    def _tool_message(self, call_id: str, answer: ToolAnswer) -> Message:
        message = Message(role="tool", content=answer.text, tool_call_id=call_id)
        # By encoded length, so that the model's positions stay what they would have been.
        return replace(message, content=" " * len(answer.text.encode())) if self.blank_tools else message
