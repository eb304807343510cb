"""The prompt ledger: every prompt instance and its one fate, in SQLite, across crashes.

issued -> finished -> trained | dropped, or issued -> dropped. A resume from an older checkpoint takes back
what was trained after it. Knows nothing of groups' contents (``spool`` has them). Standard library only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from tollway.errors import ComponentLost, Conflict

__all__ = ["DropReason", "Ledger"]

DropReason = Literal["aborted", "zero_variance", "stale"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
  prompt_index INTEGER PRIMARY KEY,
  state TEXT NOT NULL CHECK (state IN ('issued', 'finished', 'trained', 'dropped')),
  attempts INTEGER NOT NULL DEFAULT 1,
  reason TEXT,
  step INTEGER
) STRICT
"""


class Ledger:
    """One run's ledger. Writes survive the death of the process; ``sync`` also that of the machine.

    A file that fails under the run (a full disk, a lock) is ``ComponentLost``, from every method.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(_SCHEMA)
        except sqlite3.Error as error:
            raise ComponentLost(f"prompt ledger {path}: {error}; move it away to start afresh") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._db.close()

    def issue(self, index: int) -> int:
        """Note that a prompt goes out, for the first time or again; returns which attempt this is (1 is first).

        Raises ``Conflict`` when its fate is already decided.
        """
        self._execute(
            "INSERT INTO prompts (prompt_index, state) VALUES (?, 'issued') ON CONFLICT (prompt_index) "
            "DO UPDATE SET attempts = attempts + 1 WHERE state = 'issued'",
            (index,),
        )
        if not self._changed():
            raise Conflict(f"prompt {index} is {self.state(index)}: it cannot be issued again")
        return int(self._execute("SELECT attempts FROM prompts WHERE prompt_index = ?", (index,)).fetchone()[0])

    def finish(self, index: int) -> None:
        """Its group is complete and in the spool."""
        self._move(index, "finished", ("issued",))

    def settle(self, trained: Iterable[int], dropped: Iterable[tuple[int, DropReason]], *, step: int) -> None:
        """Decide the fates of one step's prompts, all or none."""
        self._execute("BEGIN")
        try:
            for index in trained:
                self._move(index, "trained", ("finished",), step=step)
            for index, reason in dropped:
                self._move(index, "dropped", ("issued", "finished"), reason=reason, step=step)
        except BaseException:
            if self._db.in_transaction:  # some failures end it by themselves
                self._execute("ROLLBACK")
            raise
        self._execute("COMMIT")

    def drop(self, index: int, reason: DropReason, *, step: int) -> None:
        """Decide that a prompt will not be trained."""
        self._move(index, "dropped", ("issued", "finished"), reason=reason, step=step)

    def take_back(self, step: int) -> None:
        """Undo training after checkpoint ``step``: those weights are gone."""
        self._execute(
            "UPDATE prompts SET state = 'finished', step = NULL WHERE state = 'trained' AND step > ?", (step,)
        )

    def reissue(self, index: int) -> None:
        """A finished group cannot be used any more: its prompt must go out again."""
        self._move(index, "issued", ("finished",))

    def open(self) -> tuple[list[int], list[int]]:
        """Prompts without a fate, in order: (issued, finished)."""
        rows = self._execute(
            "SELECT prompt_index, state FROM prompts WHERE state IN ('issued', 'finished') ORDER BY prompt_index"
        ).fetchall()
        return [i for i, state in rows if state == "issued"], [i for i, state in rows if state == "finished"]

    def next_index(self) -> int:
        """First prompt that was never issued."""
        return int(self._execute("SELECT COALESCE(MAX(prompt_index) + 1, 0) FROM prompts").fetchone()[0])

    def state(self, index: int) -> str | None:
        """State of one prompt; ``None`` when it was never issued."""
        row = self._execute("SELECT state FROM prompts WHERE prompt_index = ?", (index,)).fetchone()
        return None if row is None else str(row[0])

    def trained_step(self, index: int) -> int | None:
        """Step that trained a prompt; ``None`` while none has."""
        row = self._execute(
            "SELECT step FROM prompts WHERE prompt_index = ? AND state = 'trained'", (index,)
        ).fetchone()
        return None if row is None else int(row[0])

    def counts(self) -> dict[str, int]:
        """Prompts by state; dropped ones as ``dropped:<reason>``."""
        rows = self._execute(
            "SELECT CASE state WHEN 'dropped' THEN state || ':' || reason ELSE state END, COUNT(*) "
            "FROM prompts GROUP BY 1"
        )
        return {str(name): int(count) for name, count in rows}

    def sync(self) -> None:
        """Bring everything to the disk, before a checkpoint names it."""
        self._execute("PRAGMA wal_checkpoint(FULL)")

    def _move(
        self, index: int, to: str, origins: tuple[str, ...], *, reason: str | None = None, step: int | None = None
    ) -> None:
        marks = ", ".join("?" for _ in origins)
        self._execute(
            f"UPDATE prompts SET state = ?, reason = ?, step = ? WHERE prompt_index = ? AND state IN ({marks})",  # noqa: S608  # only question marks are inserted
            (to, reason, step, index, *origins),
        )
        if not self._changed():
            raise Conflict(f"prompt {index} is {self.state(index)}: it cannot become {to}")

    def _execute(self, sql: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise ComponentLost(f"prompt ledger {self._path}: {error}; what is committed stays") from error

    def _changed(self) -> bool:
        return bool(self._execute("SELECT changes()").fetchone()[0])
