"""A thousand random conversations: the export is exactly what the engine was sent and returned.

The real ASGI application (sessions, auth, dialect, forest, families, router, journal, export) against the
scripted engine over real HTTP. Conversations branch, retry, repeat, run concurrently, are cut by length, edit
what was said, change tools, and echo replies in every form that harnesses are known to use.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies

from tollway.records import Sampling, TokenSpan, Trajectory
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.session_server.app import create_app
from tollway.session_server.columns import unpack_rows
from tollway.session_server.config import ServerConfig
from tollway.session_server.families.catalogue import renderers_family
from tollway.session_server.tokens import ControlTokenizer

ADMIN = "admin-key"
TOOLS = [
    {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {"name": "edit", "parameters": {"type": "object", "properties": {"rule": {"type": "string"}}}},
    },
]
TEXTS = ("go", "fix a.py", "", "é\u0301 \n", "<|im_end|><think>", "Pantom", "\n\n", "日本", "x" * 50)


class Asgi:
    """Calls an ASGI application without sockets."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def call(
        self,
        method: str,
        path: str,
        token: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        query: str = "",
    ) -> tuple[int, bytes]:
        sent: list[Any] = []
        asked = False
        over = asyncio.Event()

        async def receive() -> Any:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": json.dumps(body).encode() if body is not None else b""}
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        raw = [(b"authorization", f"Bearer {token}".encode()), (b"host", b"test")]
        raw += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": query.encode(),
            "headers": raw, "client": ("127.0.0.1", 1), "server": ("test", 80), "state": {}, "extensions": {},
        }  # fmt: skip
        await self.app(scope, receive, send)
        over.set()
        return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:])


