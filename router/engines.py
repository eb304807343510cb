"""Client of one engine over SGLang's HTTP surface: generation, aborts, health and weight updates.

Owns the translation of transport failures: a lost connection is ``EngineLost``, the engine's 4xx is
``EngineRefused`` (context overflow ``ContextLengthExceeded``), its 503 ``EngineBusy``, other 5xx and garbage
``UpstreamError``.
It never retries, follows no redirect (which could name an address that no engine may have) and never chooses an
engine. aiohttp carries every call; the caller owns the session.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter

from tollway.errors import (
    ContextLengthExceeded,
    EngineBusy,
    EngineLost,
    EngineRefused,
    TollwayError,
    UpstreamError,
)
from tollway.router.aborts import Aborts
from tollway.router.buckets import BucketBody
from tollway.router.facts import UNKNOWN, EngineFacts
from tollway.router.losses import lost_words, nobody_listens
from tollway.router.replies import blob_names, meta_of, parse_reply
from tollway.router.said import said_text
from tollway.router.streams import Assembly, event_batches, parse_object, whole_body
from tollway.router.wire import GenerateCall, GenerateDelta, GenerateReply, Json, call_pieces

__all__ = [
    "KEEP_ALIVE_S",
    "EngineClient",
    "GenerateCall",
    "GenerateDelta",
    "GenerateReply",
    "ModelInfo",
    "PauseMode",
    "ServerInfo",
    "Timeouts",
]

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 3.0
"""How long an idle connection to an engine may be used again: stock servers close theirs after 5 s, and a
request that meets the closing looks like a lost engine."""

PauseMode = Literal["abort", "retract", "in_place"]
_JSON = {"content-type": "application/json"}
_ANSWER_BYTES = 8 << 20
"""As much as is read of any answer but a reply: a server may send without end, and longer ones are garbage."""
_REPLY_BYTES = 1 << 29
"""The same of a reply that is not streamed: expert choices of a long one are hundreds of megabytes."""
_MOST_TOKENS, _MOST_RANKS = 2**40, 1024
"""Limits above these are no limits of an engine; each rank is a target of its own."""
_LONGEST_PATH, _LONGEST_VERSION = 4096, 64
"""Characters that are kept of what an engine calls its model directory and its version."""
_SCATTER_BYTES = 65536
"""Bodies below this are joined: copying them costs less than handing their pieces to the kernel."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of an engine client, in seconds."""

    connect_s: float = 5.0
    control_s: float = 120.0
    """Weight buckets, flush, pause."""
    probe_s: float = 10.0
    """``/health``, ``/model_info`` and aborts."""
    call_s: float = 3600.0
    """Whole generation call."""
    progress_s: float = 600.0
    """Longest time without a token inside a stream."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """``GET /model_info``."""

    model_path: str
    weight_version: str
    raw: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``GET /server_info``; ``None`` where the engine does not say."""

    version: str | None
    context_length: int | None
    max_total_tokens: int | None
    """KV budget in tokens."""
    page_size: int
    dp_size: int = 1
    """Data-parallel ranks behind the one address."""
    raw: Mapping[str, object] = field(default_factory=dict)


class _Body(aiohttp.Payload):
    """JSON text in pieces, written at once however long it is.

    aiohttp warns of raw bytes above a megabyte because their write cannot be split; a prompt is in memory
    anyway, and the transport takes its pieces without joining them.
    """

    _value: list[bytes]
    _autoclose = True

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(pieces, content_type="application/json")
        self._size = sum(map(len, pieces))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        transport = writer.transport if isinstance(writer, StreamWriter) else None
        if transport is None or transport.is_closing() or (self._size or 0) < _SCATTER_BYTES:
            await writer.write(b"".join(self._value))
            return
        writer.send_headers()
        transport.writelines(self._value)
        await writer.drain()


