"""Embedded engines as real processes behind a real ``smg``: prefixes are found again, a killed engine costs no turn."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from live_engines import LiveEngine, live_engines, write_model

from tollway.messages import Message
from tollway.records import Sampling
from tollway.router.config import RouterConfig
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer

pytestmark = [
    pytest.mark.slow(limit_s=90),
    pytest.mark.skipif(
        importlib.util.find_spec("smg") is None,
        reason="the outer gateway is not installed: pip install 'tollway[gateway]'",
    ),
]

QUICK = RouterConfig(gateway="smg", probe_interval_s=0.1, probe_timeout_s=1.0, probe_failures=2, connect_timeout_s=1.0)
SESSIONS, TURNS, TOKENS = 6, 4, 32


async def test_a_killed_engine_behind_a_gateway_costs_no_turn_and_no_token(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    doomed, other = LiveEngine(model), LiveEngine(model)
    with live_engines(doomed, other):
        async with FakeServer(tmp_path, engines=[doomed, other], router=QUICK) as server:  # type: ignore[list-item]
            await server.gateway.router.fleet.wait_serving(30, 2)
            sessions = []
            for number in range(SESSIONS):
                sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS, seed=number)
                sessions.append(await server.client.create(sampling=sampling))
            halfway = asyncio.Event()
            done = 0

            async def talk(number: int, session: Session) -> int:
                """All turns of a session; how many tokens were sampled in it."""
                nonlocal done
                said, sampled = [Message(role="user", content=f"{number}: go on")], 0
                for turn in range(TURNS):
                    reply = await server.client.chat(session, said)
                    sampled += reply.usage.completion_tokens
                    said += [reply.message, Message(role="user", content=f"and {turn}")]
                    done += turn == 1
                    if done == SESSIONS:
                        halfway.set()
                return sampled

            async def disaster() -> None:
                await halfway.wait()
                doomed.kill()

            *sampled, _ = await asyncio.gather(*(talk(*each) for each in enumerate(sessions)), disaster())
            for session, count in zip(sessions, sampled, strict=True):
                rows = await server.client.trajectories(session.session_id)
                assert sum(int(row.loss_mask.sum()) for row in rows) == count, "each sampled token is trained once"
            cache = server.gateway.router.ledger.summary()
            assert cache["calls"] == SESSIONS * TURNS
            assert cache["unknown_tokens"] == 0, cache
            assert set(cache["moved"]) == {"engine_lost"}, cache  # type: ignore[call-overload]
            assert float(str(cache["efficiency_without_faults"])) >= 0.95, cache
