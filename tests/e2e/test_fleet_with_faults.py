"""A fleet that loses an engine, gains one and gets new weights under its sessions: nothing lost, every miss explained.

``tollway serve`` and its engines are processes of their own; sessions, refit and figures go through what a user has.
What the server says of its cache is held against what follows from the exports alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from demo_runs import processes_of, wait_until_gone
from safetensors.torch import load_file

from tollway.errors import EngineLost, NoEngine
from tollway.fleet_watch import Members
from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.messages import Message, ToolSpec
from tollway.records import Sampling, Trajectory
from tollway.session_server.client import ChatReply, Json, SessionClient
from tollway.trainer.weights.payload import Payload, TensorPayload
from tollway.trainer.weights.refit import Refit
from tollway.trainer.weights.wire import buckets, serialise

logger = logging.getLogger(__name__)
KEY = "a-key-for-this-test-only"
TOLLWAY = [sys.executable, "-P", "-m", "tollway"]
SHAPE = ModelShape(vocab_size=272, hidden_size=48, head_dim=16, intermediate_size=64, max_position_embeddings=2048)
QUICK = ("server.family='compact-bytes'", "server.port=0", "router.probe_interval_s=0.2")
ENGINES, SESSIONS, TURNS, AT_ONCE, TOKENS = 4, 64, 10, 24, 12
TOOL_S = 0.25
"""A third of the turns have a tool that takes so long; its session has no call running meanwhile."""
KILL_AT, ADD_AT, REFIT_AT = 150, 200, 400
"""Turns of 640 after which each thing happens: first the sessions that began together are in the middle, then those
that came after them and live on the new engine, too."""
LOADS = {"resident_tokens", "reserved_tokens", "sessions", "in_flight", "waiting", "exact_sessions", "exact_calls"}
FAULTS = {"moved", "refit_flush"}
"""Causes that are what happened here, not how well sessions are kept where their prefix is."""
TOOLS = (
    ToolSpec(
        name="run",
        description="Run a command.",
        parameters='{"type":"object","properties":{"command":{"type":"string"}},"required":["command"]}',
    ),
)


class Served:
    """A ``tollway`` process that says ready in one line."""

    def __init__(self, folder: Path, *arguments: str, name: str, env: dict[str, str] | None = None) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*TOLLWAY, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"TOLLWAY_TEST_RUN": str(folder), "OMP_NUM_THREADS": "1"} | (env or {}),
            )
        self.said: dict[str, object] = {}

    @property
    def url(self) -> str:
        return str(self.said["url"])

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.said = json.loads(line)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal, if it still runs; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


def server(folder: Path, *arguments: str, sets: tuple[str, ...] = ()) -> Served:
    """``tollway serve`` with its files in ``folder``."""
    journal = f"server.journal={str(folder / 'journal.sqlite')!r}"
    values = (*QUICK, f"run.dir={str(folder / 'run')!r}", journal, *sets)
    flags = [part for each in values for part in ("--set", each)]
    return Served(folder, "serve", *arguments, *flags, name="server", env={"TOLLWAY_ADMIN_KEY": KEY})


def engine(folder: Path, model: Path, name: str) -> Served:
    """An engine that nobody but the test knows."""
    return Served(folder, "engine", "--model-path", str(model), "--set", "engine.port=0", name=name)


@contextmanager
def running(*processes: Served) -> Iterator[None]:
    """Wait until all of them are ready; kill what is left at the end."""
    with ExitStack() as stack:
        for each in processes:
            stack.callback(each.end)
        for each in processes:
            each.ready()
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Random weights of version 0 and of version 1."""
    folder = tmp_path_factory.mktemp("models")
    for version in (0, 1):
        write_fresh_model(folder / str(version), SHAPE, seed=version, std=0.15)
    return folder / "0", folder / "1"


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[tuple[SessionClient, aiohttp.ClientSession]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        yield SessionClient(url, KEY, http=http, retry_s=1.0), http


async def until(look: Callable[[], Awaitable[object]], what: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not await look():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.05)


# -- sessions ------------------------------------------------------------------------------------------


class Progress:
    """How many turns were answered by now."""

    def __init__(self) -> None:
        self.turns, self._changed = 0, asyncio.Condition()

    async def one_more(self) -> None:
        self.turns += 1
        async with self._changed:
            self._changed.notify_all()

    async def reach(self, turns: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.turns >= turns)


@dataclass
class Talk:
    """One session as its harness saw it."""

    session_id: str
    replies: list[ChatReply] = field(default_factory=list)


def answers(message: Message, number: int, turn: int) -> list[Message]:
    """What comes back for a reply: results of its calls, or a user who asks on."""
    text = f"session {number}, turn {turn}: " + "abcdefghij" * (1 + number % 3)
    if not message.tool_calls:
        return [Message(role="user", content=text)]
    return [Message(role="tool", content=text, tool_call_id=call.id) for call in message.tool_calls]


async def talk(client: SessionClient, number: int, progress: Progress, places: asyncio.Semaphore) -> Talk:
    """All turns of a session, from its opening to its end."""
    async with places:
        session = await client.create(sampling=Sampling(max_new_tokens=TOKENS, seed=number))
        mine = Talk(session.session_id)
        said = [Message(role="system", content="You repair code."), Message(role="user", content=f"Task {number}.")]
        for turn in range(TURNS):
            reply = await client.chat(session, said, TOOLS)
            mine.replies.append(reply)
            said += [reply.message, *answers(reply.message, number, turn)]
            await progress.one_more()
            await asyncio.sleep(TOOL_S if (number + turn) % 3 == 0 else 0)
        await client.close(session.session_id)
        return mine


# -- faults --------------------------------------------------------------------------------------------


async def disturb(client: SessionClient, progress: Progress, pid: int, added: Served) -> str:
    """Kill an engine, add one, and return when it is time for the refit; the address of the killed one."""
    before = {str(row["url"]) for row in await client.engines()}
    await progress.reach(KILL_AT)
    os.kill(pid, signal.SIGKILL)

    async def serving() -> set[str]:
        return {str(row["url"]) for row in await client.engines() if row["state"] == "serving"}

    async def one_is_gone() -> bool:
        return len(await serving()) == ENGINES - 1

    await until(one_is_gone, "the killed engine is known to be dead")
    (killed,) = before - await serving()

    await progress.reach(ADD_AT)
    await client.add_engine(added.url)

    async def it_serves() -> bool:
        return added.url in await serving()

    await until(it_serves, "the added engine serves")

    await progress.reach(REFIT_AT)
    return killed


class _Saved:
    """Weights of a directory."""

    def __init__(self, directory: Path) -> None:
        self._named = load_file(directory / "model.safetensors")

    async def payload(self, version: int) -> Payload:
        sent = [serialise(bucket) for bucket in buckets(self._named.items(), 100_000)]
        return TensorPayload(sent, sum(tensor.nbytes for tensor in self._named.values()))


async def refit(members: Members, weights: Path) -> None:
    """The trainer's own way of weights, with the wiring of ``app.Fleet.turns``."""
    source = _Saved(weights)
    push = Refit(members.targets, source, notify=members.tell, drained=partial(members.drained, limit_s=1.0))
    report = await push.push(1)
    assert report.quarantined == ()


# -- what follows from the exports ---------------------------------------------------------------------


@dataclass
class Account:
    """The cache figures of sessions, from their exported rows and nothing else."""

    prompt: int = 0
    possible: int = 0
    useful: int = 0
    waste: Counter[str] = field(default_factory=Counter)
    moves: int = 0
    """Calls that ran elsewhere than the one before."""

    def add(self, row: Trajectory) -> None:
        """Count the calls of one conversation. The embedded engine's pages have one token."""
        version_at = row.weight_version
        for turn, span in enumerate(row.turn_spans):
            cached = row.cached_tokens[turn]
            assert cached is not None
            self.prompt += span.start
            if turn == 0:
                continue
            before = row.turn_spans[turn - 1]
            moved = row.engine_ids[turn] != row.engine_ids[turn - 1]
            possible = before.end - 1  # the last sampled token was never computed
            missed = max(0, possible - cached)
            self.possible += possible
            self.useful += possible - missed
            self.moves += moved
            if missed:
                flushed = version_at[span.start] != version_at[before.end - 1]
                self.waste["moved" if moved else "refit_flush" if flushed else "unexplained"] += missed


async def assert_exact(row: Trajectory, judges: tuple[str, str], http: aiohttp.ClientSession) -> None:
    """Engines that never saw the row, one of each version, compute the recorded log-probabilities from its ids."""
    ids = row.token_ids.tolist()
    for version in set(row.weight_version[row.loss_mask == 1].tolist()):
        body = {
            "rid": f"judge-{row.session_id}-{version}",
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        async with http.post(f"{judges[version]}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            said = (await response.json())["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in said] == ids
        recomputed = np.array([value if value is not None else np.nan for value, _, _ in said])
        mask = row.weight_version == version
        np.testing.assert_allclose(row.logprobs[mask], recomputed[mask], atol=2e-4)


def assert_whole(talk: Talk, row: Trajectory) -> None:
    """Every turn that the harness got an answer for is in the row, as it was answered."""
    assert len(talk.replies) == len(row.turn_spans) == TURNS
    for turn, (reply, span) in enumerate(zip(talk.replies, row.turn_spans, strict=True)):
        usage, sampled = reply.usage, span.end - span.start
        assert (usage.prompt_tokens, usage.completion_tokens) == (span.start, sampled)
        assert (usage.cached_tokens, reply.finish_reason != "length") == (
            row.cached_tokens[turn],
            row.finish_reasons[turn] != "length",
        )
        versions = row.weight_version[span.start : span.end].tolist()
        assert reply.weight_versions == (versions[0], versions[-1])
    assert int(row.loss_mask.sum()) == sum(reply.usage.completion_tokens for reply in talk.replies)
    assert np.array_equal(row.loss_mask == 1, row.weight_version >= 0)
    spanned = np.full(row.token_ids.size, -1)
    for each in row.version_spans:
        spanned[each.start : each.end] = each.version
    assert np.array_equal(spanned, row.weight_version)


# -- the tests -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What was there at the end."""

    talks: list[Talk]
    rows: dict[str, tuple[Trajectory, ...]]
    cache: dict[str, Any]
    session_waste: dict[str, dict[str, int]]
    killed: str
    talk_s: float

    @property
    def conversations(self) -> list[Trajectory]:
        return [row for rows in self.rows.values() for row in rows]


async def run_with_faults(gateway: Served, added: Served, pid: int, weights: Path) -> Outcome:
    """All sessions to their end, with everything that happens to the fleet meanwhile."""
    async with client_of(gateway.url) as (client, http):
        members = Members(client, http)
        progress, places = Progress(), asyncio.Semaphore(AT_ONCE)
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            talking = [tasks.create_task(talk(client, each, progress, places)) for each in range(SESSIONS)]
            killed = await disturb(client, progress, pid, added)
            await refit(members, weights)
        talk_s = time.monotonic() - started
        await members.aclose()
        await assert_idle(await client.fleet(), http, killed=killed, added=added.url)
        talks = [each.result() for each in talking]
        sessions = {each.session_id: cast("dict[str, Any]", await client.session(each.session_id)) for each in talks}
        return Outcome(
            talks=talks,
            rows={each.session_id: await client.trajectories(each.session_id) for each in talks},
            cache=dict(await client.cache()),
            session_waste={name: said["cache"]["waste"] for name, said in sessions.items()},
            killed=killed,
            talk_s=talk_s,
        )


@pytest.mark.timeout(180)
async def test_a_kill_an_added_engine_and_a_refit_cost_no_turn_and_every_miss_has_its_cause(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    sets = (f"model.path={str(models[0])!r}", "engine.restarts=0")
    gateway = server(tmp_path, "--start-engines", str(ENGINES), sets=sets)
    added = engine(tmp_path, models[0], "added")
    with running(gateway, added):
        pids = [pid for pid, words in processes_of(tmp_path) if " engine " in words and pid != added.process.pid]
        assert len(pids) == ENGINES
        outcome = await run_with_faults(gateway, added, pids[0], models[1])
        assert gateway.end(signal.SIGTERM) == 0, gateway.log.read_text()
        assert added.end(signal.SIGTERM) == 0, added.log.read_text()
        assert wait_until_gone(tmp_path) == []

    # No turn is lost, none is there twice, and none is a branch of its own: 64 rows of 10 turns.
    assert [len(each) for each in outcome.rows.values()] == [1] * SESSIONS
    for each in outcome.talks:
        assert_whole(each, outcome.rows[each.session_id][0])
    rows = outcome.conversations
    assert sum(len(row.turn_spans) for row in rows) == SESSIONS * TURNS
    assert {span.version for row in rows for span in row.version_spans} == {0, 1}
    assert any(len({span.version for span in row.version_spans}) == 2 for row in rows)
    assert_places(rows, killed=outcome.killed, added=added.url)
    assert_explained(outcome)

    with running(*(judging := [engine(tmp_path, model, f"judge{n}") for n, model in enumerate(models)])):
        judges = (judging[0].url, judging[1].url)
        async with aiohttp.ClientSession() as http:
            for row in rows:
                await assert_exact(row, judges, http)
    names = ("hit_rate", "ceiling", "efficiency", "efficiency_without_faults", "possible_tokens", "waste", "moved")
    measured = {name: outcome.cache[name] for name in (*names, "spanning_calls")}
    measured |= {
        "talk_s": round(outcome.talk_s, 1),
        "moved_sessions": sum(len(set(row.engine_ids)) > 1 for row in rows),
    }
    logger.info("measured: %s", json.dumps(measured))


def assert_explained(outcome: Outcome) -> None:
    """Every miss has a cause, it is the one that the exports show, and beside what happened nothing was missed."""
    cache = outcome.cache
    assert (cache["calls"], cache["unreported_calls"]) == (SESSIONS * TURNS, 0)
    assert (cache["failed_calls"], cache["cancelled_calls"]) == (0, 0)
    assert cache["unknown_tokens"] == 0
    whole, stayed = Account(), Account()
    for row in outcome.conversations:
        mine = Account()
        for account in (mine, whole, *([stayed] if len(set(row.engine_ids)) == 1 else [])):
            account.add(row)
        assert outcome.session_waste[row.session_id] == dict(mine.waste), "moved only where a session really moved"
    assert cache["waste"] == dict(whole.waste)
    assert whole.waste.keys() == FAULTS, "nothing else was missed, and both did happen"
    assert sum(cache["moved"].values()) == whole.waste["moved"]
    assert cache["moved"].keys() <= {"engine_lost", "migration"}, "nobody was drained"
    said = tuple(cache[name] for name in ("prompt_tokens", "possible_tokens", "useful_tokens"))
    assert said == (whole.prompt, whole.possible, whole.useful)

    # Left out is what the kill and the refit cost by themselves, each once: the tokens of ``moved`` (a session's KV
    # stays behind on the engine that it left) and ``refit_flush`` (KV of old weights may not serve new ones).
    assert cache["efficiency_without_faults"] >= 0.95
    assert stayed.useful / (stayed.possible - stayed.waste["refit_flush"]) >= 0.95


async def assert_idle(fleet: Json, http: aiohttp.ClientSession, *, killed: str, added: str) -> None:
    """Four engines serve the new version and nobody uses them, as the router and as they themselves count."""
    rows = fleet["engines"]
    assert isinstance(rows, list)
    living = [row for row in rows if row["url"] != killed]
    assert len(living) == ENGINES
    assert added in {row["url"] for row in living}
    assert [(row["state"], row["version"]) for row in living] == [("serving", 1)] * ENGINES
    assert (fleet["policy_version"], fleet["rollout_down"]) == (1, "")
    for row in rows:
        assert {name: row[name] for name in LOADS & row.keys()} == dict.fromkeys(LOADS & row.keys(), 0), row
    for row in living:
        assert row.keys() >= LOADS
        # Its health is probed all the time, by a request for one token: at some moment it has none.
        await until(partial(idle, http, str(row["url"])), f"{row['url']} decodes for nobody")


async def idle(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(f"{url}/v1/loads") as response:
        (load,) = (await response.json())["loads"]
    return (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)


def assert_places(rows: list[Trajectory], *, killed: str, added: str) -> None:
    """The killed engine had sessions, which left it for good; the added one got some."""
    urls = [[name.rpartition("#")[0] for name in row.engine_ids] for row in rows]
    left = [turns for turns in urls if killed in turns and turns[-1] != killed]
    assert left, "sessions were on the killed engine"
    for turns in left:
        first = turns.index(killed)
        assert set(turns[first : first + turns.count(killed)]) == {killed}, "nobody came back to it"
    assert any(added in turns for turns in urls)


@pytest.mark.timeout(120)
async def test_a_server_whose_engines_all_died_says_so_to_calls_readiness_and_doctor(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    engines = [engine(tmp_path, models[0], f"engine{number}") for number in range(2)]
    with running(*engines):
        gateway = server(tmp_path, *(part for each in engines for part in ("--engine", each.url)))
        with running(gateway):
            async with client_of(gateway.url) as (client, http):
                await until(client.ready, "the server is ready")
                session = await client.create(sampling=Sampling(max_new_tokens=TOKENS))
                said = [Message(role="user", content="hi")]
                reply = await client.chat(session, said)
                for each in engines:
                    each.end()
                said += [reply.message, Message(role="user", content="are you there?")]
                # The first call may be the one that finds out; it is an error of its own kind, in time, all the same.
                with pytest.raises((EngineLost, NoEngine)):
                    await asyncio.wait_for(client.chat(session, said), 20)

                async def down() -> bool:
                    return not await client.ready()

                await until(down, "the server is not ready")
                with pytest.raises(NoEngine) as caught:
                    await client.chat(session, said)
                assert (caught.value.code, caught.value.status) == ("no_engine", 503)
                async with http.get(f"{gateway.url}/readyz") as response:
                    assert response.status == 503
                    words = (await response.json())["engines"]
                assert len(words) == 2
                assert all("is lost: " in each and "nobody listens there" in each for each in words), words
                assert all(each in str(caught.value) for each in words), "a call hears the engines' last words"
                new = await client.create()
                with pytest.raises(NoEngine):
                    await client.chat(new, [Message(role="user", content="hi")])
            doctor = subprocess.run(
                [*TOLLWAY, "doctor", "--url", gateway.url],
                stdout=subprocess.PIPE,
                env=os.environ | {"TOLLWAY_ADMIN_KEY": KEY, "COLUMNS": "400"},
                text=True,
                timeout=60,
                check=False,
            )
            assert doctor.returncode == 1, doctor.stdout
            assert "this server cannot serve turns now" in doctor.stdout
            reasons = [each.partition(" is lost: ")[::2] for each in words]
            assert all(f"{url} is lost with weights 0: {why}" in doctor.stdout for url, why in reasons), doctor.stdout
            assert gateway.process.poll() is None, "whether to live without engines is for its user"
            assert gateway.end(signal.SIGTERM) == 0, gateway.log.read_text()
    assert wait_until_gone(tmp_path) == []


@pytest.mark.timeout(120)
def test_a_server_with_engines_of_its_own_ends_with_their_last_words_when_none_may_start_again(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    sets = (f"model.path={str(models[0])!r}", "engine.restarts=0")
    gateway = server(tmp_path, "--start-engines", "2", sets=sets)
    with running(gateway):
        for pid, words in processes_of(tmp_path):
            if " engine " in words:
                os.kill(pid, signal.SIGKILL)
        assert gateway.process.wait(60) == 1
        said = gateway.log.read_text()
        assert "[component_lost] engine" in said, said
        assert "ended with status -9; its last words:" in said
        assert "no restart is left" in said
        assert "0 engines are fewer than the 1 that are needed" in said
    assert wait_until_gone(tmp_path) == []


@pytest.mark.all
@pytest.mark.timeout(400)
def test_a_run_whose_engines_all_died_and_do_not_come_back_ends_within_130_s_by_default(tiny) -> None:  # type: ignore[no-untyped-def]
    """Each engine is started again, and hangs while it starts: only the default of the router's deadline ends it."""
    run = tiny("train", "trainer.steps=5000", "engine.count=2")
    run.wait_for_step(1)
    first = {pid for pid, words in processes_of(run.run_dir) if " engine " in words}
    assert len(first) == 2
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    died, hung = time.monotonic(), set[int]()
    while run.process.poll() is None:
        assert time.monotonic() < died + 130, run.output
        new = {pid for pid, words in processes_of(run.run_dir) if " engine " in words} - first - hung
        for pid in new:
            os.kill(pid, signal.SIGSTOP)
        hung |= new
        time.sleep(0.01)
    took_s = time.monotonic() - died
    assert run.process.returncode == 1, run.output
    assert 100 < took_s < 130
    assert len(hung) == 2
    assert "[rollout_down] no engine was ready for 12" in run.output
    assert "router.rollout_down_timeout_s 120" in run.output
    assert "its last words:" in run.output
    assert wait_until_gone(run.run_dir) == []
    logger.info("seconds from kill to exit: %.1f", took_s)
