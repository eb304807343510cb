"""kill -9 under load, again and again on the same journals: what a client received is in the export.

Real server processes over a scripted engine that outlives them. Clients of all dialects, streaming and not, keep
their sessions through every death. A client with idempotency keys sends a call again until it is answered, so its
export holds exactly what it was answered; one without may leave a turn behind that it never saw the end of.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from fuzz_arena import FULL
from fuzz_process import KEY, Serving
from fuzz_talk import PATHS, Talk, understand
from fuzz_wire import Answer, Client, Shot
from fuzz_witness import Camp, Witness, numbers_in

from tollway.router.fake import FakeEngine
from tollway.session_server.client import SessionClient

CLIENTS = 9
RETRIES = {0, 409, 429, 500, 502, 503}
"""Answers after which a client asks again; 0 is none at all."""


@dataclass
class Player:
    """A client and its session."""

    number: int
    camp: Camp
    keyed: bool
    stream: bool
    talk: Talk
    calls: int = 0
    answered: int = 0
    lost: int = 0
    """Calls whose answer did not arrive whole."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    rng: Random = field(default_factory=lambda: Random(0))

    async def play(self, serving: Serving) -> None:
        """Talk until told to stop; then finish the call at hand."""
        while not self.stop.is_set():
            self.talk.tell(self.rng, "on")
            await self._turn(serving)
            if len(self.talk.items) > 20:
                self.talk = Talk(self.talk.dialect, tools=self.talk.tools, lead=f"part {self.calls}")

    async def _turn(self, serving: Serving) -> None:
        self.calls += 1
        headers = [(b"authorization", b"Bearer " + self.camp.token.encode())]
        if self.keyed:
            headers.append((b"idempotency-key", b"call-%d" % self.calls))
        body = json.dumps(self.talk.body(stream=self.stream)).encode()
        path = f"/sessions/{self.camp.session_id}".encode() + PATHS[self.talk.dialect]
        while True:
            await serving.up.wait()
            client = Client(serving.url)
            try:
                answer = await asyncio.wait_for(client.fire(Shot(path, body, headers=tuple(headers))), 60)
                said = understood(self.talk.dialect, answer)
            finally:
                client.close()
            if said is not None:
                self.answered += 1
                self.camp.seen |= numbers_in(said.text)
                self.talk.hear(self.rng, said)
                return
            self.lost += 1
            await asyncio.sleep(0.05)


def understood(dialect: str, answer: Answer) -> Any:
    """A whole reply, or ``None`` for what a client would try again."""
    if answer.status != 200:
        assert answer.status in RETRIES, answer
        return None
    try:
        said = understand(dialect, answer)
    except (AssertionError, ValueError, KeyError, IndexError):
        return None  # cut within an event
    return said if said.whole else None


async def enlist(serving: Serving, http: aiohttp.ClientSession) -> list[Player]:
    """Clients of every dialect, half of them streaming, a third with keys."""
    client = SessionClient(serving.url, KEY, http=http)
    players = []
    for number in range(CLIENTS):
        session = await client.create(group_id=f"g{number}")
        dialect = list(PATHS)[number % 3]
        talk = Talk(dialect, tools=("run", "edit") if number % 2 else ())
        camp = Camp(session.session_id, session.token)
        players.append(Player(number, camp, keyed=number % 4 == 0, stream=number // 3 % 2 == 1, talk=talk))
    return players


async def verify(serving: Serving, witness: Witness, players: list[Player], http: aiohttp.ClientSession) -> int:
    """Every session after the last restart: whole, exact, and in use. Turns that were checked."""
    client = SessionClient(serving.url, KEY, http=http)
    turns = 0
    for player in players:
        state = await client.session(player.camp.session_id)
        rows = await client.trajectories(player.camp.session_id)
        numbers = witness.prove(player.camp, rows, int(str(state["sampled_tokens"])))
        if player.keyed:
            assert numbers == player.camp.seen, "one generation for each key, whoever died meanwhile"
        reasons = {str(node["reason"]) for node in state["nodes"]}  # type: ignore[attr-defined]  # a list of nodes
        assert reasons <= {"root", "new_conversation", "new_root", "continuation", "sibling", "retry", "fork"}, reasons
        turns += int(str(state["turns"]))
    return turns


@pytest.mark.slow(120)
@pytest.mark.parametrize(
    ("workers", "kills"),
    [
        pytest.param(1, 2, marks=pytest.mark.timeout(120)),
        pytest.param(2, 2, marks=pytest.mark.timeout(120)),
        pytest.param(1, 50, marks=FULL),
        pytest.param(2, 50, marks=FULL),
    ],
)
async def test_what_a_client_received_survives_every_kill(tmp_path: Path, workers: int, kills: int) -> None:
    rng = Random(kills + workers)
    witness = Witness("compact", delay_s=0.002)
    async with FakeEngine(witness.script, keep_requests=False) as engine, aiohttp.ClientSession() as http:
        serving = Serving(tmp_path, engine, workers=workers)
        await serving.start()
        players = await enlist(serving, http)
        playing = [asyncio.ensure_future(player.play(serving)) for player in players]
        for kill in range(kills):
            before = sum(player.answered for player in players)
            while sum(player.answered for player in players) < before + 2 * CLIENTS:
                await asyncio.sleep(0.005)
            await asyncio.sleep(rng.random() * 0.1)
            # A parent gives up on workers that keep dying, so now and then it is killed itself.
            await serving.kill(rng, all_of_it=kill % 4 == 3)
        for player in players:
            player.stop.set()
        await asyncio.wait_for(asyncio.gather(*playing), 90)
        await serving.stop()
        await serving.start()
        turns = await verify(serving, witness, players, http)
        answered, lost = sum(p.answered for p in players), sum(p.lost for p in players)
        assert answered >= 2 * CLIENTS * kills
        assert lost > 0, "the kills hit running calls"
        assert turns >= answered
        sys.stdout.write(f"{workers} workers, {kills} kills: {answered} replies received, {lost} cut, {turns} turns\n")
        for player in players:  # sessions go on after the last restart
            player.talk.tell(rng, "and now")
            await player._turn(serving)
        await verify(serving, witness, players, http)
        await serving.stop()
