"""The ``[env.maths]`` section. Must not import anything but pydantic and the kernel's configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tollway.config import Section

__all__ = ["MathsConfig"]


class MathsConfig(Section):
    """Questions and how their answers are compared."""

    data: Path | None = None
    """JSON lines, each {"question": ..., "answer": ..., "id": optional}; ``None`` for the shipped set."""
    heldout_data: Path | None = None
    """The same for env.split = "heldout"; ``None`` for ``data``."""
    instruction: str = "Put the final answer in \\boxed{}."
    """Told after the question; empty for nothing."""
    boxed_only: bool = False
    """Whether an answer outside \\boxed{} earns nothing."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Relative difference that a value written as a decimal may have."""
    workers: int = Field(default=2, ge=1)
    """Checking processes."""
    cpu_s: float = Field(default=2.0, gt=0)
    """CPU seconds that one comparison may take; an answer that takes more earns nothing."""
    memory_mb: int = Field(default=1024, ge=128)
    """Address space of a checking process."""
    wall_s: float = Field(default=60.0, gt=0)
    """Seconds after which a checking process counts as stuck: an infrastructure failure, no reward."""
