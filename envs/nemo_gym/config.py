"""The ``[env.nemo_gym]`` section. Must not import anything but pydantic and the kernel's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tollway.envs.served_config import ServedConfig

__all__ = ["NemoGymConfig"]


class NemoGymConfig(ServedConfig):
    """One NeMo Gym resources server and its data."""

    data: Path | None = None
    """JSON lines with ``responses_create_params`` and whatever the server's verify wants."""
    heldout_data: Path | None = None
    """The same for env.split = "heldout"; ``None`` for ``data``."""
    agent: Literal["ours", "server"] = "ours"
    """"ours": ``url`` or ``command`` is a resources server, our harness is the agent. "server": it is an agent server,
    whose /run does the whole episode with our session as its model; use it with
    env.harness = "tollway.envs.nemo_gym.agent:ServerAgent"."""
    model_port: int = Field(default=0, ge=0, le=65535)
    """Port of this machine at which an agent server finds its model server, as its configuration names it; 0 for any
    free one, which "{model_port}" in ``command`` stands for."""
    run_timeout_s: float = Field(default=1800.0, gt=0)
    """One /run of an agent server."""
    request_timeout_s: float = Field(default=120.0, gt=0)
    """One request to the server."""
    max_output_chars: int = Field(default=20_000, ge=100)
    """Most of one tool's answer that the model is shown."""
