"""Which weights engines of the policy have to have before they serve. Pure state; depends on ``member``.

A version names weights only as far as whoever stamped it told the truth: an engine that was started again has the
weights of its first day under whatever number it is given. So it counts who reloaded which process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tollway.records import PolicyVersion
from tollway.router.member import Engine

__all__ = ["PolicyWeights"]


@dataclass(slots=True)
class PolicyWeights:
    """What trainers told of the policy's weights."""

    version: PolicyVersion | None = None
    """The newest; ``None`` while no trainer brings any."""

    def reloaded(self, engine: Engine, version: PolicyVersion) -> None:
        """All weights of ``engine`` are of ``version`` now."""
        if engine.follows_policy:
            self.version = version
        engine.membership = replace(engine.membership, stale=False)
        engine.reloaded_start = engine.start_id

    def holds_back(self, engine: Engine) -> str:
        """Why an engine that joined may not serve with the weights that it has; empty when it may."""
        if self.version is None or engine.version is None or not engine.follows_policy or engine.version > self.version:
            return ""
        if engine.version < self.version:
            return (
                f"it has weights {engine.version} and the policy is at {self.version}: "
                "it waits for the trainer's next refit"
            )
        if engine.reloaded_start == "":
            engine.reloaded_start = engine.start_id  # it got them before it was looked at
        again = engine.reloaded_start is not None and (not engine.start_id or engine.reloaded_start != engine.start_id)
        if not again and not engine.membership.stale:
            return ""
        return (
            f"it was started again, and its weights may not be the policy's {self.version} although it says so: "
            "it waits for the trainer's next refit"
        )
