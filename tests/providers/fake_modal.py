"""A stand-in for Modal's gRPC services, over sandboxes of the local provider. It is no Modal.

Two services on one port: the client's API and the command router of a sandbox. Whatever is not listed here answers
UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from dataclasses import dataclass, field

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase
from wire_faults import Faults

from tollway.errors import SandboxGone
from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.spec import ExecResult

_DONE = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
_UPLOAD = 'cat >"$1"'


@dataclass
class Exec:
    """One command: it starts at once, or when its input is complete if it reads one."""

    work: asyncio.Task[ExecResult]
    given: bytearray
    complete: asyncio.Event


@dataclass
class FakeModal:
    """The service. ``machines`` is what exists now; a test that leaks finds it there."""

    provider: SandboxProvider
    machines: dict[str, Sandbox] = field(default_factory=dict)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    execs: dict[str, Exec] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    """Plans by call name; a status is one of gRPC's."""
    creates: int = 0
    url: str = ""
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))

    async def start(self) -> Server:
        server = Server([_filled(ModalClientBase, Client)(self), _filled(TaskCommandRouterBase, Router)(self)])
        await server.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
        return server

    async def struck(self, call: str, *, late: bool = False) -> None:
        for fault in self.faults.plans:
            if fault.late == late and fault.matches("rpc", call):
                fault.hits += 1
                await asyncio.sleep(fault.delay_s)
                if fault.status is not None:
                    raise GRPCError(Status(fault.status), "planned")
                return

    def machine(self, name: str) -> Sandbox:
        found = self.machines.get(name.replace("ta-", "sb-"))
        if found is None or found.gone:
            raise GRPCError(Status.NOT_FOUND, "no such sandbox")
        return found


def _filled(base: type, methods: type) -> type:
    def missing(name: str):
        async def call(self: object, stream: object) -> None:
            raise GRPCError(Status.UNIMPLEMENTED, f"the stand-in has no {name}")

        return call

    blanks = {name: missing(name) for name in base.__abstractmethods__ if not hasattr(methods, name)}
    return type(methods.__name__, (methods, base), blanks)


class Service:
    def __init__(self, fake: FakeModal) -> None:
        self.fake = fake


class Client(Service):
    async def ClientHello(self, stream) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, stream) -> None:
        await stream.recv_message()
        claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3600}).encode()).decode().rstrip("=")
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=f"e30.{claims}.x"))

    async def EnvironmentGetOrCreate(self, stream) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def AppGetOrCreate(self, stream) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def ImageGetOrCreate(self, stream) -> None:
        request = await stream.recv_message()
        wanted = " ".join(request.image.dockerfile_commands)
        status, problem = _DONE, ""
        if "no-such" in wanted:
            status, problem = api_pb2.GenericResult.GENERIC_STATUS_FAILURE, "manifest unknown"
        result = api_pb2.GenericResult(status=status, exception=problem)
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id="im-base", result=result))

    async def ImageFromId(self, stream) -> None:
        request = await stream.recv_message()
        await stream.send_message(api_pb2.ImageFromIdResponse(image_id=request.image_id))

    async def SandboxCreateV2(self, stream) -> None:
        request, fake = await stream.recv_message(), self.fake
        fake.creates += 1
        await fake.struck("create")
        definition = request.definition
        closed = definition.network_access.network_access_type != api_pb2.NetworkAccess.NetworkAccessType.OPEN
        spec = SandboxSpec(
            ttl_s=3600,
            labels={"stand-in": "modal"},
            image=fake.images.get(definition.image_id),
            network="none" if closed else "public",
            options={"mode": "session"},
            pids=512,
        )
        name = f"sb-{next(fake.numbers)}V"
        fake.machines[name] = await fake.provider.create(spec)
        fake.tags[name] = {tag.tag_name: tag.tag_value for tag in request.tags}
        await fake.struck("create", late=True)
        access = api_pb2.CommandRouterAccess(url=fake.url, jwt="e30.e30.x")
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(
                sandbox_id=name, task_id=name.replace("sb-", "ta-"), command_router_access=access
            )
        )

    async def SandboxGetTaskIdV2(self, stream) -> None:
        request = await stream.recv_message()
        self.fake.machine(request.sandbox_id)
        await stream.send_message(api_pb2.SandboxGetTaskIdResponse(task_id=request.sandbox_id.replace("sb-", "ta-")))

    async def SandboxGetCommandRouterAccess(self, stream) -> None:
        await stream.recv_message()
        answer = api_pb2.SandboxGetCommandRouterAccessResponse(url=self.fake.url, jwt="e30.e30.x")
        await stream.send_message(answer)

    async def SandboxWaitV2(self, stream) -> None:
        request = await stream.recv_message()
        result = api_pb2.GenericResult()
        if request.sandbox_id not in self.fake.tags:
            raise GRPCError(Status.NOT_FOUND, "no such sandbox")
        if request.sandbox_id not in self.fake.machines:
            result.status = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
        await stream.send_message(api_pb2.SandboxWaitResponse(result=result))

    async def SandboxTagsGetV2(self, stream) -> None:
        request = await stream.recv_message()
        tags = [api_pb2.SandboxTag(tag_name=k, tag_value=v) for k, v in self.fake.tags[request.sandbox_id].items()]
        await stream.send_message(api_pb2.SandboxTagsGetResponse(tags=tags))

    async def SandboxListV2(self, stream) -> None:
        request, fake = await stream.recv_message(), self.fake
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}.items()
        numbers = sorted((int(name[3:-1]) for name in fake.machines if wanted <= fake.tags[name].items()), reverse=True)
        older = [number for number in numbers if not request.before_timestamp or number < request.before_timestamp]
        found = [api_pb2.SandboxInfo(id=f"sb-{number}V", created_at=number) for number in older[:2]]
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=found))

    async def SandboxTerminateV2(self, stream) -> None:
        request = await stream.recv_message()
        await self.fake.struck("delete")
        machine = self.fake.machines.pop(request.sandbox_id, None)
        if machine is not None:
            await machine.kill()
        await stream.send_message(api_pb2.SandboxTerminateResponse())


