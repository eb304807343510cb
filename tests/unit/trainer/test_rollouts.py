"""What a resume makes of the prompts that an earlier process left open."""

from __future__ import annotations

from pathlib import Path

from trainer_helpers import group, rollout, trajectory

from tollway.errors import EpisodeFailed
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group
from tollway.trainer.config import TrainerConfig
from tollway.trainer.ledger import Ledger
from tollway.trainer.rollout import Restored, Rollouts
from tollway.trainer.spool import Spool


class Nothing(EpisodeSource):
    """Is never asked."""

    async def run_group(self, request: GroupRequest) -> Group:
        raise EpisodeFailed("not expected")


def sampled_at(version: int) -> Group:
    row = trajectory([0, 1], versions=version)
    return group(rollout(1.0, row), rollout(0.0, row))


async def test_finished_groups_reload_unless_stale_lost_or_from_weights_that_are_gone(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", None)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for index in range(6):
            ledger.issue(index)
        for index, version in ((0, 9), (1, 10), (2, 11), (3, 5)):
            spool.put(index, sampled_at(version))
            ledger.finish(index)
        ledger.finish(4)  # its file is lost
        config = TrainerConfig(max_staleness=4)
        rollouts = Rollouts(Nothing(), config, ledger, spool, step=10, version=10)
        assert rollouts.restore() == Restored(reissued=3, reloaded=2, stale=1)
        assert len(rollouts.buffer) == 2
        assert ledger.open() == ([2, 4, 5], [0, 1])
        assert ledger.state(3) == "dropped"
        assert spool.indices() == [0, 1, 2]
