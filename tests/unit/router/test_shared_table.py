"""The table behind the placement service, told by one server what happened."""

from __future__ import annotations

import contextlib

from call_helpers import QUICK, until

from tollway.router.fake import FakeEngine
from tollway.router.placement_wire import Attach, EngineSaid, Report, SessionRow
from tollway.router.shared_table import SharedTable


async def test_a_session_that_a_server_moved_keeps_its_place_at_other_models_and_has_not_ended() -> None:
    async with contextlib.AsyncExitStack() as stack:
        one, two, judge = [await stack.enter_async_context(FakeEngine()) for _ in range(3)]
        shared = SharedTable(QUICK, lease_s=30.0)
        stack.push_async_callback(shared.aclose)
        for engine in (one, two):
            shared.add(EngineSaid(url=engine.url))
        shared.add(EngineSaid(url=judge.url, model="judge", frozen=True))
        await until(lambda: len([*shared.fleet.serving(), *shared.fleet.serving("judge")]) == 3, "all serve")
        rows = [SessionRow(key="k", url=one.url, tokens=9), SessionRow(key="k", url=judge.url, model="judge", tokens=4)]
        shared.attach(Attach(server="a", boot="1", sessions=rows))
        shared.report(Report(server="a", boot="1", moved=[SessionRow(key="k", url=two.url, tokens=20)]))
        places = {pin.model: (pin.engine_id, pin.resident_tokens) for _, pin in shared.table.places()}
        assert places == {"": ("e1", 20), "judge": ("e2", 4)}
        assert [shared.table.load(name).resident_tokens for name in ("e0", "e1", "e2")] == [0, 20, 4]
        growth = shared.table._growth[""]
        assert (sum(growth._ended), sum(growth._live)) == (0.0, 1), "it goes on"
        shared.report(Report(server="a", boot="1", released=["k"]))
        assert shared.table.places() == []
