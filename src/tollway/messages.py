"""One internal message form for all dialects.

Dialects parse into these types and render from them; matching, rendering and parsing see nothing else.
Depends only on ``errors``. Tool arguments stay the raw JSON text that was sampled or sent: parsing and
re-serialising would lose what the model wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tollway.errors import BadRequest

__all__ = ["ROLES", "Message", "Role", "ToolCall", "ToolSpec"]

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an assistant message makes."""

    id: str
    name: str
    arguments: str
    """Raw JSON text of the arguments, exactly as sampled or sent (it may be invalid JSON)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation, text only.

    >>> Message(role="user", content="hi").content
    'hi'
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    """Thinking text of an assistant message; ``None`` when the sender did not carry it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For ``tool`` messages: the call that this is the result of."""
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise BadRequest(f"unknown role {self.role!r}; use one of {', '.join(ROLES)}", param="messages")
        if self.tool_calls and self.role != "assistant":
            raise BadRequest(f"a {self.role} message cannot make tool calls", param="messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = "{}"
    """JSON schema of the arguments as JSON text, key order as the harness sent it."""
    strict: bool | None = None
