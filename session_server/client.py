"""Async client of the session server, for environments, the trainer and users' own code.

Speaks only the public HTTP surface: whatever this client can do, a harness or an operator can do with
curl. Errors of the server come back as the ``TollwayError`` subclass with the same ``code``. Must not
import the server. Depends on aiohttp, orjson, numpy and the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import aiohttp
import orjson

from tollway import errors
from tollway.errors import (
    BadRequest,
    CapacityExceeded,
    ContextLengthExceeded,
    EngineLost,
    NotFound,
    TollwayError,
    UpstreamError,
    VersionNotReady,
)
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Sampling, Trajectory
from tollway.session_server.columns import unpack_rows

__all__ = ["ChatReply", "Json", "Session", "SessionClient", "Usage"]

Json = Mapping[str, object]


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


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """``None``: the engine did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One assistant message."""

    message: Message
    finish_reason: str
    usage: Usage
    raw: Json = field(default_factory=dict, repr=False)


class SessionClient:
    """Client of one session server. The HTTP session belongs to the caller.

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
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._admin = {"authorization": f"Bearer {admin_key}"}
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._chat_timeout = aiohttp.ClientTimeout(total=chat_timeout_s)

    async def create(
        self,
        *,
        task_id: str = "",
        group_id: str = "",
        sampling: Sampling | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        wait_s: float = 0.0,
    ) -> Session:
        """Open a session. At capacity: ``CapacityExceeded`` after retrying for ``wait_s``."""
        body: dict[str, object] = {"task_id": task_id, "group_id": group_id, "metadata": dict(metadata or {})}
        if sampling is not None:
            body["sampling"] = _sampling_json(sampling)
        if ttl_s is not None:
            body["ttl_s"] = ttl_s
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            try:
                raw = await self._call("POST", "/sessions", body)
                break
            except CapacityExceeded as error:
                if asyncio.get_running_loop().time() + error.retry_after_s > deadline:
                    raise
                await asyncio.sleep(error.retry_after_s)
        return Session(
            session_id=str(raw["session_id"]),
            token=str(raw["token"]),
            base_url=str(raw["base_url"]),
            openai_base_url=str(raw["openai_base_url"]),
            anthropic_base_url=str(raw["anthropic_base_url"]),
            expires_at=float(cast(float, raw["expires_at"])),
        )

    async def chat(
        self,
        session: Session,
        messages: Sequence[Message | Json],
        tools: Sequence[ToolSpec | Json] = (),
        *,
        options: Mapping[str, object] | None = None,
        idempotency_key: str | None = None,
    ) -> ChatReply:
        """One plain Chat Completions call; ``options`` are further body fields such as ``max_tokens``."""
        body: dict[str, object] = {
            "model": "policy",
            "messages": [_message_json(message) for message in messages],
            **(options or {}),
        }
        if tools:
            body["tools"] = [_tool_json(tool) for tool in tools]
        headers = {"authorization": f"Bearer {session.token}"}
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        data = await self._bytes(
            "POST", f"{session.openai_base_url}/chat/completions", body, headers, self._chat_timeout
        )
        return parse_chat(_object(data))

    async def session(self, session_id: str) -> Json:
        """State, tree, counters and cache figures of a session."""
        return await self._call("GET", f"/sessions/{session_id}")

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        """Every exported row of a session. Never an empty answer for a failure: errors raise."""
        url = f"{self.base_url}/sessions/{session_id}/trajectories?format=safetensors"
        return unpack_rows(await self._bytes("GET", url, None, self._admin, self._timeout))

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

    async def cache(self) -> Json:
        """Prefix-cache figures: hit rate, ceiling, efficiency, waste by cause."""
        return await self._call("GET", "/cache")

    async def engines(self) -> tuple[Json, ...]:
        """The fleet and its states."""
        raw = (await self._call("GET", "/engines"))["engines"]
        return tuple(cast("list[Json]", raw))

    async def add_engine(self, url: str) -> Json:
        """Register an engine; it serves once its weight version is confirmed."""
        return await self._call("POST", "/engines", {"url": url})

    async def refit(self, engine_id: str, version: int | None, *, flushed: bool) -> None:
        """Tell the server, before the engine continues, that it was flushed, has a new version, or both."""
        await self._call("POST", f"/engines/{engine_id}/refit", {"version": version, "flushed": flushed})

    async def ready(self) -> bool:
        """Whether the server can serve a turn now."""
        try:
            async with self._http.get(f"{self.base_url}/readyz", timeout=self._timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        return _object(await self._bytes(method, self.base_url + path, body, self._admin, self._timeout))

    async def _bytes(
        self,
        method: str,
        url: str,
        body: Mapping[str, object] | None,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> bytes:
        data = None if body is None else orjson.dumps(body)
        all_headers = {**headers, "content-type": "application/json"} if data is not None else dict(headers)
        try:
            async with self._http.request(method, url, data=data, headers=all_headers, timeout=timeout) as response:
                reply = await response.read()
                if response.status >= 400:
                    raise _error(response.status, reply, response.headers.get("retry-after"))
                return reply
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineLost(f"session server at {self.base_url}: {type(error).__name__}: {error}") from error


def parse_chat(raw: Json) -> ChatReply:
    """Read a Chat Completions reply. Raises ``UpstreamError`` when it is not one."""
    try:
        choice = cast("list[dict[str, object]]", raw["choices"])[0]
        message = cast("dict[str, object]", choice["message"])
        usage = cast("dict[str, object]", raw["usage"])
        calls = cast("list[dict[str, dict[str, str]]]", message.get("tool_calls") or [])
        details = cast("dict[str, int]", usage.get("prompt_tokens_details") or {})
        reasoning = message.get("reasoning_content")
        return ChatReply(
            message=Message(
                role="assistant",
                content=str(message.get("content") or ""),
                reasoning=reasoning if isinstance(reasoning, str) else None,
                tool_calls=tuple(
                    ToolCall(str(call["id"]), call["function"]["name"], call["function"]["arguments"]) for call in calls
                ),
            ),
            finish_reason=str(choice["finish_reason"]),
            usage=Usage(
                cast(int, usage["prompt_tokens"]), cast(int, usage["completion_tokens"]), details.get("cached_tokens")
            ),
            raw=raw,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UpstreamError(f"not a chat completion: {error!r}") from error


def _sampling_json(sampling: Sampling) -> dict[str, object]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def _message_json(message: Message | Json) -> Json:
    if not isinstance(message, Message):
        return message
    out: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _tool_json(tool: ToolSpec | Json) -> Json:
    if not isinstance(tool, ToolSpec):
        return tool
    function: dict[str, object] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": orjson.loads(tool.parameters),
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _object(data: bytes) -> Json:
    if not data:
        return {}
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UpstreamError(f"the session server answered {len(data)} bytes that are not JSON: {error}") from error
    return cast(Json, value) if isinstance(value, dict) else {"value": value}


def _error(status: int, body: bytes, retry_after: str | None) -> TollwayError:
    """The error of the server as its own class; unknown codes fall back on the status."""
    message, code = body[:300].decode("utf-8", "replace"), ""
    inner: dict[str, object] = {}
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        inner = dict(orjson.loads(body)["error"])
        message, code = str(inner["message"]), str(inner.get("code"))
    if status == 429:
        wait_s = 1.0
        with contextlib.suppress(TypeError, ValueError):  # absent, or a date that a proxy wrote
            wait_s = float(retry_after)  # type: ignore[arg-type]  # None is the absent case
        return CapacityExceeded(message, retry_after_s=wait_s)
    if code == ContextLengthExceeded.code:
        return ContextLengthExceeded(_int(inner, "prompt_tokens") or 0, _int(inner, "limit") or 0)
    if code == VersionNotReady.code:
        return VersionNotReady(_int(inner, "wanted") or 0, _int(inner, "serving"))
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind.code == code and kind.__init__ in (TollwayError.__init__, BadRequest.__init__, EngineLost.__init__):
            return cast(TollwayError, kind(message))
    known: dict[int, type[TollwayError]] = {404: NotFound, 400: BadRequest}
    error = known.get(status, UpstreamError)(message)
    error.code, error.status = code or error.code, status
    return error


def _int(values: Json, name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None
