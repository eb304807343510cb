"""A scripted engine for tests: SGLang's HTTP surface on a real socket, replies of your choice.

It logs every body, header and control call, keeps a real prefix cache over what it has seen, and can be
made to stall, break, lie or die. Ships with the package so that users can test against it; the server never
imports it. Depends on aiohttp and numpy.

>>> async with FakeEngine() as engine:  # doctest: +SKIP
...     engine.script = lambda request: FakeReply(ids=[104, 105, 261])
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import cast

import numpy as np
import orjson
from aiohttp import web

__all__ = ["FakeEngine", "FakeReply", "FakeRequest", "Script"]

_HEAD = b'{"input_ids":['
_MOST_MASKED = 1024
"""Largest ``top_k`` with a sampling mask."""


class FakeRequest:
    """One ``/generate`` call as the engine got it. Its ids are parsed when somebody looks at them."""

    def __init__(self, raw: bytes, headers: Mapping[str, str], number: int) -> None:
        self.headers = headers
        self.number = number
        """Counts calls from 0."""
        self._ids = b""
        if raw.startswith(_HEAD):
            end = raw.index(b"]")
            self._ids = raw[len(_HEAD) : end]
            self.body: Mapping[str, object] = orjson.loads(b"{" + raw[end + 2 :])
            """Everything but the ids."""
        else:
            whole = cast("dict[str, object]", orjson.loads(raw))
            self._ids = orjson.dumps(whole.pop("input_ids"))[1:-1]
            self.body = whole
        self.rid = str(self.body["rid"])

    @cached_property
    def input_ids(self) -> list[int]:
        """The whole prompt."""
        return cast("list[int]", orjson.loads(b"[" + self._ids + b"]"))

    @cached_property
    def prompt_tokens(self) -> int:
        """Length of the prompt, counted without parsing it."""
        return int(np.count_nonzero(np.frombuffer(self._ids, np.uint8) == ord(","))) + 1 if self._ids else 0


@dataclass(slots=True)
class FakeReply:
    """What the engine shall answer."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """By default a function of position and id, so that a swapped value shows."""
    finish: str = "stop"
    matched: int | str | None = None
    """By default the last id of a stop."""
    versions: Sequence[tuple[str, int, int]] | None = None
    """(version, start, end); by default the engine's version over everything."""
    delay_s: float = 0.0
    """Before anything is sent; in streams also between tokens."""
    chunk: int = 1
    """Tokens per stream event."""
    top: Sequence[Sequence[tuple[float, int]]] | None = None
    routes: bytes | None = None
    indexer: bytes | None = None
    mask: Sequence[Sequence[int]] | None = None
    """Ids that could have been drawn, per token; by default the id and two more."""
    cached_tokens: int | None = None
    """By default what the prefix cache says."""
    edit: Callable[[dict[str, object]], None] | None = None
    """Changes the finished JSON, to lie."""
    status: int = 200
    error: str = ""
    """With ``status`` other than 200."""
    raw: bytes | None = None
    """Sent instead of any JSON, or of the events of a stream: what a benchmark has made beforehand."""
    drop_after: int | None = None
    """Close the connection after so many stream events (0: before the first byte)."""
    incremental: bool = False
    """Stream increments instead of cumulative lists, as SGLang does when so started."""


Script = Callable[[FakeRequest], FakeReply]


