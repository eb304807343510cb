"""What session servers and the placement service say to each other: typed messages, strictly read.

Engines are named by URL, since each side numbers them for itself. Unknown fields and wrong types are errors. Pure
data; depends on msgspec and the errors.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from tollway.errors import BadRequest

__all__ = [
    "Attach",
    "Attached",
    "EngineRow",
    "EngineSaid",
    "FleetRow",
    "Grown",
    "Move",
    "Place",
    "Placed",
    "RefitNotice",
    "RefitRow",
    "Report",
    "SessionRow",
    "decode",
    "encode",
]

T = TypeVar("T")
Name = Annotated[str, msgspec.Meta(max_length=256)]
Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{0,64}$")]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
Words = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Version = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""What fits into an exported column."""
Some = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_encode = msgspec.json.Encoder().encode


class EngineSaid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine and what whoever adds it says of it."""

    url: Url
    id: Id = ""
    """What it is called where it is known; a service that does not know it yet calls it so, too."""
    model: Name = ""
    max_in_flight: Some | None = None
    """Of the whole engine."""
    frozen: bool = False
    stale: bool = False
    """Its weights are those that it was started with."""
    drained: bool = False


class SessionRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session that has a place."""

    key: Key
    url: Url
    """Of its engine."""
    dp_rank: Count | None = None
    model: Name = ""
    group: Name = ""
    tokens: Count = 0
    """Longest prompt plus reply so far."""
    resting: bool = False


class Attach(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session server takes its lease, with all that it knows."""

    server: Key
    """Name that is the same after a restart, so that a server takes its own sessions over."""
    boot: Key
    """One start of the server; a later one takes the name over from an earlier one."""
    sessions: list[SessionRow] | None = None
    """``None``: a start that has not read its journal yet; what is known of it stays."""
    engines: list[EngineSaid] = []
    policy_version: Version | None = None


class Attached(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lease."""

    epoch: str
    """One start of the service."""
    lease_s: float
    """Without a word for so long, the sessions of a server are released."""


class Grown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session is used; ``tokens`` is its longest prompt plus reply so far."""

    key: Key
    tokens: Count
    model: Name = ""


class RefitNotice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer paused, flushed or reloaded an engine, or lets it go on."""

    url: Url
    version: Version | None = None
    flushed: bool = False
    phase: str | None = None
    reason: Words = ""


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happened on a server since its last report; an empty one keeps the lease."""

    server: Key
    boot: Key
    alive: list[Url] = []
    """Engines from which tokens came since: whatever probes say, they live."""
    grown: list[Grown] = []
    rested: list[Key] = []
    released: list[Key] = []
    moved: list[SessionRow] = []
    """Sessions that found another place while the service could not be asked."""
    lost: dict[Url, Words] = {}
    """URL -> last words of engines that broke a connection."""
    added: list[EngineSaid] = []
    removed: list[Url] = []
    drained: dict[Url, bool] = {}
    """Engines that an operator drained (true) or opened again."""
    refits: list[RefitNotice] = []


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new session asks for a place; the answer may take as long as ``timeout_s``."""

    server: Key
    boot: Key
    key: Key
    tokens: Count
    model: Name = ""
    group: Name = ""
    parent: Name = ""
    minimum: Version | None = None
    exact: Version | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)] = 0


class Move(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session has to leave its place."""

    server: Key
    boot: Key
    key: Key
    reason: Name
    model: Name = ""
    minimum: Version | None = None
    exact: Version | None = None
    exclude: list[Url] = []
    """URLs of engines."""


class Placed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place."""

    url: Url
    dp_rank: Count | None = None
    tokens: Count = 0


class EngineRow(EngineSaid, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine as the service sees it."""

    state: str
    reason: Words = ""
    quarantined: Words = ""
    """Why its weights may not serve: only a trainer knows, so a server that starts has to be told."""
    version: Version | None = None
    sessions: int = 0
    resident_tokens: int = 0
    budget_tokens: int | None = None


class RefitRow(RefitNotice, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A notice with its number, for servers that did not give it."""

    serial: int
    server: Name
    """Who gave it and needs to hear nothing; empty: an operator gave it to the service."""


class FleetRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fleet at one moment."""

    epoch: str
    revision: int
    servers: list[str]
    """With a lease."""
    engines: list[EngineRow]
    refits: list[RefitRow]
    """The latest ones."""
    policy_version: Version | None = None


def decode(data: bytes, kind: type[T]) -> T:
    """``data`` as a message. Raises ``BadRequest`` that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"no valid {kind.__name__} message: {error}") from None


def encode(message: msgspec.Struct) -> bytes:
    """``message`` as JSON."""
    return _encode(message)
