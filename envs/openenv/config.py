"""The ``[env.openenv]`` section. Must not import anything but pydantic and the kernel's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, model_validator

from tollway.envs.served_config import ServedConfig

__all__ = ["OpenEnvConfig"]


class OpenEnvConfig(ServedConfig):
    """One OpenEnv server."""

    instruction: str = ""
    """Told to the agent before the environment's first observation; empty for what the environment says itself."""
    environment: str | None = None
    """Name of the environment in the server's task API; by default the one that it lists."""
    train_split: str | None = None
    """Split of the server's task API for env.split = "train"; by default the one of that type, if there is any."""
    heldout_split: str | None = None
    """The same for "heldout": by default the split of type "test", else "validation"."""
    reset: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of every reset, besides ``seed``."""
    tasks: int = Field(default=0, ge=0)
    """Number of different seeds when the server has no task API; 0 for an endless order."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Opening a socket, once."""
    step_timeout_s: float = Field(default=120.0, gt=0)
    """One frame's answer."""
    step_errors: Literal["fail", "tell"] = "fail"
    """Whether an exception inside of a step fails the episode as infrastructure, or is told to the model, for
    environments that refuse moves by raising. An action that does not fit the schema is always told."""
    capacity_timeout_s: float = Field(default=120.0, gt=0)
    """How long to try again while the server says, or shows by closing the socket, that it is full."""
    ping_interval_s: float | None = Field(default=None, gt=0)
    """Pings of ours; none by default, since tunnels exist that lose the answers and break the connection then."""
    max_frame_mb: float = Field(default=16.0, gt=0)
    max_observation_chars: int = Field(default=20_000, ge=100)
    """Most of one observation that the model is shown."""
    lowest: float | None = None
    """Sums of rewards outside of ``lowest`` to ``highest`` are refused; by default every finite one is taken."""
    highest: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> OpenEnvConfig:
        if self.lowest is not None and self.highest is not None and not self.lowest < self.highest:
            raise ValueError(f"lowest ({self.lowest}) must be below highest ({self.highest})")
        return self
