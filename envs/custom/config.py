"""The ``[env.custom]`` section. Must not import anything but pydantic and the kernel's configuration."""

from __future__ import annotations

from pydantic import Field, model_validator

from tollway.config import Section

__all__ = ["CustomConfig"]


class CustomConfig(Section):
    """How a grader of the user's own, ``env.grader = "module:name"``, is called."""

    deadline_s: float = Field(default=60.0, gt=0)
    """One call; beyond it the episode failed, it is no grade."""
    threads: int = Field(default=8, ge=1)
    """Calls of a function that is not async at once."""
    lowest: float = 0.0
    """Rewards outside of ``lowest`` to ``highest`` are refused."""
    highest: float = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> CustomConfig:
        if not self.lowest < self.highest:
            raise ValueError(f"lowest ({self.lowest}) must be below highest ({self.highest})")
        return self
