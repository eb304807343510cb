"""A real server under fire: sends requests, judges each answer, and proves the sessions afterwards."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import vocabularies
from fuzz_odd import BREAK, grow, shot
from fuzz_talk import PATHS, Said, Talk, understand
from fuzz_wire import Answer, Client, Shot
from fuzz_witness import Camp, Witness, numbers_in

from tollway.router.fake import FakeEngine
from tollway.session_server.client import SessionClient
from tollway.session_server.fake import FakeServer
from tollway.session_server.families.catalogue import renderers_family
from tollway.session_server.tokens import ControlTokenizer

HANG_S = 30.0
"""A request that takes longer has no answer."""
FAMILIES = ("compact", "qwen")


@dataclass
class Served:
    """A server as clients see it."""

    url: str
    client: SessionClient
    http: aiohttp.ClientSession


class Ground:
    """One running server with its engine."""

    def __init__(self, server: FakeServer | Served, engine: FakeEngine, family: str) -> None:
        self.server = server
        self.client = Client(server.url)
        self.engine = engine
        self.witness = Witness(family)
        self.engine.script = self.witness.script
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.requests = 0
        self.camps: list[Camp] = []
        self.followed = 0
        """Prompts that went on from the ids of the reply before them."""

    async def camp(self) -> Camp:
        """A new session."""
        session = await self.server.client.create()
        self.camps.append(Camp(session.session_id, session.token))
        return self.camps[-1]

    # -- requests ----------------------------------------------------------------------------------

    async def fire(self, camp: Camp, one: Shot, *, prefix: bool = True) -> Answer:
        """Send one request of a session and judge the status of its answer."""
        known = {name for name, _ in one.headers}
        headers = one.headers
        if not known & {b"authorization", b"x-api-key"}:
            headers += ((b"authorization", b"Bearer " + camp.token.encode()),)
        path = b"/sessions/" + camp.session_id.encode() + one.path if prefix else one.path or b"/"
        self.requests += 1
        try:
            answer = await asyncio.wait_for(self.client.fire(replace(one, path=path, headers=headers)), HANG_S)
        except TimeoutError:
            raise AssertionError(f"no answer within {HANG_S} s: {_shown(one)}") from None
        route = one.path.split(b"?")[0].decode("latin-1")
        self.statuses[route if route in _ROUTES else "other", answer.status] += 1
        self._judge(one, answer)
        return answer

    def _judge(self, one: Shot, answer: Answer) -> None:
        status = answer.status
        if not status:
            assert one.broken or one.leave, f"the server hung up: {_shown(one)}"
            return
        spoiled = BREAK.encode() in one.body
        assert status < 500 or (spoiled and status in (502, 503)), f"{status} {answer.body[:300]!r}: {_shown(one)}"
        if one.clean and not spoiled:
            assert status == 200, f"{status} {answer.body[:300]!r}: {_shown(one)}"
        if status >= 400 and not one.broken and one.method != b"HEAD":
            assert answer.headers["content-type"] == "application/json", f"{answer}: {_shown(one)}"
            error = json.loads(answer.body)["error"]
            assert error["message"], "an error says what is wrong"
            assert error["code"], "an error has a code"

    async def step(self, rng: Random, camp: Camp, *, spoil: float = 0.02) -> None:
        """One harness's next move: a call, a call and its repetitions at once, or one that is left."""
        talk = self._talk(rng, camp)
        before = (list(talk.items), talk.calls)
        grow(rng, talk, broken_engine=spoil)
        one = shot(rng, talk, stream=rng.random() < 0.4)
        if rng.random() < 0.08:
            one = self._keyed(rng, camp, one)
        copies = rng.choice((2, 3, 4)) if rng.random() < 0.05 else 1
        prefix = rng.random() < 0.7
        answers = await asyncio.gather(*(self.fire(camp, one, prefix=prefix) for _ in range(copies)))
        heard = [said for answer in answers if (said := self._hear(camp, talk, one, answer)) is not None]
        if copies > 1 and one.clean and len(heard) == copies:
            keyed = any(name == b"idempotency-key" for name, _ in one.headers)
            assert len({said.reply_id for said in heard}) == (1 if keyed else copies), "samples, or one reply"
        if heard and one.clean:
            number = self._follow(talk, heard[0])
            talk.hear(rng, heard[0])
            # Replies that differ in dropped reasoning only are one reply to a harness that drops it.
            talk.number = number if f"#{number}#" in json.dumps(talk.items[-len(heard[0].items) :]) else ""
        else:
            talk.items[:], talk.calls = before
        if len(talk.items) < 24:
            camp.talks.append(talk)

    def _talk(self, rng: Random, camp: Camp) -> Talk:
        """A conversation that nobody else is at, until it is put back."""
        if camp.talks and rng.random() < 0.9:
            return camp.talks.pop(rng.randrange(len(camp.talks)))
        dialect = rng.choice(("chat", "responses", "messages"))
        tools = tuple(name for name in ("run", "edit", "plan") if rng.random() < 0.6)
        return Talk(dialect, lead=rng.choice(("", "", "be brief")), tools=tools, sort_keys=rng.random() < 0.1)

    def _follow(self, talk: Talk, said: Said) -> str:
        """The reply's number. A history goes on from what was sampled, id for id, however its harness writes it."""
        numbers = numbers_in(said.first)
        number = numbers.pop() if len(numbers) == 1 else ""
        if talk.number and number:
            self.followed += 1
            self.witness.follow(talk.number, number)
        return number

    def _keyed(self, rng: Random, camp: Camp, one: Shot) -> Shot:
        camp.keys += 1
        headers = ((b"idempotency-key", b"key-%d" % camp.keys), (b"x-stainless-retry-count", b"%d" % rng.randrange(2)))
        return replace(one, headers=(*one.headers, *headers))

    def _hear(self, camp: Camp, talk: Talk, one: Shot, answer: Answer) -> Said | None:
        if answer.status != 200 or one.method != b"POST" or not one.path.endswith(talk_path(talk)):
            return None
        said = understand(talk.dialect, answer)
        spoiled = BREAK.encode() in one.body
        assert said.whole or spoiled, f"a good engine's reply ended in an error: {answer.body[-300:]!r}: {_shown(one)}"
        assert not (said.whole and spoiled and one.clean), "a reply that cannot be recorded was given out"
        if not said.whole:
            return None
        camp.seen |= numbers_in(said.text)
        return said

    # -- proof -------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until nothing runs any more; the counters are back at zero."""
        for _ in range(int(HANG_S / 0.01)):
            if not self.engine.in_flight and not self._running():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("calls are still running")

    def _running(self) -> int:
        """Calls that the server counts, where that can be seen."""
        if isinstance(self.server, Served):
            return 0
        gateway = self.server.gateway
        running = sum(session.calls.running for session in gateway.store._loaded.values())
        return running + gateway.router.table.in_flight("e0")

    async def prove(self, camp: Camp) -> int:
        """Everything that a session has is what the engine saw, once, and nothing is lost. The turns checked."""
        await self.settle()
        rows = await self.server.client.trajectories(camp.session_id)
        state = await self._state(camp)
        assert state["in_flight"] == 0
        self.witness.prove(camp, rows, int(state["sampled_tokens"]))
        return int(state["turns"])

    async def still_serves(self, camp: Camp) -> None:
        """The session takes a plain turn in every dialect."""
        for dialect in ("chat", "responses", "messages"):
            talk = Talk(dialect)
            talk.tell(Random(0), "still there?")
            one = Shot(talk_path(talk), json.dumps(talk.body(stream=False)).encode(), clean=True)
            answer = await self.fire(camp, one)
            assert self._hear(camp, talk, one, answer) is not None

    async def _state(self, camp: Camp) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {camp.token}"}
        async with self.server.http.get(f"{self.server.url}/sessions/{camp.session_id}", headers=headers) as response:
            assert response.status == 200
            return dict(await response.json())


_ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")


@asynccontextmanager
async def ground(folder: Path, family: str) -> AsyncIterator[Ground]:
    """A server of one family under an engine that keeps nothing."""
    model = (
        renderers_family("qwen3", ControlTokenizer(vocabularies.small(), name="small-qwen3"))
        if family == "qwen"
        else None
    )
    engine = FakeEngine(keep_requests=False)
    settings: dict[str, object] = {"max_nodes": 10**6, "max_concurrent_turns": 4096}
    async with engine, FakeServer(folder, engines=[engine], family=model, settings=settings) as server:
        await server.gateway.router.fleet.wait_serving(10.0, 1)
        place = Ground(server, engine, family)
        try:
            yield place
        finally:
            place.client.close()


def talk_path(talk: Talk) -> bytes:
    """Route of a conversation."""
    return PATHS[talk.dialect]


def _shown(one: Shot) -> str:
    return f"{one.method!r} {one.path!r} {one.headers!r} leave={one.leave!r} {one.body[:1500]!r}"
