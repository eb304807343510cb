"""The interfaces that sibling packages share.

Packages on one level never import each other; what one implements and another needs is declared here and
joined in ``tollway.app``. Depends on ``records`` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tollway.records import Group, Sampling

__all__ = ["EpisodeSource", "GroupRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Ask for all attempts at one prompt."""

    group_id: str
    prompt_index: int
    """Which task of the source's endless, seeded order; the same index is always the same task."""
    samples: int
    sampling: Sampling


class EpisodeSource(ABC):
    """Runs episodes. Implemented by ``envs.runner``, used by ``trainer.rollout``."""

    @abstractmethod
    async def run_group(self, request: GroupRequest) -> Group:
        """Run ``request.samples`` attempts at one task and return them all.

        An attempt that fails for infrastructure reasons comes back as a rollout with ``reward=None`` and
        its error; the others are unaffected. Raises ``ComponentLost`` when no attempt can succeed any
        more. Cancelling the call ends every sandbox and session that it opened.
        """