class Router(Service):
    async def TaskExecStart(self, stream) -> None:
        request = await stream.recv_message()
        machine, argv = self.fake.machine(request.task_id), list(request.command_args)
        given, complete = bytearray(), asyncio.Event()
        if _UPLOAD not in argv:
            complete.set()

        async def run() -> ExecResult:
            await complete.wait()
            return await machine.exec(argv, timeout_s=request.timeout_secs or 3600, cwd="/", stdin=bytes(given))

        work = asyncio.create_task(run())
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
        self.fake.execs[request.exec_id] = Exec(work, given, complete)
        await stream.send_message(router_pb2.TaskExecStartResponse())

    async def _result(self, exec_id: str) -> ExecResult:
        try:
            return await asyncio.shield(self.fake.execs[exec_id].work)
        except SandboxGone:
            raise GRPCError(Status.NOT_FOUND, "the task has ended") from None

    async def TaskExecStdioRead(self, stream) -> None:
        request = await stream.recv_message()
        done = await self._result(request.exec_id)
        out = request.file_descriptor == router_pb2.TaskExecStdioFileDescriptor.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        data = (done.stdout if out else done.stderr)[request.offset :]
        for at in range(0, len(data), 1 << 20):
            await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=data[at : at + (1 << 20)]))

    async def TaskExecStdinWrite(self, stream) -> None:
        request = await stream.recv_message()
        running = self.fake.execs[request.exec_id]
        running.given[request.offset :] = request.data
        if request.eof:
            running.complete.set()
        await stream.send_message(router_pb2.TaskExecStdinWriteResponse())

    async def TaskExecWait(self, stream) -> None:
        request = await stream.recv_message()
        done = await self._result(request.exec_id)
        answer = router_pb2.TaskExecWaitResponse()
        if done.exit_code is None or done.exit_code > 128:
            answer.signal = 9
        else:
            answer.code = done.exit_code
        await stream.send_message(answer)

    async def TaskSnapshotFilesystem(self, stream) -> None:
        request = await stream.recv_message()
        name = f"im-{next(self.fake.numbers)}"
        self.fake.images[name] = await self.fake.machine(request.task_id).snapshot()
        await stream.send_message(router_pb2.TaskSnapshotFilesystemResponse(image_id=name))
