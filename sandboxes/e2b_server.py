"""An E2B-compatible front end over any sandbox provider: the control plane, and the application as a whole.

Clients are unmodified E2B SDKs that are given its address as API and sandbox URL. Every call needs the API key,
and calls into a sandbox need that sandbox's own token. Lives, limits and clean-up are the provider's; a sandbox
ends when its time is up, when it is killed, or with this server. Depends on ``base`` and its ``e2b_*`` siblings.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from tollway.errors import (
    BadImage,
    BadRequest,
    CapabilityMissing,
    CapacityExceeded,
    ConfigError,
    RateLimited,
    SandboxGone,
    TollwayError,
)
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.sandboxes.e2b_processes import Processes
from tollway.sandboxes.e2b_wire import Json, metadata_filter, moment
from tollway.sandboxes.spec import SandboxSpec

__all__ = ["ENVD_VERSION", "FrontEnd", "Lease", "application", "serve"]

logger = logging.getLogger(__name__)
ENVD_VERSION = "0.6.0"
"""What clients take the sandbox's agent for; they leave out what newer ones only can."""
_DEFAULT_TTL_S = 300.0
_LONGEST_TTL_S = 24 * 3600.0
_PIDS = 512
"""E2B has no such limit; this one only stops a fork bomb."""
_LABEL = "e2b-front-end"
_TEMPLATES = ("", "base", "default", "code-interpreter-v1")
"""Names of E2B's own templates, which stand for the provider's default."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, kw_only=True)
class Lease:
    """One sandbox as clients see it."""

    sandbox: Sandbox
    processes: Processes
    token: str
    template: str
    metadata: dict[str, str]
    started_at: float
    ends_at: float
    """Unix time."""
    timer: asyncio.TimerHandle | None = None
    paused: bool = False
    once: str | None = None
    """Idempotency key that it was created with."""

    def reply(self) -> Json:
        """The control plane's object."""
        return {
            "templateID": self.template,
            "sandboxID": self.sandbox.id,
            "clientID": "tollway",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token,
        }

    def details(self) -> Json:
        """The same as ``list`` and ``get`` show it, without the token."""
        spec = self.sandbox.spec
        shown = {key: value for key, value in self.reply().items() if key != "envdAccessToken"}
        return {
            **shown,
            "startedAt": moment(self.started_at),
            "endAt": moment(self.ends_at),
            "cpuCount": max(1, round(spec.cpu or 1)),
            "memoryMB": spec.mem_mb,
            "diskSizeMB": spec.disk_mb,
            "state": "paused" if self.paused else "running",
            "metadata": self.metadata,
        }


class FrontEnd:
    """The sandboxes of one server."""

    def __init__(self, provider: SandboxProvider, *, key: str, network: bool = False, most_processes: int = 16) -> None:
        self.provider = provider
        self.max_file_bytes = 64 << 20
        """Largest file that goes in or out."""
        self.key = key
        self.streams = provider.name != "local" or provider.config.local.mode == "session"
        """Whether all commands of a sandbox share one /tmp, by which output and input pass while they run."""
        self.network = network
        """Whether sandboxes may have a network; none has one that a client asks to be without."""
        self._most_processes = most_processes
        self._leases: dict[str, Lease] = {}
        self._once: dict[str, asyncio.Task[Lease]] = {}

    async def create(self, body: Json) -> Lease:
        """A new sandbox as the client's body describes it."""
        ttl_s = seconds(body.get("timeout"), _DEFAULT_TTL_S)
        template = str(body.get("templateID") or "base")
        metadata = _strings(body, "metadata")
        spec = SandboxSpec(
            ttl_s=ttl_s,
            labels={**metadata, _LABEL: "true"},
            image=None if template in _TEMPLATES else template,
            env=_strings(body, "envVars"),
            network=self._network(body),
            pids=_PIDS,
        )
        return self.enter(await self.provider.create(spec), template, metadata)

    def _network(self, body: Json) -> Literal["none", "public"] | tuple[str, ...]:
        wanted = body.get("network") or {}
        if not isinstance(wanted, dict):
            raise BadRequest("network is an object")
        if not self.network or body.get("allow_internet_access") is False:
            return "none"
        if not wanted.get("denyOut"):
            return "public"
        # A provider without such lists refuses, rather than let more or less through than was asked for.
        return tuple(str(host) for host in wanted.get("allowOut") or ()) or "none"

    def enter(self, sandbox: Sandbox, template: str, metadata: dict[str, str]) -> Lease:
        """Take a fresh sandbox over."""
        now = time.time()
        lease = Lease(
            sandbox=sandbox,
            processes=Processes(
                sandbox,
                most=self._most_processes,
                most_output=self.provider.config.max_output_bytes,
                streams=self.streams,
            ),
            token=secrets.token_urlsafe(24),
            template=template,
            metadata=metadata,
            started_at=now,
            ends_at=now,
        )
        self._leases[sandbox.id] = lease
        self._ends_in(lease, sandbox.spec.ttl_s)
        return lease

    async def create_once(self, key: str | None, body: Json) -> Lease:
        """``create``; calls with the same key get the same sandbox for as long as it lives."""
        if key is None:
            return await self.create(body)
        making = self._once.get(key)
        if making is None:
            making = self._once[key] = asyncio.create_task(self.create(body))
            making.add_done_callback(lambda done: done.cancelled() or (done.exception() and self._once.pop(key, None)))
        lease = await asyncio.shield(making)
        lease.once = key
        return lease

    def find(self, sandbox_id: str) -> Lease | None:
        """The live sandbox of that id."""
        lease = self._leases.get(sandbox_id)
        if lease is not None and lease.sandbox.gone:
            self._forget(lease)
            return None
        return lease

    def all(self) -> list[Lease]:
        """Every live sandbox, oldest first."""
        return [lease for lease in list(self._leases.values()) if self.find(lease.sandbox.id) is not None]

    async def set_end(self, lease: Lease, ttl_s: float, *, only_later: bool = False) -> None:
        """Move the end of a sandbox's life; with ``only_later`` a sooner one changes nothing."""
        if only_later and time.time() + ttl_s <= lease.ends_at:
            return
        await lease.sandbox.extend(ttl_s)
        self._ends_in(lease, ttl_s)

    async def kill(self, lease: Lease) -> None:
        """End a sandbox and what runs in it."""
        self._forget(lease)
        await lease.processes.end()
        await lease.sandbox.kill()

    async def aclose(self) -> None:
        """End all of them."""
        for making in self._once.values():
            making.cancel()
        await asyncio.gather(*self._once.values(), return_exceptions=True)
        await asyncio.gather(*(self.kill(lease) for lease in list(self._leases.values())))

    def _ends_in(self, lease: Lease, ttl_s: float) -> None:
        if lease.timer is not None:
            lease.timer.cancel()
        lease.ends_at = time.time() + ttl_s
        # The provider's own clock is never moved back; this one may be.
        lease.timer = asyncio.get_running_loop().call_later(ttl_s, self._expired, lease)

    def _expired(self, lease: Lease) -> None:
        self._forget(lease)
        self.provider.own(self.kill(lease))

    def _forget(self, lease: Lease) -> None:
        self._leases.pop(lease.sandbox.id, None)
        if lease.once is not None:
            self._once.pop(lease.once, None)
        if lease.timer is not None:
            lease.timer.cancel()


