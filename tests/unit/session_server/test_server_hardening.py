"""What strangers, browsers and odd bytes get from a server: nothing."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from server_helpers import user

from tollway.session_server.app import TollwayApp
from tollway.session_server.fake import FakeServer


async def raw(server: FakeServer, request: str) -> str:
    """The first bytes that a server answers to ``request``, written as it is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(request.encode("latin-1"))
    data = await reader.read(65536)
    writer.close()
    await writer.wait_closed()
    return data.decode("latin-1")


@pytest.mark.parametrize("host", ["a b", 'x"y', "x/y", "x<y", "\xe9", "x@y", "x?y", "x\x7f", ""])
async def test_a_host_that_is_no_address_is_in_no_url(server: FakeServer, host: str) -> None:
    answer = await raw(
        server,
        f"POST /sessions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {server.admin_key}\r\n"
        "content-length: 0\r\nconnection: close\r\n\r\n",
    )
    assert answer.startswith("HTTP/1.1 400")
    assert server.gateway.store.open_sessions == 0


@pytest.mark.parametrize("name", ["%0d%0aset-cookie:%20a=1", "a%0ab", "..%2f..", "%00", "x" * 5000])
async def test_bytes_of_a_path_never_become_a_header(server: FakeServer, name: str) -> None:
    for method, path in (
        ("GET", f"/sessions/{name}"),
        ("POST", f"/sessions/{name}/v1/chat/completions"),
        ("DELETE", f"/engines/{name}"),
        ("GET", f"/{name}"),
    ):
        answer = await raw(
            server,
            f"{method} {path} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {server.admin_key}\r\n"
            "connection: close\r\n\r\n",
        )
        head, _, body = answer.partition("\r\n\r\n")
        assert head.split()[1] in ("401", "404"), path
        assert "set-cookie" not in head.lower()
        assert json.loads(body)["error"]["code"] in ("unauthorized", "not_found")


async def test_no_browser_of_another_origin_is_let_in(server: FakeServer) -> None:
    session = await server.client.create()
    headers = {"origin": "https://elsewhere.test", "access-control-request-method": "POST"}
    for method, path in (("OPTIONS", "/sessions"), ("OPTIONS", "/v1/chat/completions"), ("GET", "/healthz")):
        async with server.http.request(method, server.url + path, headers=headers) as response:
            assert not [name for name in response.headers if name.lower().startswith("access-control")]
    answer = {**headers, "authorization": f"Bearer {session.token}"}
    url = f"{session.openai_base_url}/chat/completions"
    async with server.http.post(url, json={"messages": [user("hi")]}, headers=answer) as response:
        assert not [name for name in response.headers if name.lower().startswith("access-control")]


async def test_health_and_metrics_are_for_this_machine_and_for_the_admin(server: FakeServer) -> None:
    for address, allowed in (("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("127.0.0.1.evil", False)):
        transport = httpx.ASGITransport(app=TollwayApp(server.gateway), client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await client.get(path)).status_code == (200 if allowed else 401)
                admin = {"authorization": f"Bearer {server.admin_key}"}
                assert (await client.get(path, headers=admin)).status_code == 200
                assert (await client.get("/workers/fleet", headers=admin)).status_code == 404


async def test_no_redirect_follows_a_host_header(server: FakeServer) -> None:
    for path in ("/sessions/", "/engines/", "/healthz/"):
        answer = await raw(server, f"GET {path} HTTP/1.1\r\nhost: evil.test\r\nconnection: close\r\n\r\n")
        assert answer.startswith(("HTTP/1.1 404", "HTTP/1.1 405")), answer
        assert "location" not in answer.lower()
