"""Every route but the chat path: sessions, exports, rewards, engines, cache, health.

Each route parses, calls one method and renders. Sessions answer to their token or to the admin key; the
rest is for the admin key only, health and metrics are open on loopback. Depends on ``gateway``.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, TypeVar, cast

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tollway.errors import BadRequest, NotFound
from tollway.router.fleet import Membership
from tollway.router.targets import Wanted
from tollway.router.versions import narrowed
from tollway.session_server import auth
from tollway.session_server.columns import pack_rows, rows_to_json
from tollway.session_server.config import ServerConfig
from tollway.session_server.export import ExportFacts, ExportPolicy, export_rows
from tollway.session_server.fanout import FLEET_PATH, Notice
from tollway.session_server.forward import from_sibling
from tollway.session_server.gateway import Gateway
from tollway.session_server.http import found, header, read_body
from tollway.session_server.journal import Read
from tollway.session_server.metrics import metrics_text
from tollway.session_server.rows import TURN_COLUMNS, turn_from_row
from tollway.session_server.session import Outcome, Session, Settings

__all__ = ["router"]

router = APIRouter()
_M = TypeVar("_M", bound=BaseModel)
_LOOPBACK = ("127.0.0.1", "::1")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingBody(_Body):
    """Sampling of a session; set fields win over what a harness sends."""

    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    """-1 and 0 keep the whole vocabulary."""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=2.0)
    max_new_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=32)
    stop_token_ids: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = []

    @field_validator("top_k")
    @classmethod
    def _whole_vocabulary(cls, value: int | None) -> int | None:
        return -1 if value == 0 else value


class CreateBody(_Body):
    """``POST /sessions``; everything is optional."""

    model: str = ""
    task_id: str = ""
    group_id: str = ""
    parent_id: str = ""
    """Open or closed session of this server that started this one; both then live on one engine."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher ones are first wherever calls wait."""
    ttl_s: float | None = Field(default=None, gt=0, le=31_536_000)
    sampling: SamplingBody = SamplingBody()
    min_version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    exact_version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    metadata: dict[str, str | int | float | bool | None] = {}
    branches: Literal["all", "main"] = "all"
    """Which leaves the export has: all, or of each conversation with tools the one that was continued last."""
    side_requests: Literal["mark", "train", "drop"] | None = None
    """Conversations without tools beside one with tools; by default as the server is configured."""


class RewardBody(_Body):
    """``POST /sessions/{id}/reward``"""

    reward: float | None = Field(strict=True)
    error: str | None = None
    details: dict[str, object] = {}


class EngineBody(_Body):
    """``POST /engines``"""

    url: str
    model: str = Field(default="", max_length=200)
    """Name of its model in the fleet; empty for the policy."""
    max_in_flight: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Calls that it may run at once."""
    frozen: bool = False
    """No trainer brings it weights: it serves with the version that it has."""
    stale: bool = False
    """Its weights are those that it was started with: it waits for newer ones where a trainer brings any."""


class RefitBody(_Body):
    """``POST /engines/{id}/refit``"""

    version: int | None = Field(ge=0, le=2**31 - 1)
    """``None``: it was flushed and has the weights that it had."""
    flushed: bool
    phase: Literal["paused", "resumed", "failed"] | None = None
    """It generates nothing, goes on at once, or holds half-loaded weights and takes no call until it has whole ones."""
    reason: str = Field(default="", max_length=2000)
    """Why it failed."""


def gateway_of(request: Request) -> Gateway:
    """The gateway behind this app."""
    gateway = request.app.state.gateway
    if not isinstance(gateway, Gateway):
        raise TypeError("app.state.gateway is not set")
    return gateway


def token_of(request: Request) -> str | None:
    """Credential of a request."""
    return auth.credential(request.headers.raw)


async def admin(request: Request) -> Gateway:
    """The gateway, for the admin key only."""
    gateway = gateway_of(request)
    if not gateway.is_admin(token_of(request)):
        raise auth.admin_only()
    return gateway


async def local(request: Request) -> Gateway:
    """The gateway, for loopback or the admin key."""
    gateway = gateway_of(request)
    if request.client is not None and request.client.host not in _LOOPBACK and not gateway.is_admin(token_of(request)):
        raise auth.admin_only()
    return gateway


async def anyone(request: Request) -> Gateway:
    """The gateway, for the admin key or any session's token."""
    gateway = gateway_of(request)
    if not gateway.is_admin(token_of(request)):
        await gateway.session_of_token(token_of(request))
    return gateway


