from __future__ import annotations
import asyncio, json, time
from pathlib import Path
from typing import Any
import pytest
from server_helpers import *
from server_helpers import ok, call, say, user, reasons, rows, sse, post, until
from tollway.router.fake import FakeReply
from tollway.session_server.fake import FakeServer

def spoken(req): return bytes(b for b in req.input_ids if b<256).decode("utf-8","replace")

async def test_prev_with_memo(server):
    server.engine.script = say([*b"one", 261])
    s = await server.client.create()
    dev = {"role":"developer","content":"RULE-A"}
    first = await ok(server, s, "responses", {"input":[dev, user("q1")], "model":"m"})
    await ok(server, s, "responses", {"input":[dev, user("q2")], "model":"m", "previous_response_id": first["id"]})
    print(spoken(server.engine.requests[-1]))
    assert spoken(server.engine.requests[-1]).count("RULE-A") == 2

async def test_n_with_engine_refusal(server):
    server.engine.script = say(FakeReply(ids=[], status=400, error="no"))
    s = await server.client.create()
    st, v = await post(server, s, {"messages":[user("go")], "n":2})
    print(st, v)
    assert st != 500

async def test_empty_stream_with_key(server):
    server.engine.script = say([261])
    s = await server.client.create()
    async with server.http.post(f"{s.base_url}/v1/responses", json={"input":"hi","stream":True}, headers={"x-api-key":s.token,"idempotency-key":"k"}) as r:
        data = (await r.read()).decode()
    nums = [json.loads(l[6:])["sequence_number"] for l in data.split("\n") if l.startswith("data: ")]
    print(nums)
    kept = await server.gateway.journal.read("SELECT reply FROM turns")
    print(kept[0][0][16:200])
    assert nums == sorted(nums)
    assert b"response.created" in kept[0][0]

async def test_concurrent_key_with_previous(server):
    server.engine.script = say([*b"one", 261], FakeReply(ids=[*b"two",261], delay_s=0.2))
    s = await server.client.create()
    first = await ok(server, s, "responses", {"input":"go", "instructions":"x"})
    body = {"input":"more","instructions":"other","previous_response_id":first["id"]}
    a, b = await asyncio.gather(*(call(server, s, "responses", body, {"idempotency-key":"k"}) for _ in range(2)))
    print(a[1].get("id"), b[1].get("id"))
    assert a == b

async def test_same_key_other_dialect(server):
    server.engine.script = say([*b"one", 261])
    s = await server.client.create()
    body = {"messages":[user("hi")], "model":"m", "max_tokens": 20}
    a = await call(server, s, "chat/completions", body, {"idempotency-key":"k"})
    b = await call(server, s, "messages", body, {"idempotency-key":"k"})
    print(b)
    assert b[1].get("object") != "chat.completion"

async def test_redirect(server):
    async with server.http.post(f"{server.url}/sessions/", headers={"host":"evil.example"}, allow_redirects=False) as r:
        print(r.status, r.headers)
        assert "evil" not in str(r.headers)

async def test_docs(server):
    for p in ("/docs","/redoc","/openapi.json"):
        async with server.http.get(server.url+p) as r:
            print(p, r.status)

async def test_recall_unload_race(server):
    s = await server.client.create()
    store = server.gateway.store
    await ok(server, s, "chat/completions", {"messages":[user("hi")]}) if False else None
    card = store._open[s.session_id]
    card.used_at -= 1000
    store.unload(time.time())
    assert s.session_id not in store._loaded
    task = asyncio.ensure_future(store.get(s.session_id))
    while s.session_id not in store._loaded:
        await asyncio.sleep(0)
    store.unload(time.time())   # the sweeper
    got = await task
    assert store._loaded.get(s.session_id) is got

async def test_book_grows(server):
    server.engine.script = lambda req: FakeReply(ids=[*b"x",261], delay_s=30.0) if b"slow" in bytes(i for i in req.input_ids if i<256) else FakeReply(ids=[*b"x",261])
    s = await server.client.create()
    slow = asyncio.ensure_future(post(server, s, {"messages":[user("slow")]}))
    await until(lambda: server.engine.in_flight == 1, what="slow")
    for at in range(30):
        await post(server, s, {"messages":[user(f"q{at}")]})
    sess = server.gateway.store._loaded[s.session_id]
    print(len(sess.calls._by_body))
    slow.cancel()
    assert len(sess.calls._by_body) <= 10

async def test_expire_while_visited(server):
    s = await server.client.create()
    store = server.gateway.store
    sess = store._loaded[s.session_id]
    store._open[s.session_id].used_at -= 10000
    async with store.visit(sess):
        await store.expire(time.time())
        assert sess.state == "open"

async def test_kept_plan(server):
    plan = await server.gateway.journal.read("EXPLAIN QUERY PLAN SELECT reply FROM turns WHERE session_id=? AND idempotency_key=? AND reply IS NOT NULL", ("a","b"))
    print(plan)
