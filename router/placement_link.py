"""The connection of a session server to its placement service: one question, one typed answer, typed errors.

Never retries and decides nothing. Depends on ``placement_wire`` and aiohttp.
"""

from __future__ import annotations

import os
from typing import TypeVar, cast

import aiohttp
import msgspec

from tollway.errors import (
    BadRequest,
    CapacityExceeded,
    Conflict,
    NoEngine,
    NotFound,
    PlacementDown,
    TollwayError,
    Unauthorized,
    VersionNotReady,
)
from tollway.router.addresses import check_url
from tollway.router.config import RouterConfig
from tollway.router.losses import lost_words
from tollway.router.placement_wire import encode

__all__ = ["KEY_VARIABLE", "AttachFirst", "ServiceLink"]

KEY_VARIABLE = "TOLLWAY_ROUTER_KEY"
"""Environment variable with the key of the service, here and there."""
T = TypeVar("T")


class AttachFirst(TollwayError):
    """The service does not know this start of this server."""

    code, status, retryable = "attach_first", 409, True


class ServiceLink:
    """Asks one placement service. ``start`` before use, ``aclose`` after."""

    def __init__(self, config: RouterConfig, *, url: str, key: str | None = None) -> None:
        self.url = check_url(url)
        self._connect_s = config.connect_timeout_s
        self._headers = {
            "authorization": f"Bearer {key if key is not None else os.environ.get(KEY_VARIABLE, '')}",
            "content-type": "application/json",
        }
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Make connections possible."""
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        if self._http is not None:
            await self._http.close()

    async def ask(self, method: str, path: str, body: msgspec.Struct | None, kind: type[T], *, timeout_s: float) -> T:
        """The answer as ``kind``.

        Raises ``PlacementDown`` when there is none or it is nonsense, ``AttachFirst``, ``Unauthorized``, and what
        the service says of a place.
        """
        if self._http is None or self._http.closed:
            raise self.down("this server is not started")
        timeout = aiohttp.ClientTimeout(total=max(0.1, timeout_s), sock_connect=self._connect_s)
        data = encode(body) if body is not None else None
        try:
            async with self._http.request(
                method, self.url + path, data=data, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.down(lost_words(error)) from error
        if response.status >= 400:
            raise self._error(response.status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self.down(f"it answers {path} with something else: {error}") from error

    def _error(self, status: int, answer: bytes) -> TollwayError:
        """The service's error as ours."""
        try:
            said = msgspec.json.decode(answer, type=dict[str, dict[str, object]])["error"]
        except (msgspec.ValidationError, msgspec.DecodeError, KeyError):
            return self.down(f"it answered {status}: {answer[:200]!r}")
        code, words = said.get("code"), str(said.get("message", ""))
        if code == "attach_first":
            return AttachFirst(words)
        if code == "invalid_request":
            return BadRequest(f"the placement service {self.url} refuses a message: {words}")
        if code == "conflict":
            return Conflict(words)
        if code == "not_found":
            return NotFound(words)
        if code == "no_engine":
            return NoEngine(words)
        if code == "capacity_exceeded":
            return CapacityExceeded(words, retry_after_s=float(cast(float, said.get("retry_after_s", 1.0))))
        if code == "version_not_ready":
            serving = said.get("serving")
            return VersionNotReady(
                int(cast(int, said.get("wanted", 0))),
                int(cast(int, serving)) if serving is not None else None,
                exact=bool(said.get("exact")),
            )
        if status == 401:
            return Unauthorized(f"the placement service {self.url} refuses this server's key: {words}")
        return self.down(f"it answered {status}: {words}")

    def down(self, words: str) -> PlacementDown:
        """The error for a service that cannot be asked."""
        return PlacementDown(f"the placement service {self.url} (router.placement_url) cannot be asked: {words}")
