"""Calls from one worker to another, over Unix sockets in a private folder.

Owns one HTTP session per sibling. A sibling that does not listen is ``WorkerDown``, found at once: its
socket refuses. Decides nothing. Depends on ``crew`` and aiohttp.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import cast

import aiohttp
import orjson

from tollway.errors import UpstreamError, WorkerDown
from tollway.session_server.crew import WORKER_HEADER, Crew

__all__ = ["BASE", "Json", "Siblings"]

Json = Mapping[str, object]
BASE = "http://worker"
"""Origin of URLs between workers; the socket decides who is meant."""
_IDLE_S = 30.0
"""Shorter than a server keeps an idle connection, so that no call meets the closing of one."""
_CALL_S = 10.0
"""Longest wait for a sibling's answer to a call of ours; forwarded requests have no limit here."""


class Siblings:
    """The other workers of this server."""

    def __init__(self, crew: Crew, admin_key: str) -> None:
        self.crew = crew
        self._headers = {
            WORKER_HEADER.decode(): crew.own_call,
            "authorization": f"Bearer {admin_key}",
            "content-type": "application/json",
        }
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Siblings:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()

    def http(self, index: int) -> aiohttp.ClientSession:
        """Raw HTTP to worker ``index``: nothing added, decoded or followed."""
        session = self._sessions.get(index)
        if session is None:
            path = str(self.crew.socket_of(index))
            session = self._sessions[index] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return session

    async def call(self, index: int, method: str, path: str, body: Json | None = None) -> Json:
        """One admin call that worker ``index`` answers for itself alone; its status may be 503.

        Raises ``WorkerDown`` when it does not answer and ``UpstreamError`` when it refuses.
        """
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=_CALL_S)
        try:
            async with self.http(index).request(
                method, BASE + path, data=data, headers=self._headers, timeout=timeout
            ) as response:
                reply = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise down(index, error) from error
        if response.status >= 400 and response.status != 503:
            raise UpstreamError(f"worker {index} refused {method} {path}: {response.status} {reply[:300]!r}")
        return cast(Json, orjson.loads(reply)) if reply else {}

    async def all(self, method: str, path: str, body: Json | None = None) -> tuple[dict[int, Json], list[WorkerDown]]:
        """The same call to every sibling at once: (answers by worker, one error per worker that is down)."""
        indexes = self.crew.siblings
        answers = await asyncio.gather(
            *(self.call(index, method, path, body) for index in indexes), return_exceptions=True
        )
        found: dict[int, Json] = {}
        lost: list[WorkerDown] = []
        for index, answer in zip(indexes, answers, strict=True):
            if isinstance(answer, WorkerDown):
                lost.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[index] = answer
        return found, lost


def down(index: int, error: BaseException | str) -> WorkerDown:
    """The error for a call that only worker ``index`` could serve."""
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}".rstrip(": ")
    return WorkerDown(
        f"worker {index} does not answer ({said}); it is started again, and its journal keeps its sessions"
    )