async def either(request: Request, session_id: str) -> Session:
    """The session, for its token or the admin key."""
    gateway = gateway_of(request)
    token = token_of(request)
    if not gateway.is_admin(token):
        return await gateway.session_by_id(session_id, token)
    session_id = auth.session_of(session_id) or session_id
    session = await gateway.store.get(session_id)
    if session is None:
        raise NotFound(f"no session {session_id}")
    return session


Admin = Annotated[Gateway, Depends(admin)]
Anyone = Annotated[Gateway, Depends(anyone)]
Local = Annotated[Gateway, Depends(local)]
Owned = Annotated[Session, Depends(either)]


# -- sessions ---------------------------------------------------------------------------------------


@router.post("/sessions", status_code=201)
async def create(request: Request, gateway: Admin) -> Response:
    """Open a session; the token is shown once, or again to a create with the same idempotency key."""
    body = await _body(request, gateway, CreateBody)
    origin = _origin(request, gateway)
    made = await gateway.creations.once(
        header(request.headers.raw, b"idempotency-key"),
        orjson.dumps(body.model_dump()),
        lambda: _create(gateway, body, origin),
    )
    return Response(made, status_code=201, media_type="application/json")


async def _create(gateway: Gateway, body: CreateBody, origin: str) -> bytes:
    sampling = {
        name: value for name, value in body.sampling.model_dump(exclude_unset=True).items() if value is not None
    }
    narrowed(Wanted(minimum=body.min_version), Wanted(exact=body.exact_version))
    settings = Settings(
        model=gateway.model_named(body.model),
        parent_id=await gateway.parent_named(body.parent_id),
        priority=body.priority,
        sampling=sampling,
        min_version=body.min_version,
        exact_version=body.exact_version,
        metadata=body.metadata,
        branches=body.branches,
        side_requests=body.side_requests,
    )
    session, token = await gateway.store.create(
        settings, task_id=body.task_id, group_id=body.group_id, ttl_s=body.ttl_s
    )
    base = f"{origin}/sessions/{session.session_id}"
    return orjson.dumps(
        {
            "session_id": session.session_id,
            "token": token,
            "base_url": base,
            "openai_base_url": f"{base}/v1",
            "anthropic_base_url": base,
            "expires_at": session.expires_at,
        }
    )


@router.get("/sessions/{session_id}")
async def show(request: Request, session: Owned) -> Response:
    """State, tree, counters and cache figures."""
    cache = gateway_of(request).router.ledger.session(session.session_id)
    return _json({**session.describe(), "cache": cache})


@router.head("/sessions/{session_id}")
@router.head("/")
async def reachable() -> Response:
    """What some harnesses send, without credential, before their first call. Says nothing about sessions."""
    return Response(status_code=200)


@router.get("/sessions/{session_id}/trajectories")
async def trajectories(
    request: Request,
    session: Owned,
    format: Literal["safetensors", "json"] = "safetensors",  # noqa: A002 - the query's name
) -> Response:
    """The export, built off the event loop from what the journal holds."""
    gateway = gateway_of(request)
    async with gateway.store.visit(session):
        data = await gateway.journal.use(lambda read: _export(read, session, gateway.config, format))
    kind = "application/octet-stream" if format == "safetensors" else "application/json"
    return Response(data, media_type=kind)


@router.post("/sessions/{session_id}/reward")
async def reward(request: Request, session_id: str, gateway: Admin) -> Response:
    """Record the outcome of the episode, once."""
    body = await _body(request, gateway, RewardBody)
    session = await either(request, session_id)
    await gateway.store.reward(session, Outcome(reward=body.reward, error=body.error, details=body.details))
    return _json({"session_id": session_id, "reward": body.reward, "error": body.error})