FRONT_END = web.AppKey("front_end", FrontEnd)
routes = web.RouteTableDef()


def application(front_end: FrontEnd) -> web.Application:
    """The whole server: control plane and the surface inside sandboxes."""
    from tollway.sandboxes import e2b_envd

    app = web.Application(middlewares=[_errors], client_max_size=front_end.max_file_bytes + (1 << 20))
    app[FRONT_END] = front_end
    app.add_routes(routes)
    app.add_routes(e2b_envd.routes)
    return app


async def serve(front_end: FrontEnd, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Listen; returns the runner, whose ``cleanup`` ends it, and the address.

    Raises ``ConfigError`` where it cannot listen.
    """
    # A client that goes away while its sandbox is being made must not leave one behind.
    runner = web.AppRunner(application(front_end), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        told = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise ConfigError(f"cannot listen on {host}:{port}: {told}; choose another --port or --host") from error
    bound = runner.addresses[0]
    shown = f"[{bound[0]}]" if ":" in str(bound[0]) else bound[0]
    return runner, f"http://{shown}:{bound[1]}"


# -- the control plane -----------------------------------------------------------------------------


@routes.post("/sandboxes")
@routes.post("/v2/sandboxes")
async def create(request: web.Request) -> web.StreamResponse:
    """A new sandbox."""
    front_end = authorized(request)
    lease = await front_end.create_once(request.headers.get("Idempotency-Key"), await body_of(request))
    return web.json_response(lease.reply(), status=201)


@routes.get("/sandboxes")
@routes.get("/v2/sandboxes")
async def listing(request: web.Request) -> web.StreamResponse:
    """Sandboxes by metadata and state, page by page."""
    front_end = authorized(request)
    wanted = metadata_filter(request.query.get("metadata")).items()
    states = {state for text in request.query.getall("state", []) for state in text.split(",")}
    found = [lease.details() for lease in front_end.all() if wanted <= lease.metadata.items()]
    found = [details for details in found if not states or details["state"] in states]
    template = request.query.get("template")
    found = [details for details in found if template in (None, details["templateID"])]
    if request.query.get("order") != "asc":
        found.reverse()
    limit, start = number(request, "limit", 100), number(request, "nextToken", 0)
    headers = {"x-next-token": str(start + limit)} if start + limit < len(found) else {}
    return web.json_response(found[start : start + limit], headers=headers)


@routes.get("/sandboxes/{id}")
async def get(request: web.Request) -> web.StreamResponse:
    """One sandbox."""
    return web.json_response({**leased(request).details(), "envdAccessToken": leased(request).token})


@routes.delete("/sandboxes/{id}")
async def kill(request: web.Request) -> web.StreamResponse:
    """The end of one."""
    lease = leased(request)
    await asyncio.shield(request.app[FRONT_END].kill(lease))
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/timeout")
async def set_timeout(request: web.Request) -> web.StreamResponse:
    """A new end, sooner or later."""
    lease = leased(request)
    await request.app[FRONT_END].set_end(lease, seconds((await body_of(request)).get("timeout"), _DEFAULT_TTL_S))
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/refreshes")
async def refresh(request: web.Request) -> web.StreamResponse:
    """A heartbeat."""
    lease = leased(request)
    ttl_s = seconds((await body_of(request)).get("duration"), _DEFAULT_TTL_S)
    await request.app[FRONT_END].set_end(lease, ttl_s, only_later=True)
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/connect")
@routes.post("/v2/sandboxes/{id}/connect")
@routes.post("/sandboxes/{id}/resume")
async def connect(request: web.Request) -> web.StreamResponse:
    """Use a sandbox again, from any process; a paused one goes on. A life never gets shorter by it."""
    lease = leased(request)
    resumed = lease.paused
    if resumed:
        await lease.sandbox.resume()
        lease.paused = False
    ttl_s = seconds((await body_of(request)).get("timeout"), _DEFAULT_TTL_S)
    await request.app[FRONT_END].set_end(lease, ttl_s, only_later=True)
    return web.json_response(lease.reply(), status=201 if resumed else 200)


@routes.post("/sandboxes/{id}/pause")
async def pause(request: web.Request) -> web.StreamResponse:
    """Freeze a sandbox, where the provider can."""
    lease = leased(request)
    if lease.paused:
        return problem(409, f"sandbox {lease.sandbox.id} is paused already")
    await lease.sandbox.pause()
    lease.paused = True
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/snapshots")
async def snapshot(request: web.Request) -> web.StreamResponse:
    """Keep a sandbox's state as a template, where the provider can."""
    return web.json_response({"snapshotID": await leased(request).sandbox.snapshot(), "names": []}, status=201)


@routes.post("/sandboxes/{id}/fork")
async def fork(request: web.Request) -> web.StreamResponse:
    """More sandboxes from a sandbox's state, where the provider can."""
    lease = leased(request)
    count = (await body_of(request)).get("count", 1)
    if not isinstance(count, int) or not 1 <= count <= 100:
        raise BadRequest("count is a number from 1 to 100")
    made = []
    for _ in range(count):
        fresh = request.app[FRONT_END].enter(await lease.sandbox.fork(), lease.template, lease.metadata)
        made.append({"sandbox": fresh.reply()})
    return web.json_response(made, status=201)


@routes.get("/sandboxes/{id}/metrics")
async def metrics(request: web.Request) -> web.StreamResponse:
    """No measurements are kept."""
    leased(request)
    return web.json_response([])


# -- shared by both surfaces -----------------------------------------------------------------------


def authorized(request: web.Request) -> FrontEnd:
    """The front end, for a caller that has the key."""
    front_end = request.app[FRONT_END]
    given = request.headers.get("X-API-Key", "")
    if not same_secret(given, front_end.key):
        raise web.HTTPUnauthorized(text="wrong or missing API key; it is what the server was started with")
    return front_end


def same_secret(given: str, wanted: str) -> bool:
    """Whether a header holds a secret; headers are any bytes."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def leased(request: web.Request) -> Lease:
    """The sandbox that the path names, for a caller that has the key."""
    lease = authorized(request).find(request.match_info["id"])
    if lease is None:
        raise web.HTTPNotFound(text=f"sandbox {request.match_info['id']} not found")
    return lease


async def body_of(request: web.Request) -> Json:
    """A JSON object, empty when there is no body."""
    if not request.can_read_body:
        return {}
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is a JSON object")
    return body


def seconds(value: object, default: float) -> float:
    """A time to live."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LONGEST_TTL_S:
        raise BadRequest(f"a time to live is a number of seconds up to {_LONGEST_TTL_S:.0f}, got {value!r}")
    return float(value)


def number(request: web.Request, name: str, default: int) -> int:
    """A whole number of the query."""
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 9:
        raise BadRequest(f"{name} is a whole number, got {text[:40]!r}")
    return int(text)


def _strings(body: Json, name: str) -> dict[str, str]:
    value = body.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in (*value, *value.values())):
        raise BadRequest(f"{name} is an object of strings")
    return value


def problem(status: int, message: str, **headers: str) -> web.Response:
    """An error as the control plane answers it."""
    return web.json_response({"code": status, "message": message}, status=status, headers=headers)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return problem(error.status, error.text or error.reason)
    except (RateLimited, CapacityExceeded) as error:
        return problem(429, str(error), **{"Retry-After": str(max(1, round(error.retry_after_s)))})
    except SandboxGone as error:
        return problem(404, str(error))
    except (BadImage, BadRequest, CapabilityMissing) as error:
        return problem(400, str(error))
    except TollwayError as error:
        logger.warning("%s %s: %s", request.method, request.path, error)
        return problem(error.status if error.status >= 500 else 500, str(error))
