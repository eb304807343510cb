"""What a dialect asks of one turn and what a turn gives back, independent of any dialect.

Depends on the kernel and the families' records.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import TurnRecord
from tollway.session_server.families.base import RenderOptions

__all__ = ["TurnDelta", "TurnOutcome", "TurnRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One model call as a harness asked for it. ``None`` leaves the value to session and server."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    calls_allowed: bool = True
    """False for tool_choice "none": the prompt is the same, a call in the reply is plain text."""
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    options: RenderOptions = field(default_factory=RenderOptions)
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """A piece of a streamed reply that nothing later can change; one field is set."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome:
    """A committed turn."""

    number: int
    """Node number inside the session."""
    message: Message
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    record: TurnRecord