@router.post("/sessions/{session_id}/close")
async def close(request: Request, session: Owned) -> Response:
    """End the session and keep its record."""
    await gateway_of(request).store.close(session)
    return _json({"session_id": session.session_id, "state": session.state})


@router.delete("/sessions/{session_id}", status_code=204)
async def delete(session_id: str, gateway: Admin) -> Response:
    """Abort, forget, erase."""
    await gateway.store.delete(auth.session_of(session_id) or session_id)
    return Response(status_code=204)


# -- models -----------------------------------------------------------------------------------------


@router.get("/sessions/{session_id}/v1/models")
async def session_models(request: Request, session: Owned) -> Response:
    """The one model of a session, as both OpenAI's and Anthropic's clients read it."""
    return _models(session.settings.model or gateway_of(request).config.model_name)


@router.get("/sessions/{session_id}/v1/models/{name:path}")
async def session_model(name: str, session: Owned) -> Response:
    """A model by name; requests may name anything."""
    return _json(_model(_named(name)))


@router.get("/v1/models")
async def models(request: Request, gateway: Anyone) -> Response:
    """The same for harnesses that cannot set a path."""
    return _models(gateway.config.model_name)


@router.get("/v1/models/{name:path}")
async def model(name: str, gateway: Anyone) -> Response:
    """The same for harnesses that cannot set a path."""
    return _json(_model(_named(name)))


# -- fleet ------------------------------------------------------------------------------------------


@router.get("/engines")
async def engines(request: Request, gateway: Admin) -> Response:
    """Engines with states and loads."""
    return _json(await gateway.fanout.engines(alone=from_sibling(request.scope)))


@router.get("/engines/{engine_id}")
async def engine(request: Request, engine_id: str, gateway: Admin) -> Response:
    """One engine, with the sessions and calls that are fixed to the version that it has now."""
    gateway.router.fleet.get(engine_id)
    listed = (await gateway.fanout.engines(alone=from_sibling(request.scope)))["engines"]
    return _json(next(each for each in cast("list[dict[str, object]]", listed) if each["id"] == engine_id))


@router.post("/engines", status_code=201)
async def add_engine(request: Request, gateway: Admin) -> Response:
    """Register an engine; it serves once its weight version is confirmed."""
    body = await _body(request, gateway, EngineBody)
    membership = Membership(model=body.model, max_in_flight=body.max_in_flight, frozen=body.frozen, stale=body.stale)
    return _json(await gateway.fanout.add(body.url, membership), status=201)


@router.delete("/engines/{engine_id}", status_code=204)
async def remove_engine(engine_id: str, gateway: Admin) -> Response:
    """Forget an engine."""
    await gateway.fanout.remove(engine_id)
    return Response(status_code=204)


@router.post("/engines/{engine_id}/drain")
async def drain_engine(engine_id: str, gateway: Admin) -> Response:
    """Send it no new sessions."""
    return _json(await gateway.fanout.drain(engine_id, drained=True))


@router.post("/engines/{engine_id}/undrain")
async def undrain_engine(engine_id: str, gateway: Admin) -> Response:
    """Send it new sessions again."""
    return _json(await gateway.fanout.drain(engine_id, drained=False))


@router.post("/engines/{engine_id}/refit")
async def refit(request: Request, engine_id: str, gateway: Admin) -> Response:
    """An empty cache, new weights, or both; called before the engine continues."""
    body = await _body(request, gateway, RefitBody)
    notice = Notice(version=body.version, flushed=body.flushed, phase=body.phase, reason=body.reason)
    return _json(await gateway.fanout.refit(engine_id, notice))


@router.get("/cache")
async def cache(
    request: Request,
    gateway: Admin,
    sessions: Annotated[int, Query(ge=0, le=64, description="How many of the most wasteful sessions to list")] = 0,
) -> Response:
    """Hit rate, ceiling, efficiency, waste by cause; overall, per engine and per model."""
    return _json(await gateway.fanout.cache(sessions=sessions, alone=from_sibling(request.scope)))


