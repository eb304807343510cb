"""Fresh turns for the gap probe: episodes that nobody trains on, sampled after a refit.

Prompts of probes have indices of their own, far above the ledger's. Depends on the episode port.
"""

from __future__ import annotations

import asyncio
import logging
import math

from tollway.errors import ComponentLost, TollwayError
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group, PolicyVersion, Sampling
from tollway.trainer.config import TrainerConfig

__all__ = ["FIRST_PROBE_INDEX", "fresh_groups"]

logger = logging.getLogger(__name__)

FIRST_PROBE_INDEX = 1_000_000_000
_ROUNDS = 3
_TURNS_GUESS = 2


async def fresh_groups(
    source: EpisodeSource, sampling: Sampling, *, version: PolicyVersion, config: TrainerConfig
) -> list[Group]:
    """Run groups until they hold ``config.gap_turns`` turns, in at most three rounds.

    A failed probe is no failure of the run: it is logged, and fewer turns come back.
    """
    found: list[Group] = []
    for attempt in range(_ROUNDS):
        missing = config.gap_turns - sum(len(row.turn_spans) for g in found for r in g.rollouts for row in r.rows)
        if missing <= 0:
            break
        episodes = math.ceil(missing / _TURNS_GUESS)
        request = GroupRequest(
            group_id=f"probe-{version:06d}-{attempt}",
            prompt_index=FIRST_PROBE_INDEX + version * _ROUNDS + attempt,
            samples=max(1, min(episodes, config.gap_turns)),
            sampling=sampling,
        )
        try:
            found.append(await source.run_group(request))
        except (ComponentLost, asyncio.CancelledError):
            raise
        except TollwayError as error:
            logger.warning("gap probe at version %d: %s", version, error)
    return found
