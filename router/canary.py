"""Does an outer gateway pass on what it does not know? Asked once, before any session depends on it.

A gateway that this process started has no other user yet: it gets a tiny engine of ours as its only worker, and
a call with odd fields must reach that engine, and its answer us, as they left. One that runs already has users,
who must not meet a false engine: there each field of a real call is sent with a wrong type, and the refusal has
to come from an engine. Depends on ``smg`` and aiohttp.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import aiohttp
import orjson
from aiohttp import web

from tollway.errors import ComponentLost, ConfigError
from tollway.router.losses import lost_words
from tollway.router.smg import Workers

__all__ = ["ROUTED_BY", "require_fields", "require_verbatim"]

ROUTED_BY = "x-smg-routed-worker-id"
"""Header of a reply that names the engine behind the gateway."""
_REMEDY = "use smg 1.13 with the line in docs/gateway.md"
_UNKNOWN = {
    "tollway_canary": {"number": 1.0, "list": [1, None, "é"], "large": 2**62},
    "return_routed_experts": True,
    "routed_experts_start_len": 1,
    "return_sampling_mask": True,
    "return_indexer_topk": True,
    "return_flat_raw_output_top_logprobs": True,
    "return_flat_raw_top_logprobs_b64": True,
    "logprob_start_len": -1,
    "extra_key": "canary",
}
_WRONG_TYPES: Mapping[str, object] = {
    "return_routed_experts": "canary",
    "return_logprob": "canary",
    "return_flat_raw_output_top_logprobs": "canary",
    "routed_experts_start_len": "canary",
    "top_logprobs_num": "canary",
}


class _Canary:
    """The least that smg takes for an engine; keeps the last body."""

    def __init__(self) -> None:
        self.body = b""
        self.reply = orjson.dumps({"output_ids": [1], "meta_info": {"canary": secrets.token_hex(8), "zero": 0.0}})
        self.url = ""
        app = web.Application(client_max_size=1 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/{any:.*}", self._describe)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, access_log=None)

    async def __aenter__(self) -> _Canary:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        self.body = await request.read()
        return web.Response(body=self.reply, content_type="application/json")

    async def _describe(self, request: web.Request) -> web.Response:
        said = {"model_path": "canary", "weight_version": "0", "context_length": 8, "dp_size": 1, "tp_size": 1}
        return web.json_response(said)


async def require_verbatim(workers: Workers, http: aiohttp.ClientSession, *, timeout_s: float) -> None:
    """Raise ``ConfigError`` when the gateway changes calls or replies, or does not say who served them.

    ``workers`` must be empty: the canary takes every call meanwhile.
    """
    body = {"rid": "tollway-canary", "input_ids": [1], "sampling_params": {"max_new_tokens": 1}, **_UNKNOWN}
    sent = orjson.dumps(body, option=orjson.OPT_INDENT_2)
    async with _Canary() as canary:
        await workers.add(canary.url, model="policy")
        status, worker, reply = await _post(workers.url, http, sent, {}, timeout_s)
        await workers.remove(canary.url)
        if status != 200 or not canary.body:
            raise ComponentLost(f"gateway {workers.url} answered {status} to a test call: {_text(reply)}")
        if canary.body != sent:
            raise ConfigError(f"gateway {workers.url} changes calls on their way: {_difference(body, canary.body)}")
        if reply != canary.reply:
            raise ConfigError(f"gateway {workers.url} changes replies on their way; {_REMEDY}")
        if worker != canary.url:
            raise ConfigError(
                f"gateway {workers.url} names {worker!r} in {ROUTED_BY}, and {canary.url} served the call"
            )


async def require_fields(
    url: str, http: aiohttp.ClientSession, headers: Mapping[str, str], *, timeout_s: float
) -> None:
    """Raise ``ConfigError`` when the gateway drops a field of our calls. An engine must be ready behind it.

    Nothing is generated as long as the engines check types, as SGLang does. Raises ``ComponentLost`` when the
    gateway has no engine now, or refuses us.
    """
    dropped, arrived = [], []
    for name, wrong in _WRONG_TYPES.items():
        body = {"rid": "tollway-canary", "input_ids": [1], "sampling_params": {"max_new_tokens": 1}, name: wrong}
        status, worker, reply = await _post(url, http, orjson.dumps(body), headers, timeout_s)
        if worker is None and status in (401, 403):
            raise ComponentLost(f"gateway {url} answered {status}: set TOLLWAY_GATEWAY_KEY to its key")
        if worker is None and status >= 500:
            raise ComponentLost(f"gateway {url} answered {status} to a test call: {_text(reply)}")
        if worker is None and status in (200, 400):
            raise ConfigError(f"gateway {url} does not name the engine of a reply in {ROUTED_BY}; {_REMEDY}")
        if status == 200:
            dropped.append(name)
        elif worker is not None:
            arrived.append(name)
    if dropped or not arrived:
        words = ", ".join(dropped or _WRONG_TYPES)
        raise ConfigError(
            f"gateway {url} drops {words} of a call on its way to the engine, which then answers without what was "
            f"asked for; {_REMEDY}"
        )


async def _post(
    url: str, http: aiohttp.ClientSession, body: bytes, headers: Mapping[str, str], timeout_s: float
) -> tuple[int, str | None, bytes]:
    """(status, engine, body) of a test call with a routing key of its own."""
    said = {"content-type": "application/json", "X-SMG-Routing-Key": f"canary-{secrets.token_hex(8)}", **headers}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with http.post(
            f"{url}/generate", data=body, headers=said, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, response.headers.get(ROUTED_BY), await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ComponentLost(f"gateway {url} does not answer: {lost_words(error)}") from error


def _difference(sent: Mapping[str, object], got: bytes) -> str:
    try:
        arrived = orjson.loads(got)
    except orjson.JSONDecodeError:
        return f"{got[:200]!r} arrived"
    lost = [name for name in sent if name not in arrived]
    if lost:
        return f"it drops {', '.join(lost)}; {_REMEDY}"
    changed = [name for name in sent if arrived[name] != sent[name]]
    if changed:
        return f"it changes {', '.join(changed)}; {_REMEDY}"
    return "it parses and writes every body again, which costs each turn its whole prompt; start it without --dp-aware"


def _text(reply: bytes) -> str:
    return reply[:300].decode("utf-8", "replace")
