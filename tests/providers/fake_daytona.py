"""A stand-in for Daytona's API and toolbox on the wire, over sandboxes of the local provider. It is no Daytona."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import BodyPartReader, web
from wire_faults import Faults

from tollway.errors import SandboxGone
from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.e2b_wire import moment

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FakeDaytona:
    """The service. ``machines`` is what exists now; a test that leaks finds it there."""

    provider: SandboxProvider
    faults: Faults = field(default_factory=Faults)
    machines: dict[str, Sandbox] = field(default_factory=dict)
    bodies: dict[str, dict] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    async def start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._watched], client_max_size=1 << 28)
        app.router.add_post("/api/sandbox", self.create)
        app.router.add_get("/api/sandbox", self.list)
        app.router.add_get("/api/sandbox/{id}", self.get)
        app.router.add_delete("/api/sandbox/{id}", self.delete)
        app.router.add_post("/api/sandbox/{id}/ttl/{minutes}", self.ttl)
        app.router.add_post("/toolbox/{id}/process/execute", self.execute)
        app.router.add_post("/toolbox/{id}/files/bulk-upload", self.upload)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    @web.middleware
    async def _watched(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != "Bearer key":
            return error(401, "no such key")
        planned = await self.faults.strike(request.method, request.path)
        if planned is not None:
            return planned
        answer = await handler(request)
        return await self.faults.after(request.method, request.path) or answer

    def shown(self, name: str) -> dict:
        body = self.bodies[name]
        return {
            "id": name,
            "organizationId": "org",
            "name": name,
            "user": "daytona",
            "env": body.get("env") or {},
            "labels": body.get("labels") or {},
            "public": False,
            "networkBlockAll": bool(body.get("networkBlockAll")),
            "kvm": False,
            "target": "us",
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "state": "started",
            "autoDestroyAt": moment(body["ends"]),
            "toolboxProxyUrl": f"{self.url}/toolbox",
        }

    async def create(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "no-such" in str(body.get("snapshot")) or "no-such" in str(body.get("buildInfo")):
            return error(400, "image or snapshot not found")
        # The local provider cannot let single hosts through; then none gets through.
        network = "none" if body.get("networkBlockAll") or body.get("domainAllowList") else "public"
        spec = SandboxSpec(
            ttl_s=3600, labels={"stand-in": "daytona"}, network=network, options={"mode": "session"}, pids=512
        )
        machine = await self.provider.create(spec)
        body["ends"] = time.time() + 60 * (body.get("ttlMinutes") or 10**6)
        self.machines[machine.id], self.bodies[machine.id] = machine, body
        return web.json_response(self.shown(machine.id))

    async def list(self, request: web.Request) -> web.StreamResponse:
        wanted = json.loads(request.query.get("labels") or "{}").items()
        names = [name for name in self.machines if wanted <= (self.bodies[name].get("labels") or {}).items()]
        start, size = int(request.query.get("cursor") or 0), 2  # small pages, so that paging is used
        more = str(start + size) if start + size < len(names) else None
        page = [self.shown(name) for name in names[start : start + size]]
        return web.json_response({"items": page, "nextCursor": more})

    async def get(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        return web.json_response(self.shown(name)) if name in self.machines else error(404, "no such sandbox")

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        if name not in self.machines:
            return error(404, "no such sandbox")
        shown = {**self.shown(name), "state": "destroying"}
        await self.machines.pop(name).kill()
        return web.json_response(shown)

    async def ttl(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        if name not in self.machines:
            return error(404, "no such sandbox")
        self.bodies[name]["ends"] = time.time() + 60 * int(request.match_info["minutes"])
        return web.json_response(self.shown(name))

    async def execute(self, request: web.Request) -> web.StreamResponse:
        machine, body = self.machines.get(request.match_info["id"]), await request.json()
        if machine is None:
            return error(404, "no such sandbox")
        try:
            done = await machine.exec(
                f"{{ {body['command']}\n}} 2>&1",
                cwd="/workspace",
                env=body.get("envs") or {},
                timeout_s=body.get("timeout") or 60,
            )
        except SandboxGone:
            return error(404, "no such sandbox")
        if done.timed_out:
            return error(408, "command execution timeout")
        # The service's answer is text.
        return web.json_response({"exitCode": done.exit_code, "result": done.stdout.decode("utf-8", "replace")})

    async def upload(self, request: web.Request) -> web.StreamResponse:
        machine = self.machines.get(request.match_info["id"])
        if machine is None:
            return error(404, "no such sandbox")
        path = ""
        async for part in await request.multipart():
            if isinstance(part, BodyPartReader) and (part.name or "").endswith(".path"):
                path = await part.text()
            elif isinstance(part, BodyPartReader) and (part.name or "").endswith(".file"):
                await machine.write(path, bytes(await part.read()))
        return web.json_response({})


def error(status: int, message: str, **headers: str) -> web.Response:
    body = {"statusCode": status, "message": message, "path": "/", "timestamp": "now"}
    return web.json_response(body, status=status, headers=headers)
