"""What an episode leaves for people: a folder with its verdict, timings, trajectory, logs and changes.

A folder appears whole or not at all, holds at most so many bytes, and has a name that any task id can have. A disk
that takes no more loses artifacts, never an episode: it is told and counted. Depends on ``envs.episode``,
``envs.changes`` and the export format of the session server's client.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tollway
from tollway.envs.changes import changes
from tollway.envs.config import EnvConfig
from tollway.envs.cutting import cut_middle
from tollway.envs.episode import Episode
from tollway.envs.usage import usage_of
from tollway.errors import ConfigError
from tollway.session_server.columns import pack_rows

__all__ = ["FORMAT", "Artifacts", "folder_name", "record_of"]

logger = logging.getLogger(__name__)
FORMAT = "tollway-episode-1"
_NAME_BYTES = 80
_RESERVED = 64 * 1024
"""Bytes of a folder that are kept for episode.json."""


class Artifacts:
    """Writes one folder per episode below ``root``, each of at most ``limit_mb``."""

    def __init__(self, root: Path, limit_mb: float) -> None:
        self.root = root
        self._limit = int(limit_mb * 2**20)
        self.kept = 0
        self.lost = 0
        """Folders that could not be written."""

    @classmethod
    def of(cls, config: EnvConfig) -> Artifacts | None:
        """As the section says."""
        return None if config.artifacts is None else cls(Path(config.artifacts).absolute(), config.artifact_mb)

    def check(self) -> None:
        """Make the directory. Raises ``ConfigError`` where that or writing to it is impossible."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise ConfigError(
                f"env.artifacts={str(self.root)!r}: cannot write there: {error.strerror}; name another directory"
            ) from error

    async def keep(self, episode: Episode) -> Path | None:
        """The episode's folder; ``None`` when it could not be written."""
        try:
            folder = await asyncio.to_thread(self._write, episode)
        except Exception as error:
            # A full disk, a task's unreadable files: whatever it is, the episode itself is worth more.
            self.lost += 1
            logger.error("artifacts of %s are lost (%d so far): %s", episode.task_id, self.lost, error)
            return None
        self.kept += 1
        return folder

    def _write(self, episode: Episode) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / folder_name(episode.task_id, episode.session_id or secrets.token_hex(8))
        making = self.root / f".{target.name}.{secrets.token_hex(4)}"
        making.mkdir()
        try:
            record = record_of(episode)
            record["files"], record["cut"], record["left_out"] = self._fill(making, episode)
            text = json.dumps(record, indent=2, default=str)
            (making / "episode.json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
            if target.exists():  # a server that was emptied may give a name again
                target = target.with_name(f"{target.name}-{secrets.token_hex(4)}")
            os.replace(making, target)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return target

    def _fill(self, folder: Path, episode: Episode) -> tuple[list[str], list[str], list[str]]:
        """Write all but episode.json. Returns which files are there, which of them are cut, and what is left out."""
        room = max(0, self._limit - _RESERVED)
        written: list[str] = []
        cut: list[str] = []
        left_out: list[str] = []
        texts = {
            "agent.log": episode.run.log if episode.run else b"",
            "grading.log": episode.verdict.log if episode.verdict else b"",
            "changes.diff": b"" if episode.submission is None else changes(episode.task, episode.submission),
        }
        trajectory = pack_rows(episode.rows) if episode.rows else b""
        if len(trajectory) > room:
            left_out.append("trajectory.safetensors")
        elif trajectory:
            (folder / "trajectory.safetensors").write_bytes(trajectory)
            written.append("trajectory.safetensors")
            room -= len(trajectory)
        shares = len([data for data in texts.values() if data])
        for name, data in texts.items():
            if not data:
                continue
            share, shares = room // shares, shares - 1
            kept = data
            if len(data) > share:
                cut.append(name)
                kept = cut_middle(data.decode("utf-8", "backslashreplace"), share).encode()
            (folder / name).write_bytes(kept)
            written.append(name)
            room -= len(kept)
        return written, cut, left_out


def folder_name(task_id: str, session_id: str) -> str:
    """A name for any task id: what is readable of it, a digest of all of it, and the session.

    >>> folder_name("swe/../../etc", "0123456789abcdef")
    'swe-etc-9b01bfd5-0123456789ab'
    """
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", task_id).strip("-")[:_NAME_BYTES].strip("-") or "task"
    digest = hashlib.blake2b(task_id.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    session = re.sub(r"[^A-Za-z0-9]", "", session_id)[:12]
    return "-".join(part for part in (readable, digest, session) if part)


def record_of(episode: Episode) -> dict[str, object]:
    """episode.json: everything about an episode that is a plain value; ``None`` where something is not known."""
    run, verdict, rollout, usage = episode.run, episode.verdict, episode.rollout(), usage_of(episode.rows)
    graded = episode.error is None and verdict is not None
    return {
        "format": FORMAT,
        "tollway": tollway.__version__,
        "task": episode.task_id,
        "environment": episode.environment,
        "harness": episode.harness,
        "group": episode.group_id,
        "session": episode.session_id or None,
        "attempt": episode.attempt,
        "reward": rollout.reward,
        "error": rollout.error,
        "ended_in": None if graded else episode.phase,
        "earlier_errors": list(episode.earlier),
        "verdict": None
        if verdict is None
        else {"reward": verdict.reward, "reason": verdict.reason, "flags": list(verdict.flags)},
        "agent": None
        if run is None
        else {"finish": run.finish, "submitted": run.submitted, "turns": run.turns, "answer": run.answer},
        "seconds": {name: round(value, 4) for name, value in episode.seconds.items()},
        "facts": dict(rollout.facts),
        "calls": usage.calls,
        "sampled_tokens": usage.sampled_tokens if usage.calls else None,
        "prompt_tokens": usage.prompt_tokens if usage.calls else None,
        "cached_tokens": usage.cached_tokens if usage.calls else None,
        "weight_versions": _versions(episode),
        "engines": sorted({engine for row in episode.rows for engine in row.engine_ids}),
        "collected": None if episode.submission is None else _sizes(episode.submission),
    }


def _versions(episode: Episode) -> list[int]:
    """Weight versions that sampled anything of it, oldest first."""
    found: set[int] = set()
    for row in episode.rows:
        found |= {int(version) for version in set(row.weight_version[row.loss_mask == 1].tolist())}
    return sorted(found)


def _sizes(submission: Mapping[str, bytes]) -> dict[str, int]:
    return {path: len(data) for path, data in sorted(submission.items())}