@router.get(FLEET_PATH, include_in_schema=False)
async def follow_fleet(request: Request, gateway: Admin) -> Response:
    """The fleet changed; for siblings only."""
    if not from_sibling(request.scope):  # strangers are answered as if the route did not exist
        raise NotFound(f"no route {request.method} {request.url.path}")
    await gateway.fanout.follow()
    return _json({})


# -- health -----------------------------------------------------------------------------------------


@router.get("/healthz")
async def healthz(request: Request, gateway: Local) -> Response:
    """The process lives."""
    mine = {"status": "ok", **gateway.store.summary()}
    return _json(await gateway.fanout.health(mine, alone=from_sibling(request.scope)))


@router.get("/readyz")
async def readyz(request: Request, gateway: Local) -> Response:
    """Whether a turn can be served now."""
    said = await gateway.fanout.ready(alone=from_sibling(request.scope))
    return _json(said, status=200 if said["ready"] else 503)


@router.get("/metrics")
async def prometheus(gateway: Local) -> Response:
    """Prometheus text, of all workers."""
    return Response(await asyncio.to_thread(metrics_text), media_type=CONTENT_TYPE_LATEST)


# -- pieces -----------------------------------------------------------------------------------------


async def _body(request: Request, gateway: Gateway, model: type[_M]) -> _M:
    data = await read_body(request.receive, gateway.config.max_body_bytes)
    if data is None:
        # Half a body must not pass for an empty one, which opens a session.
        raise BadRequest("the client went away before the end of the body")
    try:
        body = model.model_validate_json(data or b"{}")
        orjson.dumps(body.model_dump())  # what cannot be written cannot be kept
        return body
    except TypeError as error:
        raise BadRequest(f"the body cannot be kept: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        wrong = f"{first['msg']}{found(first)}"
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            wrong = f"unknown field; known are {', '.join(model.model_fields)}"
        raise BadRequest(f"{where or 'body'}: {wrong}", param=where or None) from None


def _export(read: Read, session: Session, config: ServerConfig, kind: str) -> bytes:
    """The rows of a session as bytes; runs in the journal's reading thread."""
    turns = [
        turn_from_row(row)
        for row in read(
            f"SELECT {TURN_COLUMNS} FROM turns WHERE session_id=? ORDER BY number",  # noqa: S608 - constants
            (session.session_id,),
        )
    ]
    outcome, settings = session.outcome, session.settings
    facts = ExportFacts(
        session.session_id,
        reward=outcome.reward if outcome else None,
        error=outcome.error if outcome else None,
        task_id=session.task_id,
        group_id=session.group_id,
        metadata=settings.metadata,
    )
    policy = ExportPolicy(settings.branches, settings.side_requests or config.side_requests)
    rows = export_rows(turns, facts, policy)
    return pack_rows(rows) if kind == "safetensors" else rows_to_json(rows)


def _json(value: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def _models(name: str) -> Response:
    return _json({"object": "list", "data": [_model(name)], "first_id": name, "last_id": name, "has_more": False})


def _model(name: str) -> dict[str, object]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "tollway"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _named(name: str) -> str:
    if not name:
        raise NotFound("no model without a name; GET the same path without its last slash for the list")
    return name


def _origin(request: Request, gateway: Gateway) -> str:
    """Where harnesses find this server: as configured, else as the caller found it."""
    if gateway.config.public_url is not None:
        return gateway.config.public_url.rstrip("/")
    host = header(request.headers.raw, b"host") or ""
    if not host or not host.isascii() or not all(c.isalnum() or c in ".-_:[]" for c in host):
        raise BadRequest(f"host header {host!r} is no address", param="host")
    if (port := gateway.crew.port) is not None:
        # Straight to the worker that owns the session; a colon inside brackets belongs to the address.
        host = f"{host[: host.rfind(':')] if host.rfind(':') > host.rfind(']') else host}:{port}"
    return f"{request.url.scheme}://{host}"