@dataclass(slots=True)
class _Running:
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """One engine on a free loopback port."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        version: str = "0",
        context_length: int = 32768,
        page_size: int = 1,
        route_shape: tuple[int, int] | None = None,
        indexer_shape: tuple[int, int] | None = None,
        keep_requests: bool = True,
    ) -> None:
        self.script: Script = script or (lambda request: FakeReply(ids=[111, 107, 261]))
        self.version = version
        self.precision = "float32"
        self.context_length = context_length
        self.page_size = page_size
        self.route_shape = route_shape
        """(layers, experts per token) of a mixture-of-experts model."""
        self.indexer_shape = indexer_shape
        """(layers, top_k) of a model with a sparse-attention indexer."""
        self.keep_requests = keep_requests
        """False: ``requests`` and ``replies`` stay empty, so that a long benchmark does not fill the memory."""
        self.requests: list[FakeRequest] = []
        self.replies: dict[str, list[int]] = {}
        """Request id -> ids that were returned."""
        self.aborts: list[str] = []
        self.control: list[tuple[str, Mapping[str, object]]] = []
        self.health_status = 200
        self.health_delay_s = 0.0
        self.health_calls = 0
        self.most_health_calls = 0
        """Most probes that were outstanding at once."""
        self.model_info_calls = 0
        """How often somebody asked for the version that it serves."""
        self.metrics_text = ""
        self.ready_status = 200
        """Of ``/ready``: 503 while paused; anything else but 200 says nothing."""
        self.said: dict[str, object] = {}
        """What ``/server_info`` says, over what it says by itself."""
        self.control_status: dict[str, int] = {}
        """Path -> status that a control call answers."""
        self.dp_size = 1
        """Data-parallel ranks that it says it has."""
        self.kv_tokens: int | None = None
        """KV room that it says it has; ``None``: it does not say."""
        self.in_flight = 0
        self._cache: list[tuple[FakeRequest, list[int]] | np.ndarray] = []
        """Sequences seen; those that nobody looked for a prefix in are not parsed yet."""
        self._calls = 0
        self._running: dict[str, _Running] = {}
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._port = 0
        self._health_now = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after ``stop`` on the same port again, with an empty cache."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/{control}", self._control)
        self._cache.clear()
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await self._site.start()
        server = self._runner.addresses[0]
        self._port = int(server[1])

    async def stop(self) -> None:
        """Die: close the port and every connection."""
        for running in self._running.values():
            running.aborted.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def sent(self, rid: str) -> list[int]:
        """Ids that call ``rid`` brought."""
        return next(request.input_ids for request in self.requests if request.rid == rid)

    def flush(self) -> None:
        """Empty the prefix cache."""
        self._cache.clear()

    # -- generation --------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        request = FakeRequest(await http.read(), http.headers, self._calls)
        self._calls += 1
        if self.keep_requests:
            self.requests.append(request)
        running = self._running[request.rid] = _Running()
        self.in_flight += 1
        try:
            return await self._answer(http, request, self.script(request), running)
        finally:
            self.in_flight -= 1
            del self._running[request.rid]

    async def _answer(
        self, http: web.Request, request: FakeRequest, reply: FakeReply, running: _Running
    ) -> web.StreamResponse:
        if (words := _refusal(request)) is not None:
            return _json({"error": {"message": words}}, 400)
        streaming = bool(request.body.get("stream"))
        if not streaming or reply.status != 200:
            await _pause(reply.delay_s, running)
        if reply.status != 200:
            return _json({"error": {"message": reply.error}}, reply.status)
        if reply.raw is not None:
            kind = "text/event-stream" if streaming else "application/json"
            return web.Response(body=reply.raw, content_type=kind)
        if running.aborted.is_set() and not streaming:
            reply = FakeReply(ids=[], finish="abort")
        cached = self._cached(request) if reply.cached_tokens is None else reply.cached_tokens
        if self.keep_requests or reply.cached_tokens is None:
            self._cache.append((request, list(reply.ids)))
        if self.keep_requests:
            self.replies[request.rid] = list(reply.ids)
        if not streaming:
            if reply.drop_after is not None:
                _cut(http)
            return _json(self._whole(request, reply, cached, len(reply.ids), done=True))
        return await self._stream(http, request, reply, running, cached)

    async def _stream(
        self, http: web.Request, request: FakeRequest, reply: FakeReply, running: _Running, cached: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        events, at = 0, 0
        if reply.drop_after == 0:
            _cut(http)
        await response.prepare(http)
        while at < len(reply.ids):
            before, at = at, min(at + reply.chunk, len(reply.ids))
            await _pause(reply.delay_s, running)
            if running.aborted.is_set():
                break
            value = self._whole(request, reply, cached, at, done=at == len(reply.ids))
            if reply.incremental:
                _only_new(value, before)
            await response.write(b"data: " + orjson.dumps(value) + b"\n\n")
            events += 1
            if reply.drop_after is not None and events >= reply.drop_after:
                _cut(http)
                return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _whole(
        self, request: FakeRequest, reply: FakeReply, cached: int, count: int, *, done: bool
    ) -> dict[str, object]:
        ids = list(reply.ids)[:count]
        logprobs = reply.logprobs or [-(1 + (at * 31 + token) % 97) / 100 for at, token in enumerate(ids)]
        spans = reply.versions or [(self.version, 0, len(reply.ids))]
        meta: dict[str, object] = {
            "id": request.rid,
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": cached,
            "output_token_logprobs": [[p, token, None] for p, token in zip(logprobs, ids, strict=False)],
            "finish_reason": _finish(reply) if done else None,
            "weight_version": self.version,
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans]
            if done
            else None,
        }
        meta |= _tops(request, reply, ids)
        if request.body.get("return_sampling_mask"):
            masks = [list(row) for row in reply.mask or [[token, token + 1, token + 2] for token in ids]][:count]
            meta["output_token_sampling_mask"] = masks
            meta["output_token_sampling_logprobs"] = [-(1 + token % 7) / 10 for token in ids]
            meta["output_token_sampling_mask_length"] = len(masks)
        if request.body.get("return_routed_experts") and done:
            meta["routed_experts"] = base64.b64encode(self._routes(request, reply)).decode()
        if request.body.get("return_indexer_topk") and done:
            meta["indexer_topk"] = base64.b64encode(_indexer(request, reply, self.indexer_shape or (2, 4))).decode()
        value: dict[str, object] = {"text": "", "output_ids": ids, "meta_info": meta}
        if done and reply.edit is not None:
            reply.edit(value)
        return value

    def _routes(self, request: FakeRequest, reply: FakeReply) -> bytes:
        if reply.routes is not None:
            return reply.routes
        layers, top_k = self.route_shape or (2, 2)
        start = int(cast(int, request.body.get("routed_experts_start_len", 0)))
        sequence = np.array([*request.input_ids, *reply.ids][:-1][start:], np.int64)
        at = np.arange(start, start + sequence.size)
        base = (sequence * 7 + at * 13)[:, None, None] + np.arange(layers)[:, None] * 3 + np.arange(top_k)
        return (base % 8).astype("<i4").tobytes()

    def _cached(self, request: FakeRequest) -> int:
        best, prompt = 0, np.array(request.input_ids, np.int64)
        for at in range(len(self._cache)):
            known = self._sequence(at)
            size = min(known.size, prompt.size - 1)
            if size > best:
                different = np.flatnonzero(known[:size] != prompt[:size])
                best = max(best, int(different[0]) if different.size else size)
        return best // self.page_size * self.page_size

    def _sequence(self, at: int) -> np.ndarray:
        entry = self._cache[at]
        if isinstance(entry, np.ndarray):
            return entry
        request, sampled = entry
        known = self._cache[at] = np.array([*request.input_ids, *sampled][:-1], np.int64)
        return known

    # -- control -----------------------------------------------------------------------------------

    async def _abort(self, http: web.Request) -> web.Response:
        body = cast("dict[str, object]", orjson.loads(await http.read()))
        rid = str(body.get("rid", ""))
        self.aborts.append(rid)
        for name, running in self._running.items():
            if name == rid or body.get("abort_all"):
                running.aborted.set()
        return web.Response()

    async def _control(self, http: web.Request) -> web.Response:
        path = f"/{http.match_info['control']}"
        body = cast("dict[str, object]", orjson.loads(await http.read() or b"{}"))
        self.control.append((path, body))
        status = self.control_status.get(path, 200)
        if status != 200:
            return _json({"success": False, "message": f"{path} refused"}, status)
        if path == "/update_weight_version":
            self.version = str(body["new_version"])
        if path == "/flush_cache":
            self.flush()
        return _json({"success": True, "message": ""})

    async def _health(self, http: web.Request) -> web.Response:
        self.health_calls += 1
        self._health_now += 1
        self.most_health_calls = max(self.most_health_calls, self._health_now)
        try:
            await asyncio.sleep(self.health_delay_s)
        finally:
            self._health_now -= 1
        return web.Response(status=self.health_status)

    async def _ready(self, http: web.Request) -> web.Response:
        return web.Response(status=self.ready_status)

    async def _model_info(self, http: web.Request) -> web.Response:
        self.model_info_calls += 1
        info: dict[str, object] = {"model_path": "fake", "weight_version": self.version}
        if self.route_shape is not None:
            info |= {"num_hidden_layers": self.route_shape[0], "num_experts_per_tok": self.route_shape[1]}
        if self.indexer_shape is not None:
            info |= {"num_indexer_layers": self.indexer_shape[0], "index_topk": self.indexer_shape[1]}
        return _json(info)

    async def _server_info(self, http: web.Request) -> web.Response:
        return _json(
            {
                "engine": "fake",
                "version": "fake",
                "dtype": self.precision,
                "context_length": self.context_length,
                "page_size": self.page_size,
                "dp_size": self.dp_size,
                **({} if self.kv_tokens is None else {"max_total_num_tokens": self.kv_tokens}),
                **self.said,
            }
        )

    async def _metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=self.metrics_text)


_TYPES = {
    "return_logprob": bool,
    "top_logprobs_num": int,
    "return_flat_raw_output_top_logprobs": bool,
    "return_routed_experts": bool,
    "routed_experts_start_len": int,
}
"""Fields whose types are checked, as SGLang does."""


def _refusal(request: FakeRequest) -> str | None:
    params = cast("dict[str, int]", request.body["sampling_params"])
    for name, kind in _TYPES.items():
        if name in request.body and not isinstance(request.body[name], kind):
            return f"{name}: want {kind.__name__}"
    if params.get("temperature", 1) < 0:
        return f"temperature must be non-negative, got {params['temperature']}"
    top_k = params.get("top_k", -1)
    if request.body.get("return_sampling_mask") and not 1 <= top_k <= _MOST_MASKED:
        return f"return_sampling_mask requires 1 <= top_k <= {_MOST_MASKED}; got top_k={top_k}."
    return None


def _indexer(request: FakeRequest, reply: FakeReply, shape: tuple[int, int]) -> bytes:
    if reply.indexer is not None:
        return reply.indexer
    layers, top_k = shape
    at = np.arange(request.prompt_tokens + max(len(reply.ids), 1) - 1)[:, None, None]
    chosen = at - np.arange(layers)[:, None] - np.arange(top_k)
    rows: np.ndarray = np.maximum(chosen, -1)
    return rows.astype("<i4").tobytes()


def _finish(reply: FakeReply) -> dict[str, object]:
    if reply.finish == "stop":
        last = reply.ids[-1] if reply.ids else None
        return {"type": "stop", "matched": reply.matched if reply.matched is not None else last}
    if reply.finish == "length":
        return {"type": "length", "length": len(reply.ids)}
    return {"type": reply.finish, "message": "aborted"}


async def _pause(seconds: float, running: _Running) -> None:
    if seconds > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.aborted.wait(), seconds)


def _cut(http: web.Request) -> None:
    if http.transport is not None:
        http.transport.abort()


def _only_new(value: dict[str, object], before: int) -> None:
    meta = cast("dict[str, list[object]]", value["meta_info"])
    value["output_ids"] = cast("list[int]", value["output_ids"])[before:]
    for name in (
        "output_token_logprobs",
        "output_top_logprobs",
        "output_token_sampling_mask",
        "output_token_sampling_logprobs",
    ):
        if name in meta:
            meta[name] = meta[name][before:]


def _tops(request: FakeRequest, reply: FakeReply, ids: Sequence[int]) -> dict[str, object]:
    """Top log-probabilities of the first tokens, as arrays when asked for and when the rows are rectangular."""
    k = cast(int, request.body.get("top_logprobs_num", 0))
    if not k:
        return {}
    rows = reply.top or [[(-0.5 - column, token + column) for column in range(k)] for token in ids]
    rows = [list(row) for row in rows[: len(ids)]]
    if not request.body.get("return_flat_raw_output_top_logprobs") or {len(row) for row in rows} != {k}:
        return {"output_top_logprobs": [[[p, t, None] for p, t in row] for row in rows]}
    flat = {
        "val": np.array([[p for p, _ in row] for row in rows], "<f4"),
        "idx": np.array([[t for _, t in row] for row in rows], "<i4"),
    }
    fields: dict[str, object] = {"output_top_logprobs_shape": [len(rows), k], "output_top_logprobs_null_prefix": 0}
    for name, array in flat.items():
        fields[f"output_top_logprobs_{name}_flat_b64"] = base64.b64encode(array.tobytes()).decode()
        fields[f"output_top_logprobs_{name}_flat_b64_dtype"] = "float32" if name == "val" else "int32"
    return fields


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
