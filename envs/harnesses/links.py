"""How a command harness reaches its model: over the bridge, or by the session server's public address.

Depends on ``envs.bridge`` and the session's record type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tollway.envs.bridge import INSIDE, PROGRAM, SOCKET, Bridge, Tally, recorded_turns
from tollway.session_server.client import Session

__all__ = ["BridgeLink", "Link", "PublicLink"]


class Link(ABC):
    """One episode's way to its model."""

    public: ClassVar[bool]
    """Whether the sandbox needs an open network for it."""
    base_url: str
    """As the harness sees it, without ``/v1``."""
    key: str
    """What the harness has for an API key."""
    tally: Tally

    @property
    @abstractmethod
    def mounts(self) -> Mapping[str, Path]:
        """What the sandbox has to be made with."""

    @property
    @abstractmethod
    def ports(self) -> Mapping[str, str]:
        """Ports of the sandbox's loopback, and the sockets that they lead to."""

    @property
    @abstractmethod
    def program(self) -> tuple[str, ...]:
        """How Python is told to run the program that starts a harness."""

    @abstractmethod
    async def turns(self) -> int:
        """Model calls that the session has recorded."""

    def without_secrets(self, data: bytes) -> bytes:
        """``data`` with the key taken out."""
        return data.replace(self.key.encode(), b"[key]")


class BridgeLink(Link):
    """Over a bridge, whose key is the harness's."""

    public = False

    def __init__(self, bridge: Bridge, port: int) -> None:
        self.bridge, self._port = bridge, port
        self.base_url = f"http://127.0.0.1:{port}"
        self.key = bridge.key
        self.tally = bridge.tally

    @property
    def mounts(self) -> Mapping[str, Path]:
        """The bridge's directory."""
        return self.bridge.mounts

    @property
    def ports(self) -> Mapping[str, str]:
        """The one port of the model."""
        return {str(self._port): f"{INSIDE}/{SOCKET}"}

    @property
    def program(self) -> tuple[str, ...]:
        """The program lies beside the socket."""
        return (f"{INSIDE}/{PROGRAM.name}",)

    async def turns(self) -> int:
        """Model calls that the session has recorded."""
        return await recorded_turns(self.bridge.session)


class PublicLink(Link):
    """By a public address, with the session's own token; nothing of this machine is needed inside."""

    public = True

    def __init__(self, session: Session, public_url: str) -> None:
        self._session = session
        self.base_url = f"{public_url.rstrip('/')}/sessions/{session.session_id}"
        self.key = session.token
        self.tally = Tally()

    @property
    def mounts(self) -> Mapping[str, Path]:
        """None."""
        return {}

    @property
    def ports(self) -> Mapping[str, str]:
        """None."""
        return {}

    @property
    def program(self) -> tuple[str, ...]:
        """The program itself, as text: it holds no secrets."""
        return ("-c", PROGRAM.read_text(encoding="utf-8"))

    async def turns(self) -> int:
        """Model calls that the session has recorded."""
        return await recorded_turns(self._session)
