"""Control routes in SGLang's shapes, and the route table.

Each handler parses, calls one operation of the service, and renders. Depends on ``service`` and ``http``.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tollway.engine.config import LAUNCH_FIELDS
from tollway.engine.generate import generate
from tollway.engine.http import Call, Handler, Reply
from tollway.engine.memory import TAGS
from tollway.engine.metrics import render
from tollway.engine.params import explain
from tollway.engine.service import EngineService
from tollway.errors import BadRequest

__all__ = ["routes"]

_B = TypeVar("_B", bound="_Body")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Abort(_Body):
    rid: str | None = None
    abort_all: bool = False


class _Pause(_Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Selector(_Body):
    selector: str = "all"


class _Update(_Body):
    flush_cache: bool = True
    weight_version: str | None = None
    load_format: str | None = None
    selector: str = "all"


class _FromTensor(_Update):
    serialized_named_tensors: list[str]


class _FromDistributed(_Update):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class _FromDisk(_Update):
    model_path: str


class _Group(_Body):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "gloo"


class _GroupName(_Body):
    group_name: str = "weight_update_group"


class _Version(_Body):
    new_version: str
    abort_all_requests: bool = True
    """True upstream too: a refit with requests in flight must send false."""


class _Tags(_Body):
    tags: list[str] | None = None


def routes(service: EngineService) -> dict[tuple[str, str], Handler]:
    """Handlers by (method, path)."""
    table: dict[tuple[str, str], Callable[[EngineService, Call], Awaitable[Reply | None]]] = {
        ("POST", "/generate"): generate,
        ("POST", "/abort_request"): _abort,
        ("POST", "/pause_generation"): _pause,
        ("POST", "/continue_generation"): _continue,
        ("POST", "/begin_weight_update"): _begin,
        ("POST", "/end_weight_update"): _end,
        ("POST", "/update_weights_from_tensor"): _from_tensor,
        ("POST", "/update_weights_from_distributed"): _from_distributed,
        ("POST", "/update_weights_from_disk"): _from_disk,
        ("POST", "/init_weights_update_group"): _init_group,
        ("POST", "/destroy_weights_update_group"): _destroy_group,
        ("POST", "/update_weight_version"): _version,
        ("POST", "/release_memory_occupation"): _release,
        ("POST", "/resume_memory_occupation"): _resume,
        ("GET", "/v1/loads"): _loads,
        ("GET", "/metrics"): _metrics,
        ("GET", "/health"): _health,
        ("GET", "/health_generate"): _health_generate,
        ("GET", "/ready"): _ready,
    }
    for method in ("GET", "POST"):
        table[method, "/flush_cache"] = _flush
        table[method, "/model_info"] = table[method, "/get_model_info"] = _model_info
        table[method, "/server_info"] = table[method, "/get_server_info"] = _server_info
    return {key: partial(handler, service) for key, handler in table.items()}


def _parse(kind: type[_B], call: Call) -> _B:
    try:
        return kind.model_validate(call.json())
    except ValidationError as error:
        raise BadRequest(explain(error)) from None


def _done(message: str) -> Reply:
    return Reply.json({"success": True, "message": message})


async def _abort(service: EngineService, call: Call) -> Reply:
    """200 with an empty body, whether or not the request exists: it may just have ended."""
    body = _parse(_Abort, call)
    if body.abort_all or body.rid:
        await service.abort(None if body.abort_all else body.rid, "Aborted by abort_request")
    return Reply()


async def _pause(service: EngineService, call: Call) -> Reply:
    await service.pause(_parse(_Pause, call).mode)
    return Reply.json({"message": "Generation paused successfully.", "status": "ok"})


async def _continue(service: EngineService, call: Call) -> Reply:
    await service.resume()
    return Reply.json({"message": "Generation continued successfully.", "status": "ok"})


async def _flush(service: EngineService, call: Call) -> Reply:
    await service.flush()
    return Reply(b"Cache flushed.\n", media_type="text/plain")


async def _begin(service: EngineService, call: Call) -> Reply:
    selector = _parse(_Selector, call).selector
    return _done(await service.scheduler.call(lambda _: service.updates.begin(selector)))


async def _end(service: EngineService, call: Call) -> Reply:
    return _done(await service.scheduler.call(lambda _: service.updates.end()))


async def _from_tensor(service: EngineService, call: Call) -> Reply:
    body = _parse(_FromTensor, call)
    if len(body.serialized_named_tensors) != 1:
        raise BadRequest(f"{len(body.serialized_named_tensors)} payloads for 1 tensor-parallel rank")
    try:
        payload = base64.b64decode(body.serialized_named_tensors[0], validate=True)
    except binascii.Error as error:
        raise BadRequest(f"serialized_named_tensors is not base64: {error}") from None
    return _done(
        await service.load_payload(payload, body.load_format, flush=body.flush_cache, version=body.weight_version)
    )


async def _from_distributed(service: EngineService, call: Call) -> Reply:
    body = _parse(_FromDistributed, call)
    if body.load_format not in (None, "flattened_bucket"):
        raise BadRequest(f"load_format {body.load_format!r} is not supported; use flattened_bucket or none")
    message = await service.load_broadcast(
        body.group_name,
        (body.names, body.dtypes, body.shapes),
        bucket=body.load_format == "flattened_bucket",
        flush=body.flush_cache,
        version=body.weight_version,
    )
    return _done(message)


async def _from_disk(service: EngineService, call: Call) -> Reply:
    body = _parse(_FromDisk, call)
    message = await service.load_disk(Path(body.model_path), flush=body.flush_cache, version=body.weight_version)
    return Reply.json({"success": True, "message": message, "num_paused_requests": 0})


async def _init_group(service: EngineService, call: Call) -> Reply:
    body = _parse(_Group, call)
    await service.join_group(
        f"{body.master_address}:{body.master_port}",
        rank=body.rank_offset,
        world_size=body.world_size,
        name=body.group_name,
        backend=body.backend,
    )
    return _done(f"joined group {body.group_name}")


async def _destroy_group(service: EngineService, call: Call) -> Reply:
    name = _parse(_GroupName, call).group_name
    service.groups.leave(name)
    return _done(f"left group {name}")


async def _version(service: EngineService, call: Call) -> Reply:
    body = _parse(_Version, call)
    if body.abort_all_requests:
        await service.abort(None, "Aborted by update_weight_version")
    await service.set_version(body.new_version)
    message = f"Weight version updated to {body.new_version}"
    return Reply.json({"success": True, "message": message, "new_version": body.new_version})


async def _release(service: EngineService, call: Call) -> Reply:
    return Reply.json({"freed_bytes": await service.release(_parse(_Tags, call).tags or TAGS)})


async def _resume(service: EngineService, call: Call) -> Reply:
    return Reply.json({"taken_bytes": await service.take_back(_parse(_Tags, call).tags or TAGS)})


async def _health(service: EngineService, call: Call) -> Reply:
    return Reply(status=503 if service.scheduler.crash is not None else 200)


async def _health_generate(service: EngineService, call: Call) -> Reply:
    return Reply(status=200 if await service.probe(timeout_s=20.0) else 503)


async def _ready(service: EngineService, call: Call) -> Reply:
    g = service.generation
    waits = g.paused or bool(g.released) or service.scheduler.crash is not None
    return Reply(status=503 if waits else 200)


async def _model_info(service: EngineService, call: Call) -> Reply:
    spec = service.generation.decoder.spec
    return Reply.json(
        {
            "model_path": str(service.updates.model_path),
            "tokenizer_path": str(service.updates.model_path),
            "is_generation": True,
            "weight_version": service.generation.version,
            "architectures": [spec.architecture],
            "model_type": "qwen3_moe" if spec.experts else "qwen3",
        }
    )


async def _server_info(service: EngineService, call: Call) -> Reply:
    g, config = service.generation, service.config
    return Reply.json(
        {
            **config.model_dump(mode="json", exclude=LAUNCH_FIELDS),
            "engine": "embedded",
            "startup_time": service.started_at,
            "dtype": str(g.decoder.dtype).removeprefix("torch."),
            "model_path": str(service.updates.model_path),
            "context_length": service.intake.context_length,
            "max_total_num_tokens": g.max_tokens,
            "weight_version": g.version,
            "vocab_size": g.decoder.spec.vocab_size,
            "num_hidden_layers": g.decoder.spec.layers,
            "num_experts_per_tok": g.decoder.spec.experts_per_token or None,
            "enable_return_routed_experts": g.decoder.spec.experts > 0,
            "disable_radix_cache": g.cache is None,
            "skip_tokenizer_init": service.codec is None,
            "tp_size": 1,
            "dp_size": 1,
            "page_size": 1,
            "version": "tollway-embedded",
            "internal_states": [
                {
                    "paused": g.paused,
                    "weight_update_session": service.updates.open,
                    "released_tags": sorted(g.released),
                    "memory_usage_bytes": service.memory_bytes(),
                }
            ],
        }
    )


async def _loads(service: EngineService, call: Call) -> Reply:
    g = service.generation
    load = {
        "dp_rank": 0,
        "num_running_reqs": g.batch.n,
        "num_waiting_reqs": len(g.waiting),
        "num_total_reqs": g.batch.n + len(g.waiting),
        "num_used_tokens": g.row_tokens,
        "max_total_num_tokens": g.max_tokens,
        "token_usage": g.row_tokens / g.max_tokens,
        "cache_hit_rate": g.stats.last_hit_rate,
        "max_running_requests": g.max_running,
    }
    return Reply.json({"timestamp": time.time(), "version": "tollway-embedded", "dp_rank_count": 1, "loads": [load]})


async def _metrics(service: EngineService, call: Call) -> Reply:
    text = render(service.generation, str(service.updates.model_path))
    return Reply(text, media_type="text/plain; version=0.0.4; charset=utf-8")
