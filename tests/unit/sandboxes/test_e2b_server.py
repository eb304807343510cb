"""The E2B front end on the wire: control plane, processes and files, over the fake and the local provider."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.e2b_server import FrontEnd, application, serve
from tollway.sandboxes.e2b_wire import entries, envelope, inside, metadata_filter, opened
from tollway.sandboxes.fake import FakeProvider
from tollway.sandboxes.local import LocalProvider
from tollway.sandboxes.probe import probe

KEY = {"X-API-Key": "k"}


class Stage:
    """A client of one front end."""

    def __init__(self, client: TestClient, front_end: FrontEnd) -> None:
        self.client, self.front_end = client, front_end

    async def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, object, object]:
        async with self.client.request(method, path, json=body, headers={**KEY, **headers}) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None, response.headers

    async def made(self, **body: object) -> dict[str, str]:
        """Headers that enter a fresh sandbox."""
        status, reply, _ = await self.call("POST", "/v2/sandboxes", {"templateID": "base", **body})
        assert status == 201, reply
        return {"E2b-Sandbox-Id": reply["sandboxID"], "X-Access-Token": reply["envdAccessToken"]}

    async def rpc(self, headers: dict[str, str], name: str, body: object) -> tuple[int, dict]:
        status, reply, _ = await self.call("POST", f"/{name}", body, **headers)
        return status, reply

    async def start(self, headers: dict[str, str], argv: list[str], **more: object) -> list[dict]:
        """The events of a process, the end of the stream last."""
        body = envelope({"process": {"cmd": argv[0], "args": argv[1:], **more.pop("process", {})}, **more})
        head = {**headers, "Content-Type": "application/connect+json"}
        async with self.client.post("/process.Process/Start", data=body, headers=head) as response:
            assert response.content_type == "application/connect+json"
            return events(await response.read())


def events(body: bytes) -> list[dict]:
    found, at = [], 0
    while at < len(body):
        _, size = struct.unpack_from(">BI", body, at)
        found.append(json.loads(body[at + 5 : at + 5 + size]))
        at += 5 + size
    return found


def output(seen: list[dict], stream: str = "stdout") -> bytes:
    data = [each["event"]["data"].get(stream, "") for each in seen if "data" in each.get("event", {})]
    return b"".join(base64.b64decode(piece) for piece in data)


def ended(seen: list[dict]) -> dict:
    return next(each["event"]["end"] for each in seen if "end" in each.get("event", {}))


@asynccontextmanager
async def staged(provider: SandboxProvider, **more: object) -> AsyncIterator[Stage]:
    async with provider:
        front_end = FrontEnd(provider, key="k", **more)
        async with TestClient(TestServer(application(front_end))) as client:
            yield Stage(client, front_end)
            await front_end.aclose()
        assert provider.live == 0


@pytest.fixture
async def fake() -> AsyncIterator[Stage]:
    async with staged(FakeProvider(SandboxConfig(max_live=4))) as stage:
        # The fake's shell knows no redirections of this kind: its output arrives at the end.
        stage.front_end.streams = False
        yield stage


@pytest.fixture
async def local() -> AsyncIterator[Stage]:
    found = probe()
    if not found.available:
        pytest.skip(found.reason)
    async with staged(LocalProvider(SandboxConfig(local=LocalConfig(mode="session")))) as stage:
        yield stage


async def test_every_call_needs_the_key_and_calls_inside_need_the_sandboxs_own_token(fake: Stage) -> None:
    headers = await fake.made()
    sandbox_id = headers["E2b-Sandbox-Id"]
    for method, path in (
        ("POST", "/v2/sandboxes"),
        ("GET", "/v2/sandboxes"),
        ("GET", f"/sandboxes/{sandbox_id}"),
        ("DELETE", f"/sandboxes/{sandbox_id}"),
        ("POST", f"/v2/sandboxes/{sandbox_id}/connect"),
    ):
        for wrong in ({}, {"X-API-Key": "kk"}, {"X-API-Key": "ü"}):
            async with fake.client.request(method, path, headers=wrong) as response:
                assert response.status == 401
    other = await fake.made()
    for wrong in ({}, {"X-Access-Token": "x"}, {"X-Access-Token": other["X-Access-Token"]}):
        async with fake.client.get("/health", headers={**KEY, "E2b-Sandbox-Id": sandbox_id, **wrong}) as response:
            unknown = {"E2b-Sandbox-Id": "none", **wrong}
            async with fake.client.get("/health", headers=unknown) as stranger:
                # The same answer as for a sandbox that is not there.
                assert (response.status, stranger.status) == (502, 502)
    async with fake.client.get("/health", headers=headers) as response:
        assert response.status == 204


async def test_sandboxes_are_found_by_metadata_page_by_page(fake: Stage) -> None:
    ids = [(await fake.made(metadata={"run": "a b", "n": str(n)}))["E2b-Sandbox-Id"] for n in range(3)]
    await fake.made(metadata={"run": "other"})
    pages, token = [], "0"
    while token is not None:
        query = f"/v2/sandboxes?metadata=run%3Da%252520b&limit=2&nextToken={token}"
        status, page, headers = await fake.call("GET", query)
        assert status == 200
        pages.append([each["sandboxID"] for each in page])
        token = headers.get("x-next-token")
    assert pages == [ids[:0:-1], ids[:1]]
    _, oldest, _ = await fake.call("GET", "/v2/sandboxes?order=asc&limit=1")
    assert oldest[0]["sandboxID"] == ids[0]
    assert oldest[0]["metadata"] == {"run": "a b", "n": "0"}
    assert "envdAccessToken" not in oldest[0]
    assert (await fake.call("GET", "/v2/sandboxes?limit=x"))[0] == 400


async def test_kill_is_final_and_a_second_one_is_not_found(fake: Stage) -> None:
    headers = await fake.made()
    path = f"/sandboxes/{headers['E2b-Sandbox-Id']}"
    assert (await fake.call("DELETE", path))[0] == 204
    assert fake.front_end.provider.live == 0
    assert (await fake.call("DELETE", path))[0] == 404
    assert (await fake.call("GET", path))[0] == 404
    status, reply = await fake.rpc(headers, "process.Process/List", {})
    assert (status, reply["code"]) == (502, 502)
    assert "was not found" in reply["message"]


async def test_a_life_ends_on_time_and_connecting_never_shortens_it(fake: Stage) -> None:
    headers = await fake.made(timeout=600)
    path = f"/sandboxes/{headers['E2b-Sandbox-Id']}"
    before = (await fake.call("GET", path))[1]["endAt"]
    status, reply, _ = await fake.call("POST", f"/v2{path}/connect", {"timeout": 5})
    assert (status, reply["envdAccessToken"]) == (200, headers["X-Access-Token"])
    assert (await fake.call("GET", path))[1]["endAt"] == before
    assert (await fake.call("POST", f"{path}/refreshes", {"duration": 900}))[0] == 204
    assert (await fake.call("GET", path))[1]["endAt"] > before
    # This one may shorten it.
    assert (await fake.call("POST", f"{path}/timeout", {"timeout": 0.2}))[0] == 204
    async with asyncio.timeout(20):
        while fake.front_end.provider.live:
            await asyncio.sleep(0.02)
    assert (await fake.call("GET", path))[0] == 404
    for wrong in (0, -1, "x", True, 10**9):
        assert (await fake.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": wrong}))[0] == 400


async def test_wrong_calls_and_limits_are_answered_as_errors(fake: Stage) -> None:
    for body in ({"metadata": {"a": 1}}, {"envVars": ["a"]}, {"network": "x"}):
        assert (await fake.call("POST", "/v2/sandboxes", {"templateID": "base", **body}))[0] == 400
    async with fake.client.post("/v2/sandboxes", data=b"{", headers=KEY) as response:
        assert response.status == 400
    headers = await fake.made()
    for body in (b"", b"\0\0", b"\0\0\0\0\xff{}", b"\1\0\0\0\2{}", b"\0\0\0\0\2[]"):
        async with fake.client.post("/process.Process/Start", data=body, headers=headers) as response:
            assert response.status == 400
    assert (await fake.rpc(headers, "process.Process/Update", {}))[1]["code"] == "unimplemented"
    assert (await fake.rpc(headers, "filesystem.Filesystem/CreateWatcher", {}))[1]["code"] == "unimplemented"
    assert (await fake.start(headers, ["true"], pty={"size": {}}))[0]["error"]["code"] == "unimplemented"
    gone = {"process": {"pid": 1}}
    assert (await fake.rpc(headers, "process.Process/SendSignal", gone))[1]["code"] == "not_found"
    assert (await fake.call("POST", f"/sandboxes/{headers['E2b-Sandbox-Id']}/fork", {"count": 0}))[0] == 400


async def test_at_capacity_clients_are_told_to_wait() -> None:
    async with staged(FakeProvider(SandboxConfig(max_live=1, create_timeout_s=0.2))) as stage:
        await stage.made()
        status, _, headers = await stage.call("POST", "/v2/sandboxes", {"templateID": "base"})
        assert (status, headers["Retry-After"]) == (429, "1")


async def test_the_same_idempotency_key_makes_one_sandbox(fake: Stage) -> None:
    calls = [fake.call("POST", "/v2/sandboxes", {"templateID": "base"}, **{"Idempotency-Key": "a-1"}) for _ in range(3)]
    replies = await asyncio.gather(*calls)
    assert len({reply["sandboxID"] for _, reply, _ in replies}) == 1
    assert fake.front_end.provider.live == 1


async def test_an_idempotency_key_is_forgotten_with_its_sandbox(fake: Stage) -> None:
    made = set()
    for _ in range(3):
        _, reply, _ = await fake.call("POST", "/v2/sandboxes", {"templateID": "base"}, **{"Idempotency-Key": "a-1"})
        made.add(reply["sandboxID"])
        await fake.call("DELETE", f"/sandboxes/{reply['sandboxID']}")
    assert len(made) == 3
    assert fake.front_end.provider.live == 0


async def test_a_client_that_goes_away_while_its_sandbox_is_made_leaves_none() -> None:
    provider = FakeProvider(SandboxConfig())
    provider.faults.create_delay_s = 0.5
    async with provider:
        front_end = FrontEnd(provider, key="k")
        runner, url = await serve(front_end, "127.0.0.1", 0)
        async with aiohttp.ClientSession() as session:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await session.post(f"{url}/v2/sandboxes", json={"templateID": "base"}, headers=KEY)
        await asyncio.sleep(0.6)
        assert front_end.all() == []
        await runner.cleanup()
    assert provider.live == 0


async def test_processes_run_and_report_without_a_shared_tmp(fake: Stage) -> None:
    headers = await fake.made(envVars={"X": "1"})
    seen = await fake.start(headers, ["printenv", "X"])
    assert "pid" in seen[0]["event"]["start"]
    assert output(seen) == b"1\n"
    assert ended(seen) == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert seen[-1] == {}
    assert ended(await fake.start(headers, ["no-such-program"]))["exitCode"] == 127
    waiting = asyncio.create_task(fake.start(headers, ["cat"], stdin=True, tag="t"))
    async with asyncio.timeout(20):
        while not (running := (await fake.rpc(headers, "process.Process/List", {}))[1]["processes"]):
            await asyncio.sleep(0.01)
    assert (running[0]["tag"], running[0]["config"]["cmd"]) == ("t", "cat")
    given = {"process": {"tag": "t"}, "input": {"stdin": base64.b64encode(b"a\0b").decode()}}
    assert (await fake.rpc(headers, "process.Process/SendInput", given))[0] == 200
    assert (await fake.rpc(headers, "process.Process/CloseStdin", given))[0] == 200
    assert output(await waiting) == b"a\0b"


async def test_output_and_input_pass_while_a_process_runs(local: Stage) -> None:
    headers = await local.made()
    script = "while read line; do echo got $line; done; echo over >&2; exit 3"
    body = envelope({"process": {"cmd": "sh", "args": ["-c", script]}, "stdin": True})
    async with local.client.post("/process.Process/Start", data=body, headers=headers) as response:
        pid = await started(response)
        for word in (b"one\n", b"two\n"):
            given = {"process": {"pid": pid}, "input": {"stdin": base64.b64encode(word).decode()}}
            assert (await local.rpc(headers, "process.Process/SendInput", given))[0] == 200
            assert output([await message(response)]) == b"got " + word
        assert (await local.rpc(headers, "process.Process/CloseStdin", {"process": {"pid": pid}}))[0] == 200
        rest = events(await response.read())
    assert output(rest, "stderr") == b"over\n"
    assert ended(rest)["exitCode"] == 3


async def test_background_processes_serve_later_commands_and_can_be_killed(local: Stage) -> None:
    headers = await local.made()
    serving = asyncio.create_task(local.start(headers, ["sh", "-c", "echo up >f; exec sleep 300"]))
    async with asyncio.timeout(20):
        while output(await local.start(headers, ["cat", "f"])) != b"up\n":
            await asyncio.sleep(0.05)
    (running,) = (await local.rpc(headers, "process.Process/List", {}))[1]["processes"]
    body = envelope({"process": {"pid": running["pid"]}})
    watching = asyncio.create_task(local.client.post("/process.Process/Connect", data=body, headers=headers))
    await asyncio.sleep(0.1)
    kill = {"process": {"pid": running["pid"]}, "signal": "SIGNAL_SIGKILL"}
    assert (await local.rpc(headers, "process.Process/SendSignal", kill))[0] == 200
    assert ended(await serving) == {"exitCode": 137, "exited": False, "status": "signal: 9"}
    async with await watching as response:
        assert ended(events(await response.read()))["exitCode"] == 137
    assert output(await local.start(headers, ["sh", "-c", "cat /proc/[0-9]*/cmdline"])).count(b"sleep\x00300") == 0


async def test_a_deadline_of_the_client_ends_the_process(local: Stage) -> None:
    headers = await local.made()
    seen = await local.start({**headers, "Connect-Timeout-Ms": "500"}, ["sh", "-c", "echo early; sleep 60"])
    assert output(seen) == b"early\n"
    assert seen[-1]["error"]["code"] == "deadline_exceeded"


async def test_large_output_is_cut_and_said_to_be(local: Stage) -> None:
    headers = await local.made()
    limit = local.front_end.provider.config.max_output_bytes
    seen = await local.start(headers, ["sh", "-c", f"head -c {limit + 5000} /dev/zero"])
    assert output(seen) == b"\0" * limit
    assert "cut" in ended(seen)["status"]


async def test_files_and_directories(local: Stage) -> None:
    headers = await local.made()
    client = local.client
    form = aiohttp.FormData(quote_fields=False)
    form.add_field("file", b"\x00\xff", filename="/home/user/a/b.bin")
    form.add_field("file", b"two", filename="c")
    async with client.post("/files", data=form, headers=headers) as response:
        assert [each["path"] for each in await response.json()] == ["/workspace/a/b.bin", "/workspace/c"]
    async with client.get("/files?path=a/b.bin", headers=headers) as response:
        assert await response.read() == b"\x00\xff"
    octets = {**headers, "Content-Type": "application/octet-stream"}
    async with client.post("/files?path=odd%0Aname", data=b"x", headers=octets) as response:
        assert response.status == 200
    for path, status in (("nothing", 404), ("a", 400), ("/etc/passwd", 400), ("../x", 400), ("", 400)):
        async with client.get("/files", params={"path": path}, headers=headers) as response:
            assert response.status == status, path
    files = "filesystem.Filesystem"
    _, listed = await local.rpc(headers, f"{files}/ListDir", {"path": "/workspace", "depth": 2})
    assert [entry["path"] for entry in listed["entries"]] == [
        "/workspace/a",
        "/workspace/a/b.bin",
        "/workspace/c",
        "/workspace/odd\nname",
    ]
    await local.start(headers, ["ln", "-s", "/etc/passwd", "/workspace/link"])
    _, found = await local.rpc(headers, f"{files}/Stat", {"path": "link"})
    assert found["entry"]["symlinkTarget"] == "/etc/passwd"
    async with client.get("/files?path=link", headers=headers) as response:
        assert response.status == 400
    assert (await local.rpc(headers, f"{files}/MakeDir", {"path": "d/e"}))[0] == 200
    assert (await local.rpc(headers, f"{files}/MakeDir", {"path": "d"}))[1]["code"] == "already_exists"
    moved = await local.rpc(headers, f"{files}/Move", {"source": "c", "destination": "d/e/f"})
    assert (moved[1]["entry"]["path"], moved[1]["entry"]["size"]) == ("/workspace/d/e/f", "3")
    assert (await local.rpc(headers, f"{files}/Remove", {"path": "d"}))[0] == 200
    assert (await local.rpc(headers, f"{files}/Stat", {"path": "d"}))[1]["code"] == "not_found"
    assert (await local.rpc(headers, f"{files}/ListDir", {"path": "a/b.bin"}))[1]["code"] == "invalid_argument"


async def test_pause_snapshot_and_fork_where_the_provider_can(local: Stage) -> None:
    headers = await local.made()
    path = f"/sandboxes/{headers['E2b-Sandbox-Id']}"
    await local.start(headers, ["sh", "-c", "echo kept >f"])
    assert (await local.call("POST", f"{path}/pause"))[0] == 204
    assert (await local.call("POST", f"{path}/pause"))[0] == 409
    assert (await local.call("GET", "/v2/sandboxes?state=running"))[1] == []
    assert (await local.call("POST", f"/v2{path}/connect", {"timeout": 60}))[0] == 201
    status, saved, _ = await local.call("POST", f"{path}/snapshots", {})
    assert status == 201
    copy = await local.made(templateID=saved["snapshotID"])
    assert output(await local.start(copy, ["cat", "f"])) == b"kept\n"
    _, forked, _ = await local.call("POST", f"{path}/fork", {"count": 2})
    assert len({each["sandbox"]["sandboxID"] for each in forked}) == 2


async def test_a_sandbox_has_a_network_only_if_the_server_and_the_client_say_so() -> None:
    class Seen(FakeProvider):
        caps = FakeProvider.caps | {"public_network"}

    for network, body, wanted in (
        (False, {}, "none"),
        (False, {"allow_internet_access": True}, "none"),
        (True, {}, "public"),
        (True, {"allow_internet_access": False}, "none"),
        (True, {"network": {"denyOut": ["0.0.0.0/0"]}}, "none"),
    ):
        async with staged(Seen(SandboxConfig()), network=network) as stage:
            headers = await stage.made(**body)
            lease = stage.front_end.find(headers["E2b-Sandbox-Id"])
            assert lease is not None
            assert lease.sandbox.spec.network == wanted


def test_pieces_of_the_wire() -> None:
    assert list(opened(envelope({"a": 1}) + envelope({}, flag=2))) == [{"a": 1}]
    assert inside("/tmp/../x") == "/tmp/../x"
    assert metadata_filter("") == {}
    (entry,) = entries("81a4 3 1700000000 me us /workspace/a\nb\n")
    assert (entry["name"], entry["type"], entry["permissions"]) == ("a\nb", "FILE_TYPE_FILE", "-rw-r--r--")


def size_of(head: bytes) -> int:
    return int(struct.unpack(">BI", head)[1])


async def message(response: aiohttp.ClientResponse) -> dict:
    return json.loads(await response.content.readexactly(size_of(await response.content.readexactly(5))))


async def started(response: aiohttp.ClientResponse) -> int:
    return int((await message(response))["event"]["start"]["pid"])


async def test_what_cannot_be_read_is_refused_and_breaks_nothing() -> None:
    async with FakeProvider() as provider, staged(provider) as stage:
        headers = await stage.made()
        deep = b"[" * 100_000 + b"]" * 100_000
        message = struct.pack(">BI", 0, len(deep)) + deep
        for path, body, more in (
            ("/sandboxes", deep, {}),
            ("/process.Process/Start", message, {}),
            ("/files", b"x", {"Content-Type": "multipart/form-data"}),
        ):
            async with stage.client.post(path, data=body, headers={**KEY, **headers, **more}) as response:
                assert response.status == 400, (path, await response.text())
        for variables in ({"A=B": "x"}, {"A": "\0"}, {"": "x"}):
            status, reply, _ = await stage.call("POST", "/sandboxes", {"envVars": variables})
            assert (status, "environment" in str(reply)) == (400, True)
        far = {"Connect-Timeout-Ms": "9" * 5000, "Keepalive-Ping-Interval": "9" * 5000}
        assert await stage.start({**headers, **far}, ["true"])
        for path, wanted in (("/sandboxes", b"401"), ("/health", b"502")):
            reader, writer = await asyncio.open_connection(stage.client.host, stage.client.port)
            secret = b"X-API-Key: \xff\xfe\r\nX-Access-Token: \xff\xfe\r\nE2b-Sandbox-Id: "
            named = headers["E2b-Sandbox-Id"].encode()
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
            writer.write(head + secret + named + b"\r\n\r\n")
            assert (await reader.read()).split()[1] == wanted
            writer.close()
