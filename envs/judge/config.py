"""The ``[env.judge]`` section. Must not import anything but pydantic and the kernel's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tollway.config import Section

__all__ = ["JudgeConfig"]


class JudgeConfig(Section):
    """How ``env.grader = "judge"`` asks and what it reads."""

    model: str = "judge"
    """Name of the judging model in the fleet; empty for the policy itself."""
    verdict: Literal["yes_no", "score", "prefer"] = "yes_no"
    """Whether the answer is right, a score from 0 to ``score_max``, or whether it is better than the reference."""
    prompt: Path | None = None
    """File with the question to the judge: {{task}}, {{answer}} with the submitted files, {{reference}} and
    {{verdict}} are filled in; ``None`` for the shipped one of ``verdict``."""
    both_orders: bool = False
    """Ask twice, reference before answer and after it, and take the mean: judges like what they read first."""
    score_max: int = Field(default=10, ge=1)
    asks: int = Field(default=3, ge=1)
    """How often the judge may be asked before a reply without a verdict is an infrastructure failure."""
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int = Field(default=2048, ge=1)
    timeout_s: float = Field(default=300.0, gt=0)
    """One reply of the judge."""
    max_chars: int = Field(default=20_000, ge=1)
    """Most of an answer, and of all files together, that the judge is shown."""
