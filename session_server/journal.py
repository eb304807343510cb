"""The journal: every committed turn and every session's state, in one SQLite file per server process.

WAL with ``synchronous=FULL``: when ``write`` returns, the rows survive a crash of process and machine. One
writer thread commits whatever waits in one transaction, so concurrent turns share one disk sync. A write
is all or nothing. Knows rows and blobs, not conversations. Depends on sqlite3 and ``errors``.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from tollway.errors import ConfigError, JournalError

__all__ = ["Journal", "Read", "Row", "Statement"]

logger = logging.getLogger(__name__)

Value = int | float | str | bytes | memoryview | None
Row = tuple[Value, ...]
Statement = tuple[str, Row]
Read = Callable[[str, Row], list[Row]]
"""Rows of one query."""
_T = TypeVar("_T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, token_hash BLOB NOT NULL, state TEXT NOT NULL, task_id TEXT NOT NULL, group_id TEXT NOT NULL,
  created_at REAL NOT NULL, expires_at REAL NOT NULL, settings BLOB NOT NULL, outcome BLOB
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
  session_id TEXT NOT NULL, number INTEGER NOT NULL, parent INTEGER, reason TEXT NOT NULL, digests BLOB NOT NULL,
  suffix BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL, meta BLOB NOT NULL, messages BLOB NOT NULL,
  routes BLOB, extras BLOB, idempotency_key TEXT, reply_id TEXT NOT NULL, reply BLOB,
  superseded INTEGER NOT NULL DEFAULT 0, overflowed INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS turns_of_session ON turns (session_id, number);
CREATE INDEX IF NOT EXISTS turns_by_key ON turns (session_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
"""
_LOCK_WAIT_S = 15.0
"""A server whose owner was killed needs a moment to end before its successor can have the journal."""
_VERSION = 3
_BATCH = 256
_PAGE = 32768
"""Bytes. A turn with routed experts is one blob of up to some MB: small pages cost it half as much CPU again."""
_CHECKPOINT_PAGES = 512
_COMPACT_EVERY_S = 0.02
_READERS = 2
"""So that a long export does not hold up sessions that come back."""
_FREE_AT_ONCE = 256
"""Pages given back per step, so that compaction never holds up commits for long."""


@dataclass(slots=True)
class _Job:
    statements: Sequence[Statement]
    done: asyncio.Future[None]


