"""Sessions whose engine is killed under them go on elsewhere, and their export is exact all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from live_engines import LiveEngine, live_engines, write_model

from tollway.messages import Message
from tollway.records import Sampling, Trajectory
from tollway.router.config import RouterConfig
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer

pytestmark = pytest.mark.slow(limit_s=90)

QUICK = RouterConfig(probe_interval_s=0.1, probe_timeout_s=1.0, probe_failures=2, connect_timeout_s=1.0)
SESSIONS, TURNS, TOKENS = 6, 4, 48


async def test_a_killed_engine_costs_no_turn_and_no_token(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    doomed, other = LiveEngine(model), LiveEngine(model)
    with live_engines(doomed, other):
        async with FakeServer(tmp_path, engines=[doomed, other], router=QUICK) as server:  # type: ignore[list-item]
            await server.gateway.router.fleet.wait_serving(30, 2)
            sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS, seed=7)
            sessions = [await server.client.create(sampling=sampling) for _ in range(SESSIONS)]
            first_turns = asyncio.Event()
            done = 0

            async def talk(session: Session) -> int:
                """All turns of a session; how many tokens were sampled in it."""
                nonlocal done
                said, sampled = [Message(role="user", content="go on")], 0
                for turn in range(TURNS):
                    reply = await server.client.chat(session, said)
                    sampled += reply.usage.completion_tokens
                    said += [reply.message, Message(role="user", content=f"and {turn}")]
                    if turn == 0:
                        done += 1
                        if done == SESSIONS:
                            first_turns.set()
                return sampled

            async def disaster() -> None:
                await first_turns.wait()
                doomed.kill()

            *sampled, _ = await asyncio.gather(*(talk(session) for session in sessions), disaster())
            engines = {str(row["url"]): row for row in await server.client.engines()}
            assert (engines[doomed.url]["state"], engines[other.url]["state"]) == ("lost", "serving")
            moved = 0
            for session, count in zip(sessions, sampled, strict=True):
                rows = await server.client.trajectories(session.session_id)
                assert sum(int(row.loss_mask.sum()) for row in rows) == count, "each sampled token is trained once"
                for row in rows:
                    await assert_exact(row, other.url)
                moved += len({name.split("#")[0] for row in rows for name in row.engine_ids}) == 2
            assert moved >= 1, "the killed engine had sessions"
            assert [row["in_flight"] for row in await server.client.engines()] == [0, 0]


async def assert_exact(row: Trajectory, url: str) -> None:
    """An engine that never saw the row computes the recorded log-probabilities from its ids."""
    ids = row.token_ids.tolist()
    body = {
        "rid": f"check-{id(row)}",
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        said = (await response.json())["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in said] == ids
    mask = row.loss_mask.astype(bool)
    recomputed = np.array([value if value is not None else np.nan for value, _, _ in said])
    np.testing.assert_allclose(row.logprobs[mask], recomputed[mask], atol=2e-4)