class EngineClient:
    """Calls one engine. Safe for any number of concurrent calls.

    ``facts`` is what the engine said of itself as it joined: records name it, and shapes are checked by it.

    >>> async with aiohttp.ClientSession() as http:  # doctest: +SKIP
    ...     await EngineClient("http://127.0.0.1:30000", http).health()
    """

    def __init__(
        self,
        url: str,
        http: aiohttp.ClientSession,
        *,
        timeouts: Timeouts | None = None,
        facts: EngineFacts = UNKNOWN,
    ) -> None:
        self.url = url.rstrip("/")
        t = self.timeouts = timeouts or Timeouts()
        self.facts = facts
        self._http = http
        self._bodies: set[aiohttp.StreamReader] = set()
        """Of answers that are read now."""
        self.aborts = Aborts(self.abort, needless=lambda: http.closed)
        self._call_timeout = aiohttp.ClientTimeout(total=t.call_s, sock_connect=t.connect_s)
        self._stream_timeout = aiohttp.ClientTimeout(total=t.call_s, sock_connect=t.connect_s, sock_read=t.progress_s)
        self._control_timeout = aiohttp.ClientTimeout(total=t.control_s, sock_connect=t.connect_s)
        self._probe_timeout = aiohttp.ClientTimeout(total=t.probe_s, sock_connect=t.connect_s)

    async def aclose(self) -> None:
        """Wait for aborts that are still on their way. Does not close the shared HTTP session."""
        await self.aborts.aclose()

    def hang_up(self) -> None:
        """End every call whose answer is on its way: to close its connection does not wake who reads from it."""
        for body in list(self._bodies):
            body.set_exception(aiohttp.ClientConnectionError("the engine was given up"))

    # -- generation --------------------------------------------------------------------------------

    async def generate(self, call: GenerateCall) -> GenerateReply:
        """Run one call to its end and return the checked reply.

        Cancelling, a timeout and a reply that cannot be used abort the request on the engine. Raises
        ``EngineLost``, ``EngineRefused``, ``ContextLengthExceeded`` or ``UpstreamError``.
        """
        self._check(call)
        done = False
        try:
            async with self._post_call(call, self._call_timeout) as response:
                if response.status != 200:
                    raise self._refused(call, response.status, await self._read(response))
                body = await self._read(response, _REPLY_BYTES)
            reply = parse_reply(call, parse_object(body, blob_names(call)), facts=self.facts)
            done = True
            return reply
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._lost(error) from error
        except (EngineRefused, ContextLengthExceeded, UpstreamError):
            done = True  # the engine answered: nothing is left running there
            raise
        finally:
            if not done:
                self.aborts.later(call.rid)

    async def stream(self, call: GenerateCall) -> AsyncGenerator[GenerateDelta | GenerateReply]:
        """Yield deltas as tokens arrive; the last item is the checked ``GenerateReply`` of the whole.

        Closing the iterator early aborts the request on the engine. Errors as ``generate``; a stream that
        ends without a finish reason is ``UpstreamError``.
        """
        self._check(call)
        done = False
        assembly = Assembly(call)
        try:
            async with self._post_call(call, self._stream_timeout) as response:
                if response.status != 200:
                    raise self._refused(call, response.status, await self._read(response))
                progressed = time.monotonic()
                with self._reading(response):
                    async for events in event_batches(response):
                        for data in assembly.worth_reading(events):
                            event = assembly.read(data)
                            if "error" in event:
                                done = True
                                raise self._refused(call, _error_status(event), data)
                            delta = assembly.add(event)
                            if delta is not None:
                                yield delta
                                progressed = time.monotonic()
                        # Bytes keep the socket's own deadline away; without a token among them they are no progress.
                        if time.monotonic() - progressed > self.timeouts.progress_s:
                            raise TimeoutError(f"no token for {self.timeouts.progress_s:g} s")
            if assembly.last is None or meta_of(assembly.last).get("finish_reason") is None:
                # It ended its answer in due form: alive, and nothing that could be recorded.
                raise UpstreamError(f"engine {self.url} ended the stream of {call.rid} without a finish reason")
            done = True
            yield parse_reply(call, assembly.whole(), facts=self.facts)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._lost(error) from error
        finally:
            if not done:
                self.aborts.later(call.rid)

    async def abort(self, rid: str) -> None:
        """End one request on the engine; unknown ids are fine there."""
        await self._post("/abort_request", {"rid": rid}, probe=True)

    async def abort_all(self) -> None:
        """End every request on the engine."""
        await self._post("/abort_request", {"abort_all": True}, probe=True)

    # -- state -------------------------------------------------------------------------------------

    async def health(self) -> bool:
        """``GET /health``. False when it answers anything but 200; raises ``EngineLost`` when it cannot answer."""
        return await self._status("/health") == 200

    async def health_generate(self) -> bool:
        """``GET /health_generate``: one real token. Same errors as ``health``."""
        return await self._status("/health_generate") == 200

    async def ready(self) -> bool | None:
        """``GET /ready``: False while it is paused or unwell; ``None`` when the server does not offer to say."""
        return {200: True, 503: False}.get(await self._status("/ready"))

    async def model_info(self) -> ModelInfo:
        """What is served, and the weight version stamped on it."""
        raw = await self._get("/model_info")
        path, version = said_text(raw.get("model_path", ""), _LONGEST_PATH), raw.get("weight_version", "")
        return ModelInfo(path, said_text(version, _LONGEST_VERSION), raw)

    async def server_info(self) -> ServerInfo:
        """Limits of the engine."""
        raw = await self._get("/server_info")
        version = raw.get("version")
        return ServerInfo(
            version=version if isinstance(version, str) else None,
            context_length=_limit(self.url, raw, "context_length", "max_req_input_len"),
            max_total_tokens=_limit(self.url, raw, "max_total_num_tokens", "max_total_tokens"),
            page_size=_limit(self.url, raw, "page_size") or 1,
            dp_size=_limit(self.url, raw, "dp_size", most=_MOST_RANKS) or 1,
            raw=raw,
        )

    async def metrics(self, *names: str) -> dict[str, list[float]]:
        """Values of Prometheus series of ``GET /metrics`` over all their labels; empty where it has no such series."""
        status, data = await self._answer("GET", "/metrics", self._probe_timeout)
        if status != 200:
            raise _control_error(self.url, "/metrics", status, data)
        return _series(data, names)

    # -- weights -----------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: ``abort`` ends requests, ``retract`` requeues them, ``in_place`` freezes them."""
        if mode not in ("abort", "retract", "in_place"):
            raise EngineRefused(f"unknown pause mode {mode!r}; use abort, retract or in_place", upstream_status=400)
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._post("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop the prefix cache; the engine refuses while requests hold KV."""
        await self._post("/flush_cache", {})

    async def begin_weight_update(self, selector: Literal["all", "target", "draft"] = "all") -> None:
        """Open a weight session; a second one is refused."""
        await self._post("/begin_weight_update", {"selector": selector}, confirmed=True)

    async def end_weight_update(self) -> None:
        """Close the weight session."""
        await self._post("/end_weight_update", {}, confirmed=True)

    async def update_weights_from_tensor(
        self, payload: bytes, *, load_format: str | None = "flattened_bucket", tp_size: int = 1
    ) -> None:
        """Load one serialised bucket; the same payload goes to every tensor-parallel rank. Never flushes."""
        body = BucketBody(payload, load_format=load_format, ranks=tp_size)
        await self._post("/update_weights_from_tensor", body, confirmed=True)

    async def update_weights_from_disk(self, path: str, version: int | None = None) -> None:
        """Load a model directory that the engine can read; it rolls back by itself. Never flushes."""
        stamp = {} if version is None else {"weight_version": str(version)}
        body = {"model_path": path, "flush_cache": False, **stamp}
        await self._post("/update_weights_from_disk", body, confirmed=True)

    async def set_weight_version(self, version: int) -> None:
        """Stamp the weights; running requests go on."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._post("/update_weight_version", body, confirmed=True)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give back ``kv_cache``, ``weights``, ``cuda_graph`` with their content; idle or retracted, each once."""
        await self._post("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory of released ``tags`` again, and of no other: a stock server dies of one that it has."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)})

    # -- transport ---------------------------------------------------------------------------------

    async def _post(
        self, path: str, body: Mapping[str, object] | BucketBody, *, probe: bool = False, confirmed: bool = False
    ) -> None:
        """A control call; of one to be ``confirmed`` the answer must say so: a bare 200 loads no weights."""
        timeout = self._probe_timeout if probe else self._control_timeout
        sent = body if isinstance(body, BucketBody) else orjson.dumps(body)
        status, data = await self._answer("POST", path, timeout, sent)
        if status != 200:
            raise _control_error(self.url, path, status, data)
        # Some update routes answer 200 with success false.
        answer = parse_object(data) if confirmed or data.startswith(b"{") else {}
        if answer.get("success") is False:
            raise _control_error(self.url, path, 400, data)
        if confirmed and answer.get("success") is not True:
            raise UpstreamError(f"engine {self.url} answered 200 to {path} without saying success: {_error_text(data)}")

    async def _get(self, path: str) -> Json:
        status, data = await self._answer("GET", path, self._probe_timeout)
        if status != 200:
            raise _control_error(self.url, path, status, data)
        return parse_object(data)

    async def _status(self, path: str) -> int:
        return (await self._answer("GET", path, self._probe_timeout))[0]

    async def _answer(
        self,
        method: Literal["GET", "POST"],
        path: str,
        timeout: aiohttp.ClientTimeout,
        body: bytes | BucketBody | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of a call that generates nothing for anybody."""
        headers = None if body is None else _JSON
        try:
            async with self._http.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await self._read(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._lost(error) from error

    def _post_call(
        self, call: GenerateCall, timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        # A redirect would send the call a second time, or to a stranger.
        return self._http.post(
            f"{self._call_base()}/generate",
            data=_Body(call_pieces(call)),
            headers=self._call_headers(call.routing_key),
            timeout=timeout,
            allow_redirects=False,
        )

    def _refused(self, call: GenerateCall, status: int, body: bytes) -> TollwayError:
        """The error for an answer other than 200."""
        return _refusal(self.url, call, status, body)

    def _call_base(self) -> str:
        """Where generation calls go."""
        return self.url

    def _call_headers(self, routing_key: str) -> dict[str, str]:
        return {"content-type": "application/json", "X-SMG-Routing-Key": routing_key}

    def _check(self, call: GenerateCall) -> None:
        """Refuse what this engine's replies could not be checked for."""
        for asked, shape, what in (
            (call.return_routed_experts, self.facts.route_shape, "routed experts (num_experts_per_tok)"),
            (call.return_indexer_topk, self.facts.indexer_shape, "indexer choices (index_topk)"),
        ):
            if asked and shape is None:
                raise EngineRefused(
                    f"the model of engine {self.url} has no {what} as far as it and its config.json say; "
                    "do not ask for them with this model",
                    upstream_status=400,
                )

    async def _read(self, response: aiohttp.ClientResponse, most: int = _ANSWER_BYTES) -> bytes:
        """The body, or its first ``most`` bytes and a bit: whoever parses it says that it is broken."""
        with self._reading(response):
            return await whole_body(response, most)

    @contextmanager
    def _reading(self, response: aiohttp.ClientResponse) -> Iterator[None]:
        """``hang_up`` reaches whoever reads ``response`` meanwhile."""
        self._bodies.add(response.content)
        try:
            yield
        finally:
            self._bodies.discard(response.content)

    def _lost(self, error: BaseException) -> EngineLost:
        words, timed_out = f"engine {self.url}: {lost_words(error)}", isinstance(error, TimeoutError)
        return EngineLost(words, refused=nobody_listens(error), timed_out=timed_out)


def _limit(url: str, raw: Json, *names: str, most: int = _MOST_TOKENS) -> int | None:
    """The first of ``names`` that is a positive integer. Raises ``UpstreamError`` for one beyond ``most``."""
    for name in names:
        value = raw.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if value > most:
                raise UpstreamError(f"engine {url} says {name} {value}, want {most} at most")
            return value
    return None


def _refusal(url: str, call: GenerateCall, status: int, body: bytes) -> TollwayError:
    text = _error_text(body)
    if 400 <= status < 500:
        if "longer than the model's context length" in text or "context length" in text.lower():
            return ContextLengthExceeded(call.prompt.size, _limit_in(text))
        return EngineRefused(f"engine {url} refused: {text}", upstream_status=status)
    kind = EngineBusy if status == 503 else UpstreamError
    return kind(f"engine {url} answered {status}: {text}")


def _control_error(url: str, path: str, status: int, body: bytes) -> TollwayError:
    text = f"engine {url} answered {status} to {path}: {_error_text(body)}"
    return EngineRefused(text, upstream_status=status) if 400 <= status < 500 else UpstreamError(text)


def _series(data: bytes, names: Sequence[str]) -> dict[str, list[float]]:
    """Values of Prometheus series over all their labels."""
    value = rb"(?:\{[^\n]*\})? ([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*$"
    return {
        name: [float(found) for found in re.findall(rb"^" + re.escape(name.encode()) + value, data, re.MULTILINE)]
        for name in names
    }


def _error_status(chunk: Json) -> int:
    error = chunk.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _error_text(body: bytes) -> str:
    """Human part of an error body, shortened."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode("utf-8", "replace")
    if isinstance(value, dict):
        value = value.get("error", value)
        if isinstance(value, dict):
            value = value.get("message", value)
    return said_text(value, 500)


def _limit_in(text: str) -> int:
    numbers = [int(number) for number in re.findall(r"(?<!\d)\d{1,9}(?!\d)", text)]
    return numbers[-1] if numbers else 0
