"""What a server process knows of itself among its siblings: index, count, sockets, secret, journal.

A server of one process is a crew of one (``SOLO``). A worker is told its place by its parent through one
environment variable, which it takes out of the environment at once. Pure data; depends on ``errors``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path

from tollway.errors import ConfigError

__all__ = ["SOLO", "WORKER_HEADER", "Crew", "check_journals", "component", "journal_of"]

_VARIABLE = "TOLLWAY_WORKER"
WORKER_HEADER = b"x-tollway-worker"
"""Carries the crew's secret on calls between workers; taken off every request that comes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The place of one process among the workers of a server."""

    index: int = 0
    size: int = 1
    folder: Path = Path()
    """Private folder with one Unix socket per worker: calls between workers never touch the network."""
    secret: str = field(default="", repr=False)
    """Proves that a call comes from a sibling."""
    public_fd: int = -1
    """The listening socket that all workers share."""
    own_fd: int = -1
    """The listening socket of this worker alone."""
    port: int | None = None
    """Port of that socket; ``None`` for a server of one process."""
    places_url: str = ""
    """The placement service that the parent runs for its workers; empty: the configured one."""
    places_key: str = field(default="", repr=False)

    @property
    def alone(self) -> bool:
        """Whether this process is the whole server."""
        return self.size == 1

    @property
    def siblings(self) -> tuple[int, ...]:
        """Every other worker."""
        return tuple(index for index in range(self.size) if index != self.index)

    @property
    def passed_on(self) -> str:
        """Value of ``WORKER_HEADER`` on a client's request that this crew passes on."""
        return f"pass {self.secret}"

    @property
    def own_call(self) -> str:
        """Value of ``WORKER_HEADER`` on a call that a worker makes for its own sake."""
        return f"call {self.secret}"

    def socket_of(self, index: int) -> Path:
        """Where worker ``index`` listens for its siblings."""
        return self.folder / f"{index}.sock"

    def environment(self) -> dict[str, str]:
        """What the worker process has to find in its environment."""
        place = {
            "index": self.index,
            "size": self.size,
            "folder": str(self.folder),
            "secret": self.secret,
            "public_fd": self.public_fd,
            "own_fd": self.own_fd,
            "port": self.port,
            "places_url": self.places_url,
            "places_key": self.places_key,
        }
        return {_VARIABLE: json.dumps(place)}

    @classmethod
    def from_environment(cls) -> Crew | None:
        """The place that a parent gave to this process; ``None`` when it has no such parent. Asked once."""
        text = os.environ.pop(_VARIABLE, "")
        if not text:
            return None
        place = json.loads(text)
        return cls(**{**place, "folder": Path(place["folder"])})

    def listeners(self) -> tuple[socket.socket, socket.socket, socket.socket]:
        """(shared, own, siblings' socket), ready to accept."""
        shared, own = socket.socket(fileno=self.public_fd), socket.socket(fileno=self.own_fd)
        path = self.socket_of(self.index)
        path.unlink(missing_ok=True)  # what an earlier process of this worker left
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.bind(str(path))
        inner.listen(2048)
        for each in (shared, own, inner):
            each.setblocking(False)
        return shared, own, inner


def component() -> str:
    """What the log lines of this serving process call it: ``serve``, or ``serve.2`` for worker 2."""
    text = os.environ.get(_VARIABLE)
    return f"serve.{json.loads(text)['index']}" if text else "serve"


SOLO = Crew()
"""A server of one process."""


def journal_of(journal: Path, index: int) -> Path:
    """The journal of worker ``index``. Worker 0 has the configured one, so a server can grow.

    >>> journal_of(Path("runs/journal.sqlite"), 2).name
    'journal.2.sqlite'
    """
    return journal if index == 0 else journal.with_name(f"{journal.stem}.{index}{journal.suffix}")


def check_journals(journal: Path, workers: int) -> list[Path]:
    """Refuse to leave open sessions behind: ``ConfigError`` when a journal of a worker that is not started has some.

    Returns the journals of such workers that have closed sessions only: those cannot be read for now.
    """
    left: list[Path] = []
    for index, path in sorted(_numbered(journal)):
        if index < workers:
            continue
        if count := _open_sessions(path):
            raise ConfigError(
                f"{path} has {count} open sessions of worker {index}, and {workers} "
                f"{'worker is' if workers == 1 else 'workers are'} asked for: start at least {index + 1} "
                "(server.workers, --workers) until those sessions are closed, or move the file away to give them up"
            )
        left.append(path)
    return left


def _numbered(journal: Path) -> list[tuple[int, Path]]:
    form = re.compile(rf"{re.escape(journal.stem)}\.([1-9][0-9]*){re.escape(journal.suffix)}")
    try:
        names = [path.name for path in journal.parent.iterdir()]
    except OSError:
        return []  # no folder, no journals; what is wrong with it is found when it is opened
    return [(int(match[1]), journal.with_name(name)) for name in names if (match := form.fullmatch(name))]


def _open_sessions(path: Path) -> int:
    """Sessions of a journal that nobody has open, which a start would take over."""
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            found = connection.execute(
                "SELECT count(*) FROM sessions WHERE state='open' AND expires_at>?", (time.time(),)
            ).fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ConfigError(f"cannot tell whether journal {path} has open sessions: {error}; move it away") from error
    return int(found[0])