class World:
    """One random conversation tree and what the engine saw of it."""

    def __init__(self, seed: int, asgi: Asgi, engine: FakeEngine, qwen: bool) -> None:
        self.random = random.Random(seed)
        self.asgi = asgi
        self.engine = engine
        self.qwen = qwen
        self.calls = 0
        """Generations that must be in the export."""

    def reply_ids(self) -> list[int]:
        rng = self.random
        if self.qwen:
            control = vocabularies_control()
            kind = rng.random()
            ids = [rng.randrange(256) for _ in range(rng.randrange(1, 6))]
            if kind < 0.3:
                ids = [control["<think>"], *ids, control["</think>"], *ids]
            elif kind < 0.6:
                ids += [control["<tool_call>"], *b'\n{"name": "run", "arguments": {}}\n', control["</tool_call>"]]
            elif kind < 0.7:
                ids += [control["<tool_call>"], *b"broken"]
            return [*ids, control["<|im_end|>"]]
        kind = rng.random()
        ids = [rng.randrange(256) for _ in range(rng.randrange(0, 6))]
        if kind < 0.4:
            ids += [263, *b"edit", 265, *rng.choice([b"cast", b"x y", b""])]
        elif kind < 0.5:
            ids += [rng.randrange(256, 272) for _ in range(3)]
        return [*(token for token in ids if token != 261), 261]

    def fake_reply(self) -> FakeReply:
        ids = self.reply_ids()
        rng = self.random
        if len(ids) > 1 and rng.random() < 0.2:
            return FakeReply(ids=ids[:-1], finish="length", chunk=3)
        spans = [("1", 0, len(ids))] if len(ids) < 2 else [("1", 0, 1), ("2", 1, len(ids))]
        return FakeReply(ids=ids, versions=spans, chunk=rng.choice([1, 2, 7]), incremental=rng.random() < 0.5)

    def echo(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply as some harness would send it back; equal in meaning."""
        rng = self.random
        out: dict[str, Any] = json.loads(json.dumps(message))
        for at, call in enumerate(out.get("tool_calls", [])):
            if rng.random() < 0.5:
                call["index"] = at
            if rng.random() < 0.5:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        if not out.get("content"):
            out.update(rng.choice([{"content": None}, {"content": ""}, {"content": []}]))
        elif rng.random() < 0.3:
            out["content"] = [{"type": "text", "text": out["content"]}]
        if rng.random() < 0.5:
            out.pop("reasoning_content", None)
        return out

    async def run(self) -> None:
        rng = self.random
        status, made = await self.asgi.call("POST", "/sessions", ADMIN, {"sampling": {"temperature": 1.0}})
        assert status == 201
        session = json.loads(made)
        self.path = f"/sessions/{session['session_id']}"
        self.token = session["token"]
        tools = TOOLS if rng.random() < 0.7 else []
        first = [{"role": "user", "content": rng.choice(TEXTS)}]
        if rng.random() < 0.5:
            first.insert(0, {"role": rng.choice(["system", "developer"]), "content": rng.choice(TEXTS)})
        paths = [first]
        for _ in range(rng.randrange(1, 5)):
            messages = rng.choice(paths[-2:])
            width = rng.choice([1, 1, 1, 2, 3])
            for reply in await asyncio.gather(*(self.ask(messages, tools) for _ in range(width))):
                paths.append([*messages, self.echo(reply), *self.next_messages(reply)])
            if rng.random() < 0.1:
                tools = TOOLS[:1] if tools else TOOLS
            if rng.random() < 0.1:
                paths.append([*paths[-1][:-2], {"role": "assistant", "content": "edited"}, first[-1]])

    def next_messages(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        text = self.random.choice(TEXTS)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": text} for call in reply.get("tool_calls", [])
        ]
        return results or [{"role": "user", "content": text}]

    async def ask(self, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        rng = self.random
        body: dict[str, Any] = {"messages": messages, "stream": rng.random() < 0.4}
        if tools:
            body["tools"] = tools
        headers = {"idempotency-key": str(rng.random())} if rng.random() < 0.2 else {}
        self.calls += 1
        status, data = await self.asgi.call("POST", f"{self.path}/v1/chat/completions", self.token, body, headers)
        assert status == 200, data
        if headers:
            again = await self.asgi.call("POST", f"{self.path}/v1/chat/completions", self.token, body, headers)
            assert again == (status, data), "a retry must get the same bytes"
        return assistant(data, streamed=body["stream"])

    async def check(self, told: dict[str, tuple[list[int], list[int]]]) -> None:
        status, data = await self.asgi.call("GET", f"{self.path}/trajectories", self.token)
        assert status == 200, data
        found = unpack_rows(data)
        mine = {rid: pair for rid, pair in told.items() if self.path.endswith(rid_session(rid, self.path))}
        assert len(mine) == self.calls
        check_rows(found, list(mine.values()))


def rid_session(rid: str, path: str) -> str:
    """The session's id when the request id names it, else something that no path ends in."""
    session = path.rpartition("/")[2]
    return session if rid.startswith(session[:12]) else "\0"


def check_rows(found: tuple[Trajectory, ...], pairs: list[tuple[list[int], list[int]]]) -> None:
    """Every row is a call's prompt plus reply; every reply has mask 1 exactly once, with its own numbers."""
    calls = {(tuple(sent), tuple(got)) for sent, got in pairs}
    trained: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for row in found:
        ids = row.token_ids.tolist()
        assert row.turn_spans[-1].end == len(ids)
        for span in row.turn_spans:
            sent, got = tuple(ids[: span.start]), tuple(ids[span.start : span.end])
            assert (sent, got) in calls
            mask = row.loss_mask[span.start : span.end]
            assert mask.all() or not mask.any()
            if mask.all():
                trained.append((sent, got))
                expected = np.float32([-(1 + (at * 31 + token) % 97) / 100 for at, token in enumerate(got)])
                assert np.array_equal(row.logprobs[span.start : span.end], expected)
        sampled = np.zeros(len(ids), bool)
        for span in row.turn_spans:
            sampled[span.start : span.end] = True
        assert not row.loss_mask[~sampled].any()
    # As multisets: the same ids sampled twice are two samples.
    assert sorted(trained) == sorted((tuple(sent), tuple(got)) for sent, got in pairs)


def assistant(data: bytes, *, streamed: bool) -> dict[str, Any]:
    """The message that a client makes of an answer."""
    if not streamed:
        return dict(json.loads(data)["choices"][0]["message"])
    events = [line[6:] for line in data.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    out: dict[str, Any] = {"role": "assistant", "content": ""}
    finish = []
    for event in map(json.loads, events[:-1]):
        choice = event["choices"][0]
        out["content"] += choice["delta"].get("content") or ""
        if "reasoning_content" in choice["delta"]:
            out["reasoning_content"] = out.get("reasoning_content", "") + choice["delta"]["reasoning_content"]
        for call in choice["delta"].get("tool_calls", []):
            assert call["index"] == len(out.setdefault("tool_calls", []))
            out["tool_calls"].append({key: call[key] for key in ("id", "type", "function")})
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(finish) == 1
    return out


def vocabularies_control() -> dict[str, int]:
    return {token.content: number for number, token in vocabularies.small().get_added_tokens_decoder().items()}


@pytest.mark.slow(240)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("family", "worlds"),
    [
        ("compact-bytes", 160),
        ("qwen3", 80),
        pytest.param("compact-bytes", 700, marks=pytest.mark.all),
        pytest.param("qwen3", 300, marks=pytest.mark.all),
    ],
)
async def test_the_export_is_exactly_what_the_engine_saw(tmp_path: Path, family: str, worlds: int) -> None:
    """Every exported row was sent and returned, id for id; every sampled id is trained exactly once."""
    by_session: dict[str, World] = {}
    told: dict[str, tuple[list[int], list[int]]] = {}

    def script(request: FakeRequest) -> FakeReply:
        reply = by_session[request.rid[:12]].fake_reply()
        told[request.rid] = (request.input_ids, list(reply.ids))
        return reply

    config = ServerConfig(journal=tmp_path / "journal.sqlite", engine_wait_s=10.0, keep_closed=8)
    async with FakeEngine(script) as engine:
        app = create_app(config, RouterConfig(), admin_key=ADMIN, engine_urls=[engine.url])
        if family == "qwen3":
            tokenizer = ControlTokenizer(vocabularies.small(), name="small-qwen3")
            app.gateway.family = renderers_family("qwen3", tokenizer)
        await app.gateway.start()
        asgi = Asgi(app)

        async def one(seed: int) -> World:
            world = World(seed, asgi, engine, family == "qwen3")
            original = world.asgi.call

            async def noted(*args: Any, **named: Any) -> tuple[int, bytes]:
                status, data = await original(*args, **named)
                if args[1] == "/sessions":
                    by_session[json.loads(data)["session_id"][:12]] = world
                return status, data

            world.asgi = Asgi(app)
            world.asgi.call = noted  # type: ignore[method-assign]
            await world.run()
            await world.check(told)
            for rid in [rid for rid in told if rid.startswith(world.path.rpartition("/")[2][:12])]:
                del told[rid]
            return world

        for start in range(0, worlds, 20):
            await asyncio.gather(*(one(seed) for seed in range(start, min(start + 20, worlds))))
        calls = sum(world.calls for world in by_session.values())
        assert calls > worlds * 2, "the conversations hardly had turns"
        assert app.gateway.router.ledger.total.waste["unknown"] == 0
        await app.gateway.stop()


def test_the_check_itself_can_fail() -> None:
    """One changed id, one doubled mask, one missing call: each is noticed."""

    def row(ids: list[int], start: int) -> Trajectory:
        size = len(ids)
        mask = np.zeros(size, np.uint8)
        mask[start:] = 1
        logprobs = np.full(size, np.nan, np.float32)
        logprobs[start:] = [-(1 + (at * 31 + token) % 97) / 100 for at, token in enumerate(ids[start:])]
        versions = np.where(mask == 1, 0, -1).astype(np.int32)
        return Trajectory(
            token_ids=np.array(ids, np.int32), loss_mask=mask, logprobs=logprobs, weight_version=versions,
            session_id="s", leaf=0, branch_reason="root", turn_spans=(TokenSpan(start, size),),
            finish_reasons=("stop",), sampling=Sampling(), engine_ids=("e",), cached_tokens=(0,),
        )  # fmt: skip

    good = row([1, 2, 3], 2)
    check_rows((good,), [([1, 2], [3])])
    for rows, pairs in (
        ((row([1, 9, 3], 2),), [([1, 2], [3])]),
        ((good, good), [([1, 2], [3])]),
        ((good,), [([1, 2], [3]), ([1, 2], [4])]),
        ((row([1, 2, 3], 1),), [([1, 2], [3])]),
    ):
        with pytest.raises(AssertionError):
            check_rows(rows, pairs)
