"""Async client of the session server, for environments, the trainer and users' own code.

Speaks only the public HTTP surface: whatever this client can do, a harness or an operator can do with
curl. Errors of the server come back as the ``TollwayError`` subclass with the same ``code``; a server that
does not answer in time is an error, never an empty result. Calls that are safe to repeat are repeated, for a
bounded time. Must not import the server. Depends on ``client_forms``, aiohttp and the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

import aiohttp
import orjson

from tollway.errors import (
    CapacityExceeded,
    ConfigError,
    EngineLost,
    NotFound,
    ServerStopping,
    TollwayError,
    UpstreamError,
    WorkerDown,
)
from tollway.messages import Message, ToolSpec
from tollway.records import PolicyVersion, Sampling, Trajectory
from tollway.session_server.client_forms import (
    ChatDelta,
    ChatReply,
    Json,
    StreamReader,
    Usage,
    choice_json,
    count_json,
    error_of,
    message_json,
    object_of,
    parse_chat,
    sampling_json,
    tool_json,
)
from tollway.session_server.columns import unpack_rows

__all__ = ["ChatDelta", "ChatReply", "Json", "Session", "SessionClient", "SessionOptions", "Usage"]

T = TypeVar("T")
_JSON = {"content-type": "application/json"}
_TRIES = 3
"""How often a safe call meets a connection that breaks before that is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session as its creator sees it. ``token`` is a secret, and in no ``repr``."""

    session_id: str
    token: str = field(repr=False)
    base_url: str
    openai_base_url: str
    anthropic_base_url: str
    expires_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Further wishes for a new session."""

    min_version: PolicyVersion | None = None
    """Oldest weights that may serve it; calls are refused until some engine has them."""
    exact_version: PolicyVersion | None = None
    """The only weights that may serve it; a refit of an engine that has them waits a while for the session's end."""
    model: str = ""
    """Name of a model in the fleet; by default the policy."""
    parent_id: str = ""
    """Session that started this one: both then live on one engine."""
    priority: int = 0
    """Higher ones are first wherever calls wait."""
    branches: Literal["all", "main"] = "all"
    """Which leaves the export has: all, or of each conversation with tools the one that was continued last."""
    side_requests: Literal["mark", "train", "drop"] | None = None
    """Conversations without tools beside one with tools; ``None``: as the server is configured."""
    idempotency_key: str | None = None
    """The same key opens the same session; by default every ``create`` has one of its own."""

    def fields(self) -> dict[str, object]:
        """Body fields of what differs from the default."""
        said = {
            "min_version": self.min_version,
            "exact_version": self.exact_version,
            "model": self.model or None,
            "parent_id": self.parent_id or None,
            "priority": self.priority or None,
            "branches": None if self.branches == "all" else self.branches,
            "side_requests": self.side_requests,
        }
        return {name: value for name, value in said.items() if value is not None}


