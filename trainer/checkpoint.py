"""Checkpoints of a run: step_NNNNNN/ with the backend's state and controller.json, and a LATEST pointer.

A checkpoint is written beside, flushed, renamed, and only then named by LATEST; a kill at any moment leaves
the previous one in charge. The prompt ledger is not part of it: it is rolled back by step instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from tollway.errors import ComponentLost
from tollway.trainer.atomic import fsync_tree, replace_directory, write_file

__all__ = ["CheckpointStore", "RunState"]

logger = logging.getLogger(__name__)

_CONTROLLER = "controller.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands between two steps."""

    step: int = 0
    """Steps done."""
    version: int = 0
    """Version of the weights: one more with every refit."""
    updates: int = 0
    """Optimiser updates done; the learning rate's warm-up counts them."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl at this point."""
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    """Counters that the final report continues after a resume."""


class CheckpointStore:
    """The checkpoints of one run directory."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)
        for displaced in folder.glob(".*.old"):
            # A kill between the two renames of a replacement: the old one is still the checkpoint.
            target = folder / displaced.name[1:].removesuffix(".old")
            if not target.exists():
                displaced.rename(target)
        for leftover in folder.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def latest(self) -> tuple[Path, RunState] | None:
        """The backend directory and state of the last complete checkpoint; ``None`` in a new run.

        Raises ``ComponentLost`` when checkpoints exist and none can be read, rather than start over.
        """
        found = self._complete()
        pointer = self._folder / "LATEST"
        named = (
            self._folder / pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.exists() else None
        )
        for path in [named, *reversed(found)]:
            if path is None or path not in found:
                continue
            try:
                state = RunState(**json.loads((path / _CONTROLLER).read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                logger.warning("checkpoint %s is not readable: %s", path, error)
                continue
            return path / "backend", state
        if found:
            raise ComponentLost(f"no readable checkpoint in {self._folder}; move it away to start afresh")
        return None

    async def draft(self, step: int, write_backend: Callable[[Path], Awaitable[None]]) -> None:
        """Write the backend's part of the checkpoint of ``step``; without ``commit`` it never was."""
        draft = self._draft(step)
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "backend").mkdir(parents=True)
        await write_backend(draft / "backend")

    async def commit(self, state: RunState) -> Path:
        """Complete the draft of ``state.step`` and make it the latest; older ones beyond the limit go."""
        draft, target = self._draft(state.step), self._folder / f"step_{state.step:06d}"
        (draft / _CONTROLLER).write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
        await asyncio.to_thread(self._put_in_charge, draft, target)
        return target

    async def save(self, state: RunState, write_backend: Callable[[Path], Awaitable[None]]) -> Path:
        """``draft`` and ``commit``."""
        await self.draft(state.step, write_backend)
        return await self.commit(state)

    def _draft(self, step: int) -> Path:
        return self._folder / f".step_{step:06d}.tmp"

    def _put_in_charge(self, draft: Path, target: Path) -> None:
        fsync_tree(draft)
        replace_directory(draft, target)
        write_file(self._folder / "LATEST", target.name.encode())
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _complete(self) -> list[Path]:
        """Directories that were renamed into place, oldest first."""
        return sorted(path for path in self._folder.glob("step_*") if (path / _CONTROLLER).exists())
