"""What a dialect asks of the server and what a model call gives back, independent of any dialect.

A request is a ``Wish`` (what shall be generated, how it is answered) and a list of messages; a dialect
parses both, turns work on them, and a dialect writes the ``TurnOutcome`` of each choice. Depends on the
kernel and the families' records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import TurnRecord
from tollway.session_server.families.base import RenderOptions

__all__ = ["AUTO", "ToolChoice", "TurnDelta", "TurnOutcome", "Wish", "weight_versions"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the reply may, must or must not call a tool."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    """The tool of ``named``."""


AUTO = ToolChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One request without its conversation. ``None`` leaves the value to session and server."""

    lead: tuple[Message, ...] = ()
    """Messages that the dialect carries apart from its list and that come before it: system, instructions."""
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    schema: str | None = None
    """JSON schema text that the content of the reply has to follow; ``{"type":"object"}`` for any object."""
    stream: bool = False
    choices: int = 1
    """Independent replies to the same prompt, each of them recorded."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    """Decimal token id -> bias."""
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    options: RenderOptions = field(default_factory=RenderOptions)
    model: str = ""
    """Echoed in the reply."""
    previous: str | None = None
    """Reply id that this request continues: its list holds the new messages only."""
    store: bool = True
    """Whether a later request may name this reply as its ``previous``."""
    left_out: tuple[str, ...] = ()
    """Tools that the harness offers, that cannot run here, and that the model is not shown."""
    extras: Mapping[str, object] = field(default_factory=dict)
    """What the dialect alone has to remember for its reply, such as ``include_usage``."""


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """A piece of a streamed reply that nothing later can change; one of the three is set."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    choice: int = 0
    """Which of the wish's choices it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome:
    """A committed choice."""

    number: int
    """Node number inside the session."""
    message: Message
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    record: TurnRecord


def weight_versions(outcomes: Sequence[TurnOutcome]) -> dict[str, object]:
    """What every reply says of the weights that sampled it: of its first token and of its last."""
    spans = [outcome.record.versions for outcome in outcomes if outcome.record.versions]
    return {
        "weight_versions": {
            "start": min((each[0].version for each in spans), default=None),
            "end": max((each[-1].version for each in spans), default=None),
        }
    }
