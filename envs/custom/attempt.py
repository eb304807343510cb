"""What a grader of the user's own is given. Depends on the kernel's messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tollway.messages import Message

__all__ = ["Attempt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One finished run of an agent.

    >>> Attempt(task_id="t", answer="4", reference="4").answer
    '4'
    """

    task_id: str
    messages: tuple[Message, ...] = ()
    """What the agent was told first."""
    answer: str = ""
    """Text of its last reply."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that the environment takes from its sandbox, by path."""
    reference: str | None = None
    """The known answer, where the environment has one."""
    submitted: bool = True
    finish: str = "submitted"
    """Why the run ended: "submitted", "stopped", "max_turns", "context", "timeout"."""
    turns: int = 0