class SessionClient:
    """Client of one session server. The HTTP session belongs to the caller.

    ``timeout_s`` bounds a control call and ``chat_timeout_s`` a model call, each attempt of it; ``retry_s`` is
    how long a call that is safe to repeat waits for a worker or server that is starting again.

    >>> async with aiohttp.ClientSession() as http:  # doctest: +SKIP
    ...     client = SessionClient("http://127.0.0.1:8700", admin_key, http=http)
    ...     session = await client.create(task_id="t1")
    ...     reply = await client.chat(session, [Message(role="user", content="hi")])
    """

    def __init__(
        self,
        base_url: str,
        admin_key: str,
        *,
        http: aiohttp.ClientSession,
        timeout_s: float = 60.0,
        chat_timeout_s: float = 3600.0,
        retry_s: float = 30.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._admin = {"authorization": f"Bearer {admin_key}"}
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._chat_timeout = aiohttp.ClientTimeout(total=chat_timeout_s)
        self._retry_s = retry_s

    # -- sessions ----------------------------------------------------------------------------------

    async def create(
        self,
        *,
        task_id: str = "",
        group_id: str = "",
        sampling: Sampling | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        wait_s: float = 0.0,
        options: SessionOptions = SessionOptions(),
    ) -> Session:
        """Open a session. At capacity: ``CapacityExceeded`` after retrying for ``wait_s``."""
        body: dict[str, object] = {"task_id": task_id, "group_id": group_id, "metadata": dict(metadata or {})}
        if sampling is not None:
            body["sampling"] = sampling_json(sampling)
        if ttl_s is not None:
            body["ttl_s"] = ttl_s
        body |= options.fields()
        # With a key, a create whose answer was lost opens no second session when it is sent again.
        headers = {**self._admin, "idempotency-key": options.idempotency_key or secrets.token_urlsafe(16)}
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            try:
                raw = object_of(
                    await self._safe(lambda: self._bytes("POST", "/sessions", body, headers, self._timeout))
                )
                break
            except CapacityExceeded as error:
                if asyncio.get_running_loop().time() + error.retry_after_s > deadline:
                    raise
                await asyncio.sleep(error.retry_after_s)
        try:
            return Session(
                session_id=str(raw["session_id"]),
                token=str(raw["token"]),
                base_url=str(raw["base_url"]),
                openai_base_url=str(raw["openai_base_url"]),
                anthropic_base_url=str(raw["anthropic_base_url"]),
                expires_at=float(cast(float, raw["expires_at"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UpstreamError(f"the session server answered a create without {error}") from error

    async def session(self, session_id: str) -> Json:
        """State, tree, counters and cache figures of a session."""
        return await self._call("GET", f"/sessions/{session_id}")

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        """Every exported row of a session. Never an empty answer for a failure: errors raise."""
        path = f"/sessions/{session_id}/trajectories?format=safetensors"
        return unpack_rows(await self._safe(lambda: self._bytes("GET", path, None, self._admin, self._timeout)))

    async def reward(
        self,
        session_id: str,
        reward: float | None,
        *,
        error: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Record the outcome once; a second, different one is ``Conflict``."""
        body: dict[str, object] = {"reward": reward, "error": error, "details": dict(details or {})}
        await self._call("POST", f"/sessions/{session_id}/reward", body)

    async def close(self, session_id: str) -> None:
        """End a session and keep its record."""
        await self._call("POST", f"/sessions/{session_id}/close", {})

    async def delete(self, session_id: str) -> None:
        """Abort whatever runs and forget the session. Safe to call twice."""
        await self._call("DELETE", f"/sessions/{session_id}")

    # -- model calls -------------------------------------------------------------------------------

    async def chat(
        self,
        session: Session,
        messages: Sequence[Message | Json],
        tools: Sequence[ToolSpec | Json] = (),
        *,
        tool_choice: str | None = None,
        options: Mapping[str, object] | None = None,
        idempotency_key: str | None = None,
    ) -> ChatReply:
        """One plain Chat Completions call.

        ``tool_choice`` is ``auto``, ``none``, ``required`` or a tool's name; ``options`` are further body fields
        such as ``max_tokens``. With an ``idempotency_key`` a call whose answer was lost is sent again and gets
        that answer; without one it raises, since a second call would be a second sample.
        """
        body = _chat_body(messages, tools, tool_choice, options)
        url, headers = _turn(session, idempotency_key)

        async def once() -> bytes:
            return await self._bytes("POST", url, body, headers, self._chat_timeout)

        return parse_chat(object_of(await (once() if idempotency_key is None else self._safe(once))))

    async def stream(
        self,
        session: Session,
        messages: Sequence[Message | Json],
        tools: Sequence[ToolSpec | Json] = (),
        *,
        tool_choice: str | None = None,
        options: Mapping[str, object] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncGenerator[ChatDelta]:
        """The same call piece by piece; the last piece is the whole reply.

        Raises ``EngineLost`` when the stream breaks off. Leave the loop (``aclosing``) to abort the call. Never
        sent again by itself: a caller that has seen pieces has to know.
        """
        body = _chat_body(messages, tools, tool_choice, options)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        url, headers = _turn(session, idempotency_key)
        reader = StreamReader()
        try:
            async with self._http.post(
                url, data=orjson.dumps(body), headers={**headers, **_JSON}, timeout=self._chat_timeout
            ) as response:
                if response.status >= 400:
                    raise error_of(response.status, await response.read(), response.headers.get("retry-after"))
                async for chunk in response.content.iter_any():
                    for delta in reader.feed(chunk):
                        yield delta
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _lost(self.base_url, error) from error
        yield ChatDelta(reply=reader.reply())

    async def count_tokens(self, session: Session, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """How many tokens the prompt of such a call would have."""
        url, headers = f"{session.anthropic_base_url}/v1/messages/count_tokens", _bearer(session)
        body = count_json(messages, tools)
        raw = object_of(await self._safe(lambda: self._bytes("POST", url, body, headers, self._timeout)))
        if not isinstance(count := raw.get("input_tokens"), int):
            raise UpstreamError(f"the session server counted {count!r} tokens")
        return count

    # -- the fleet ---------------------------------------------------------------------------------

    async def cache(self, *, sessions: int = 0) -> Json:
        """Prefix-cache figures: hit rate, ceiling, efficiency, waste by cause; the most wasteful ``sessions``, too."""
        path = f"/cache?sessions={sessions}" if sessions else "/cache"
        return await _asked(self.base_url, self._call("GET", path))

    async def fleet(self) -> Json:
        """``GET /engines``: every engine, the policy's version, and how long none has been ready."""
        return await _asked(self.base_url, self._call("GET", "/engines"))

    async def engines(self) -> tuple[Json, ...]:
        """The engines and their states."""
        return tuple(cast("list[Json]", (await self.fleet())["engines"]))

    async def engine(self, engine_id: str) -> Json:
        """One engine; ``exact_sessions`` and ``exact_calls`` are fixed to the version that it has."""
        return await self._call("GET", f"/engines/{engine_id}")

    async def add_engine(
        self, url: str, *, model: str = "", max_in_flight: int | None = None, frozen: bool = False, stale: bool = False
    ) -> Json:
        """Register an engine; it serves once its weight version is confirmed. A known one is the same one.

        ``model`` is its name in the fleet, empty for the policy. No trainer brings weights to a ``frozen`` one; a
        ``stale`` one waits for them, whatever version it names.
        """
        body = {"url": url, "model": model, "max_in_flight": max_in_flight, "frozen": frozen, "stale": stale}
        return await self._call("POST", "/engines", body)

    async def remove_engine(self, engine_id: str) -> None:
        """Forget an engine; its sessions move at their next call. Safe to call twice."""
        with contextlib.suppress(NotFound):
            await self._call("DELETE", f"/engines/{engine_id}")

    async def drain_engine(self, engine_id: str) -> Json:
        """No new session goes to the engine; its own go on."""
        return await self._call("POST", f"/engines/{engine_id}/drain", {})

    async def undrain_engine(self, engine_id: str) -> Json:
        """The engine takes new sessions again."""
        return await self._call("POST", f"/engines/{engine_id}/undrain", {})

    async def refit(
        self,
        engine_id: str,
        version: PolicyVersion | None,
        *,
        flushed: bool,
        phase: Literal["paused", "resumed", "failed"] | None = None,
        reason: str = "",
    ) -> None:
        """Tell the server, before the engine continues, that it was flushed, has a new version, is paused or failed."""
        body = {"version": version, "flushed": flushed, "phase": phase, "reason": reason[:2000]}
        await self._call("POST", f"/engines/{engine_id}/refit", body)

    async def readiness(self) -> Json:
        """``GET /readyz``: whether a turn can be served now, and what every engine is and why."""
        return await _asked(self.base_url, self._readiness())

    async def ready(self) -> bool:
        """Whether the server can serve a turn now."""
        try:
            async with self._http.get(
                f"{self.base_url}/readyz", headers=self._admin, timeout=self._timeout
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    # -- pieces ------------------------------------------------------------------------------------

    async def _readiness(self) -> Json:
        url = f"{self.base_url}/readyz"
        try:
            async with self._http.get(url, headers=self._admin, timeout=self._timeout) as response:
                body = await response.read()
                if response.status not in (200, 503) or not body.startswith(b'{"ready"'):
                    raise error_of(response.status, body, response.headers.get("retry-after"))
                return object_of(body)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _lost(self.base_url, error) from error

    async def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        """A control call. All of them may be sent twice: the second does nothing, or is refused as the first was."""
        return object_of(await self._safe(lambda: self._bytes(method, path, body, self._admin, self._timeout)))

    async def _safe(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call that may be sent twice, for a bounded time, where that can help."""
        clock = asyncio.get_running_loop().time
        deadline, tries, pause = clock() + self._retry_s, 1, 0.1
        while True:
            try:
                return await call()
            except (WorkerDown, ServerStopping):
                if clock() + pause > deadline:
                    raise
            except EngineLost as error:
                # Only what this client lost; an engine that the server lost is the server's matter.
                if not isinstance(error, _Unreachable) or error.timed_out or tries >= _TRIES:
                    raise
                tries += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _bytes(
        self, method: str, target: str, body: Json | None, headers: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> bytes:
        url = target if "://" in target else self.base_url + target
        data = None if body is None else orjson.dumps(body)
        all_headers = {**headers, **_JSON} if data is not None else dict(headers)
        try:
            async with self._http.request(method, url, data=data, headers=all_headers, timeout=timeout) as response:
                reply = await response.read()
                if response.status >= 400:
                    raise error_of(response.status, reply, response.headers.get("retry-after"))
                return reply
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _lost(self.base_url, error) from error


class _Unreachable(EngineLost):
    """The session server itself did not answer."""


def _lost(base_url: str, error: BaseException) -> TollwayError:
    """What a call that got no answer raises, with what to look at."""
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return ConfigError(f"address of the session server {base_url!r}: want http://host:port")
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        return _Unreachable(
            f"no session server at {base_url}: {reason}; is it running, and is this its address?", refused=True
        )
    reason = f"{type(error).__name__}: {error}" if str(error) else "no answer in time"
    return _Unreachable(f"session server at {base_url}: {reason}", timed_out=isinstance(error, TimeoutError))


async def _asked(base_url: str, call: Awaitable[T]) -> T:
    """The answer of a route that every session server has: who does not know it is none."""
    try:
        return await call
    except NotFound as error:
        raise NotFound(
            f"{base_url} is no session server ({error}); want the address that tollway serve printed, without a path"
        ) from error


def _chat_body(
    messages: Sequence[Message | Json],
    tools: Sequence[ToolSpec | Json],
    tool_choice: str | None,
    options: Mapping[str, object] | None,
) -> dict[str, object]:
    body: dict[str, object] = {"model": "policy", "messages": [message_json(message) for message in messages]}
    if tools:
        body["tools"] = [tool_json(tool) for tool in tools]
    return {**body, **choice_json(tool_choice), **(options or {})}


def _turn(session: Session, idempotency_key: str | None) -> tuple[str, dict[str, str]]:
    """URL and headers of a model call."""
    key = {} if idempotency_key is None else {"idempotency-key": idempotency_key}
    return f"{session.openai_base_url}/chat/completions", {**_bearer(session), **key}


def _bearer(session: Session) -> dict[str, str]:
    return {"authorization": f"Bearer {session.token}"}
