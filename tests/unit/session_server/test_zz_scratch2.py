from __future__ import annotations
import asyncio, json, time
from typing import Any
import pytest
from server_helpers import *
from server_helpers import ok, call, say, user, reasons, rows, sse, post, until
from tollway.errors import JournalError, CapacityExceeded
from tollway.router.fake import FakeReply
from tollway.session_server.fake import FakeServer

async def test_concurrent_key_with_previous(server):
    server.engine.script = say([*b"one", 261], FakeReply(ids=[*b"two",261], delay_s=0.2))
    s = await server.client.create()
    first = await ok(server, s, "responses", {"input":"go", "instructions":"x"})
    body = {"input":"more","instructions":"other","previous_response_id":first["id"]}
    res = await asyncio.gather(*(call(server, s, "responses", body, {"idempotency-key":"k"}) for _ in range(8)))
    ids = {r[1].get("id") for r in res}
    print(ids)
    assert len(ids) == 1

async def test_overflow_with_full_journal(server):
    server.engine.script = say([*b"one", 261])
    s = await server.client.create()
    await ask(server, s, [user("hi")])
    server.engine.script = say(FakeReply(ids=[], status=400, error="The input is longer than the model's context length (100 tokens)."))
    j = server.gateway.journal
    async def fail(*a): raise JournalError("full")
    j.write = fail
    st, v = await post(server, s, {"messages":[user("hi"), {"role":"assistant","content":"one"}, user("more")]})
    print(st, v)
    assert v["error"]["code"] == "context_length_exceeded"

async def test_forward_star():
    from tollway.session_server.forward import Forwarder
    from tollway.session_server.crew import Crew
    from tollway.session_server.siblings import Siblings
    seen = []
    async def app(scope, receive, send): seen.append(scope["path"])
    crew = Crew(index=0,size=2,secret="x")
    f = Forwarder(app, Siblings(crew,"a"), admin_key="a", max_body_bytes=10)
    for p in ("*", "", "/", "//", "/engines"):
        await f({"type":"http","method":"OPTIONS","path":p,"headers":[],"raw_path":p.encode(),"query_string":b""}, None, None)
    print(seen)

async def test_delete_by_token(server):
    s = await server.client.create()
    async with server.http.delete(f"{server.url}/sessions/{s.token}", headers={"x-api-key":server.admin_key}) as r:
        print(r.status, server.gateway.store.open_sessions)
        assert r.status != 204 or server.gateway.store.open_sessions == 0

async def test_repeats_stale_failure():
    from tollway.session_server.repeats import Repeats
    r = Repeats()
    gate = asyncio.Event(); n = 0
    async def bad():
        await gate.wait(); raise CapacityExceeded("full")
    async def good(): return b"ok"
    t = asyncio.ensure_future(r.once("k", b"b", bad))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    t.cancel(); 
    with pytest.raises(asyncio.CancelledError): await t
    gate.set(); await asyncio.sleep(0.01)
    assert await r.once("k", b"b", good) == b"ok"

async def test_raw_star(server):
    host, port = server.url[7:].split(":")
    for line in (b"OPTIONS * HTTP/1.1", b"GET http://evil/sessions HTTP/1.1", b"GET //evil.example/sessions/ HTTP/1.1"):
        rd, wr = await asyncio.open_connection(host, int(port))
        wr.write(line + b"\r\nHost: a\r\nConnection: close\r\n\r\n")
        print(line, (await rd.read())[:300])
        wr.close()

async def test_choices_retry(server):
    server.engine.script = say([*b"one", 261])
    s = await server.client.create()
    body = {"messages":[user("hi")], "n":2}
    # the client is gone when both are committed
    sess = server.gateway.store._loaded[s.session_id]
    await post(server, s, body)
    for node in sess.forest.nodes.values(): node.delivered = False
    await post(server, s, body)
    await post(server, s, body)
    print([(n.reason, n.superseded) for n in sess.forest.nodes.values()])
