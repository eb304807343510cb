"""What a dialect has to offer: read a request, write a reply, whole or as a stream.

A dialect is stateless and knows neither sessions nor engines. A request body is a JSON object with one list
that holds the conversation (``list_field``); everything else in it is the ``Wish``. List items are read
apart from the rest because the server reads only those that are new. Depends on ``request``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tollway.errors import BadRequest, TollwayError
from tollway.messages import Message
from tollway.session_server.families.base import Family
from tollway.session_server.request import TurnDelta, TurnOutcome, Wish

__all__ = ["Dialect", "Json", "ReplyNames", "StreamWriter"]

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ReplyNames:
    """What names one reply towards its client."""

    reply_id: str
    """With the dialect's prefix, unique for ever."""
    created: int
    """Unix seconds."""


class StreamWriter(ABC):
    """Writes one reply as server-sent events. Every method returns bytes that are ready to send."""

    @abstractmethod
    def start(self) -> bytes:
        """What comes before the first piece."""

    @abstractmethod
    def delta(self, delta: TurnDelta) -> bytes:
        """One piece. A tool call comes whole and is written as its events."""

    @abstractmethod
    def end(self, outcomes: Sequence[TurnOutcome]) -> bytes:
        """Everything after the last piece, in the order of choices; sent only once every choice is committed."""

    @abstractmethod
    def error(self, error: TollwayError) -> bytes:
        """An error event in place of the end: never a finish reason, never a last event."""


class Dialect(ABC):
    """One wire format of a harness. Safe to share."""

    name: ClassVar[str]
    """``chat``, ``responses`` or ``messages``."""
    list_field: ClassVar[str]
    """Key of the conversation."""
    id_prefix: ClassVar[str]
    """Of reply ids: ``chatcmpl-``, ``resp_``, ``msg_``."""
    call_prefix: ClassVar[str]
    """Of tool call ids: ``call_`` or ``toolu_``."""

    @abstractmethod
    def wish(self, raw: Json) -> Wish:
        """Everything of a body but its list. Raises ``BadRequest`` naming the field."""

    @abstractmethod
    def messages(self, items: Sequence[object], *, first: int = 0) -> list[Message]:
        """Kernel messages of consecutive list items. ``first`` is the index of ``items[0]``, for error texts.

        ``messages(a) + messages(b) == messages(a + b)`` wherever ``closed_after(a[-1])``. Raises ``BadRequest``.
        """

    @abstractmethod
    def closed_after(self, item: object) -> bool:
        """Whether nothing behind ``item`` can become part of the same kernel message."""

    def items_of_text(self, text: str) -> list[object]:
        """The list that a conversation given as one text stands for. Raises ``BadRequest`` where it must be a list."""
        raise BadRequest(f"{self.list_field} must be a non-empty list, got a text", param=self.list_field)

    def settle(self, wish: Wish, last: object) -> Wish:
        """The wish, given the last list item: some dialects ask for a special reply inside their list.

        An item that matters here is never one that ``closed_after`` calls closed.
        """
        return wish

    @abstractmethod
    def reply(self, wish: Wish, outcomes: Sequence[TurnOutcome], names: ReplyNames, family: Family) -> bytes:
        """The whole reply as JSON."""

    @abstractmethod
    def stream(self, wish: Wish, names: ReplyNames, family: Family) -> StreamWriter:
        """A writer for one streamed reply."""

    @abstractmethod
    def error(self, error: TollwayError) -> bytes:
        """Error body as this dialect's SDKs read it."""