class Journal:
    """One journal file, opened by ``open`` and closed by ``aclose``."""

    def __init__(self, path: Path, *, max_bytes: int | None = None, compact_after_bytes: int = 1 << 28) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._compact_after_bytes = compact_after_bytes
        self._compacting = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._readers = threading.local()
        self._opened: list[sqlite3.Connection] = []
        """Connections of the reading threads."""
        self._lock: TextIO | None = None
        self._read_pool = ThreadPoolExecutor(_READERS, thread_name_prefix="journal-read")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        """Open or create the file and start the writer. Raises ``ConfigError`` when it cannot be used."""
        self._loop = asyncio.get_running_loop()
        self._lock = await asyncio.to_thread(self._take_lock)
        writer = await asyncio.to_thread(self._connect)
        self._thread = threading.Thread(target=self._work, args=(writer,), name="journal-write", daemon=True)
        self._thread.start()

    async def aclose(self) -> None:
        """Commit what waits, then close."""
        thread, self._thread = self._thread, None
        if thread is not None:
            # From here on ``submit`` refuses: nothing would read a job behind the end mark.
            self._jobs.put(None)
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self._read_pool.shutdown)
        for reader in self._opened:
            reader.close()
        self._opened.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def submit(self, *statements: Statement) -> asyncio.Future[None]:
        """Queue one atomic write; the future ends when it is on disk, or with ``JournalError``."""
        if self._loop is None or self._thread is None:
            raise JournalError("the journal is closed")
        done: asyncio.Future[None] = self._loop.create_future()
        self._jobs.put(_Job(statements, done))
        return done

    async def write(self, *statements: Statement) -> None:
        """Write atomically and wait until it is on disk. Raises ``JournalError``."""
        await self.submit(*statements)

    async def read(self, sql: str, values: Row = ()) -> list[Row]:
        """Rows of one query, off the event loop; sees every finished write. Raises ``JournalError``."""
        return await self.use(lambda read: read(sql, values))

    async def use(self, work: Callable[[Read], _T]) -> _T:
        """Run ``work`` with a reader, off the event loop: for results that take long to build from rows."""
        if self._thread is None:
            raise JournalError("the journal is closed")
        return await asyncio.get_running_loop().run_in_executor(self._read_pool, work, self._read)

    # -- threads -----------------------------------------------------------------------------------

    def _take_lock(self) -> TextIO:
        """One server per journal: a second one would serve the same sessions and number their turns anew."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Beside the file: closing a second descriptor of the file itself would drop SQLite's own locks.
            file = self.path.with_name(f"{self.path.name}.lock").open("w", encoding="ascii")
        except OSError as error:
            raise self._unusable(error) from error
        deadline = time.monotonic() + _LOCK_WAIT_S
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except OSError as error:
                if not told:
                    told = True
                    logger.warning("another server has journal %s; waiting %.0f s for it", self.path, _LOCK_WAIT_S)
                if time.monotonic() > deadline:
                    file.close()
                    raise ConfigError(
                        f"another server uses journal {self.path}; stop it, or set server.journal to another file"
                    ) from error
            time.sleep(0.05)

    def _unusable(self, error: Exception) -> ConfigError:
        return ConfigError(f"cannot use journal {self.path}: {error}; set server.journal to a writable file")

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            # Both hold for new files only.
            connection.execute(f"PRAGMA page_size={_PAGE}")
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
            connection.execute("PRAGMA synchronous=FULL")
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if version not in (0, _VERSION):
                raise ConfigError(
                    f"journal {self.path} has format {version}, this version reads {_VERSION}; "
                    "export its sessions with the version that wrote it, or set server.journal to a new file"
                )
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={_VERSION}")
            if self._max_bytes is not None:
                page = int(connection.execute("PRAGMA page_size").fetchone()[0])
                connection.execute(f"PRAGMA max_page_count={max(1, self._max_bytes // page)}")
            return connection
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from error

    def _reader(self) -> sqlite3.Connection:
        """The connection of this reading thread."""
        reader: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if reader is None:
            reader = self._readers.connection = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False
            )
            self._opened.append(reader)
        return reader

    def _read(self, sql: str, values: Row = ()) -> list[Row]:
        try:
            return list(self._reader().execute(sql, values))
        except sqlite3.Error as error:
            raise JournalError(f"cannot read journal {self.path}: {error}") from error

    def _work(self, connection: sqlite3.Connection) -> None:
        open_ = erased = True  # by whoever had the file before
        while open_:
            try:
                first = self._jobs.get(timeout=_COMPACT_EVERY_S if self._compacting else None)
            except queue.Empty:
                self._compact(connection)
                continue
            jobs: list[_Job] = []
            while True:
                if first is None:
                    open_ = False
                    break
                jobs.append(first)
                if len(jobs) >= _BATCH:
                    break
                try:
                    first = self._jobs.get_nowait()
                except queue.Empty:
                    break
            if jobs:
                self._publish(self._commit(connection, jobs))
                erased = erased or _erase(jobs)
            if (erased or self._compacting) and self._jobs.empty():
                self._compact(connection)
                erased = False
        connection.close()

    def _compact(self, connection: sqlite3.Connection) -> None:
        """Give space of erased sessions back to the file system, a little at a time, once there is much of it."""
        try:
            free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
            page = int(connection.execute("PRAGMA page_size").fetchone()[0])
            if not self._compacting and free * page < self._compact_after_bytes:
                return
            if free:
                self._compacting = True
                connection.execute(f"PRAGMA incremental_vacuum({_FREE_AT_ONCE})").fetchall()
            else:
                self._compacting = False
                # The file itself shrinks when what was freed is moved out of the write-ahead log.
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            # Nothing is lost: the space stays in the file and is used for new turns.
            self._compacting = False
            logger.warning("journal %s could not be compacted: %s", self.path, error)

    def _commit(self, connection: sqlite3.Connection, jobs: list[_Job]) -> list[tuple[_Job, JournalError | None]]:
        error = _transaction(connection, jobs)
        if error is None:
            return [(job, None) for job in jobs]
        if len(jobs) == 1:
            logger.error("journal %s: %s", self.path, error)
            return [(jobs[0], JournalError(f"nothing was written to journal {self.path.name}: {error}"))]
        # One bad write must not take its neighbours with it.
        return [result for job in jobs for result in self._commit(connection, [job])]

    def _publish(self, results: list[tuple[_Job, JournalError | None]]) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(_resolve, results)
        except RuntimeError:
            logger.warning("the event loop closed before %d journal writes were reported", len(results))


def _transaction(connection: sqlite3.Connection, jobs: list[_Job]) -> Exception | None:
    """Run the jobs in one transaction; on failure nothing of them is in the file."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        for job in jobs:
            for sql, values in job.statements:
                connection.execute(sql, values)
        connection.execute("COMMIT")
        return None
    except Exception as error:
        # The boundary of the thread: besides sqlite3.Error, values that do not fit raise what they like, and a
        # writer that died would leave every later write waiting.
        if connection.in_transaction:
            try:
                connection.execute("ROLLBACK")
            except sqlite3.Error as second:
                logger.error("rollback failed: %s", second)
        return error


def _erase(jobs: list[_Job]) -> bool:
    """Whether any of them may have freed space."""
    return any(sql.startswith("DELETE") for job in jobs for sql, _ in job.statements)


def _resolve(results: list[tuple[_Job, JournalError | None]]) -> None:
    for job, error in results:
        if job.done.done():
            continue
        if error is None:
            job.done.set_result(None)
        else:
            job.done.set_exception(error)
