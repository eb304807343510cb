"""One harness on stage: a scripted engine, a real server, a wire tap, and the proof of what was exported."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scripted import PLAYS, Call, ScriptedModel, environment, play, qwen3_tokenizer
from wire_tap import Exchange, NoWayOut, WireTap

from tollway.records import Trajectory
from tollway.router.fake import FakeEngine, FakeRequest
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer
from tollway.session_server.families.base import Family

RUN_S = 120.0
"""Longest run of one harness."""
ROOTS = {"root", "new_conversation"}


@dataclass
class Proof:
    """What the engine was sent and returned, and what the session server made of it."""

    engine: FakeEngine
    model: ScriptedModel
    server: FakeServer
    session_id: str

    def prompt(self, request: FakeRequest) -> str:
        """Text of what the engine was sent."""
        return qwen3_tokenizer().decode(request.input_ids)

    def sequence(self, rid: str) -> list[int]:
        """Every id of one engine call: sent, then returned."""
        return [*self.engine.sent(rid), *self.engine.replies[rid]]

    async def exact_rows(self) -> tuple[Trajectory, ...]:
        """The export: every row is what one engine call got and returned, and every reply is trained once."""
        rows = await self.server.client.trajectories(self.session_id)
        known = {tuple(self.sequence(request.rid)) for request in self.engine.requests}
        assert {tuple(row.token_ids.tolist()) for row in rows} <= known, await self.reasons()
        sampled = sum(len(reply) for reply in self.engine.replies.values())
        assert sum(int(row.loss_mask.sum()) for row in rows) == sampled, await self.reasons()
        return rows

    async def reasons(self) -> list[tuple[int, int | None, str]]:
        """(number, parent, reason) of every model call of the session."""
        state = await self.server.client.session(self.session_id)
        nodes: list[dict[str, Any]] = list(state["nodes"])  # type: ignore[call-overload]  # JSON
        return [(node["number"], node["parent"], node["reason"]) for node in nodes]

    async def exact_main_row(self) -> Trajectory:
        """The one trained conversation, proved id by id against the engine's own log; side requests apart."""
        rows, reasons = await self.exact_rows(), await self.reasons()
        assert len(reasons) == len(self.engine.requests) == len(self.model.main) + len(self.model.side), reasons
        assert len(rows) == 1 + len(self.model.side), reasons
        assert {row.branch_reason for row in rows} <= ROOTS, reasons
        wanted = self.sequence(self.model.main[-1].rid)
        (main,) = (row for row in rows if row.token_ids.tolist() == wanted)
        assert main.trainable, main.untrainable_reason
        self._check_mask_and_logprobs(main)
        sides = {tuple(self.sequence(request.rid)) for request in self.model.side}
        assert {tuple(row.token_ids.tolist()) for row in rows if row is not main} == sides
        return main

    def _check_mask_and_logprobs(self, main: Trajectory) -> None:
        mask = np.zeros(main.token_ids.size, np.uint8)
        logprobs = np.full(main.token_ids.size, np.nan, np.float32)
        before: list[int] = []
        for request in self.model.main:
            assert request.input_ids[: len(before)] == before, "a turn does not extend the one before it"
            before = self.sequence(request.rid)
            mask[len(request.input_ids) : len(before)] = 1
            logprobs[len(request.input_ids) : len(before)] = self.model.logprobs[request.rid]
        np.testing.assert_array_equal(main.loss_mask, mask)
        np.testing.assert_array_equal(main.logprobs, logprobs)
        assert set(main.weight_version[mask == 1].tolist()) == {0}
        assert len(main.turn_spans) == len(self.model.main)


@dataclass
class Stage(Proof):
    """Everything around one run of a harness."""

    harness: str
    folder: Path
    """Where the harness works; empty at first."""
    home: Path
    session: Session
    tap: WireTap
    outside: NoWayOut
    output: str = ""
    """Standard output and error of the harness."""

    async def run(self, command: Sequence[str]) -> int:
        """Exit status of the harness; it and all that it started are gone afterwards."""
        env = environment(self.home, self.session.base_url, self.session.token)
        env |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), self.outside.url)
        env |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
        log = self.home.parent / "output"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self.folder,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return await asyncio.wait_for(process.wait(), RUN_S)
            except TimeoutError:
                return -1
            finally:
                with suppress(ProcessLookupError):  # nothing was left
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                self.output = log.read_text(encoding="utf-8", errors="replace")

    def calls(self, path: str) -> list[Exchange]:
        """The harness's model calls on one route, which is named behind the session's URL."""
        return [each for each in self.tap.exchanges if each.method == "POST" and each.path.endswith(path)]


@asynccontextmanager
async def on_stage(
    harness: str, tmp_path: Path, family: Family, *, calls: Sequence[Call] | None = None, fenced: bool = False
) -> AsyncIterator[Stage]:
    """Set the stage for one harness.

    ``calls``: other tool calls than its usual ones. ``fenced``: it reads commands from text and offers no tools.
    """
    folder, home, data = (tmp_path / name for name in ("work", "home", "server"))
    for path in (folder, home, data):
        path.mkdir()
    model = ScriptedModel(family, play(calls or PLAYS[harness], folder), fenced=fenced)
    async with WireTap() as tap, NoWayOut() as outside, FakeEngine(model, context_length=131072) as engine:
        settings: dict[str, object] = {"public_url": tap.url}
        async with FakeServer(data, engines=[engine], family=family, settings=settings) as server:
            tap.target = server.url
            session = await server.client.create(task_id=harness)
            yield Stage(engine, model, server, session.session_id, harness, folder, home, session, tap, outside)
