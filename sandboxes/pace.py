"""When creates may start: how many at once, how many per second on this host, and how long after a refusal.

One refusal (``RateLimited``) slows every create down: all wait until the provider said, then one goes first, and
with each success more go at once and sooner after each other. The configured rate is shared by all processes of
this user on this host through a file. Must not know what is created. Depends on ``errors``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tollway.errors import ConfigError, CreateFailed, RateLimited

__all__ = ["CreatePace", "HostClock", "default_file"]

logger = logging.getLogger(__name__)
_LONGEST_WAIT_S = 600.0
"""A provider that asks for more than this is wrong about itself; the callers' deadlines end sooner anyway."""
_LEARN, _NO_GAP_S, _LONGEST_GAP_S = 0.8, 0.001, 5.0
"""How the distance that a refusal taught shrinks with each success, and its bounds."""
_LOCK_TRIES, _LOCK_WAIT_S = 2000, 0.005


class CreatePace:
    """The turnstile in front of a provider's create. One event loop; the file is for other processes."""

    def __init__(self, *, at_once: int, per_s: float | None, file: Callable[[], Path]) -> None:
        self._most = self._window = at_once
        self._configured_gap_s = 0.0 if per_s is None else 1.0 / per_s
        self._learned_gap_s = 0.0
        self._next_at = 0.0
        self._file = file
        self._host: HostClock | None = None
        self._in_flight = 0
        self._closed_until = 0.0
        self._left = asyncio.Event()
        self.refusals = 0
        """Creates that the provider refused for their rate."""

    @asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[None]:
        """Hold a place while one create is in flight; ``RateLimited`` out of the block slows the others down.

        Raises ``RateLimited`` at once when the provider wants no create before ``deadline``, ``CreateFailed``
        when the deadline has passed.
        """
        await self._enter(deadline)
        try:
            yield
        except RateLimited as refusal:
            await self._slow_down(refusal.retry_after_s)
            raise
        else:
            self._window = min(self._most, self._window + 1)
            self._learned_gap_s *= _LEARN
            if self._learned_gap_s < _NO_GAP_S:
                self._learned_gap_s = 0.0
        finally:
            self._leave()

    async def _enter(self, deadline: float) -> None:
        while True:
            while self._in_flight >= self._window:
                await self._left.wait()
            wait_s = self._check(deadline, self._closed_until)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            self._in_flight += 1
            try:
                await asyncio.sleep(self._check(deadline, await self._reserve(deadline)))
            except BaseException:
                self._leave()
                raise
            if self._closed_until <= time.monotonic():
                return
            self._leave()  # refused meanwhile: queue again

    def _leave(self) -> None:
        # Without an await: no cancellation can keep a place or the news of it.
        self._in_flight -= 1
        self._left.set()
        self._left = asyncio.Event()

    def _check(self, deadline: float, at: float) -> float:
        """Seconds until ``at``, if that is before ``deadline``."""
        now = time.monotonic()
        if now > deadline:
            raise CreateFailed("nobody waits for this sandbox any more")
        if at > deadline:
            raise RateLimited(
                f"the next create may start in {at - now:.1f} s, after this one's deadline; create fewer sandboxes, or "
                "raise sandbox.create_timeout_s",
                retry_after_s=at - now,
            )
        return max(0.0, at - now)

    async def _slow_down(self, retry_after_s: float) -> None:
        wait_s = 1.0 if math.isnan(retry_after_s) else min(max(retry_after_s, 0.0), _LONGEST_WAIT_S)
        now = time.monotonic()
        until = now + wait_s
        self.refusals += 1
        self._window = 1
        if now >= self._closed_until:  # not one of a burst that was in flight together
            self._learned_gap_s = min(_LONGEST_GAP_S, max(2 * self._learned_gap_s, wait_s))
        self._closed_until = max(self._closed_until, until)
        logger.info("creates are refused for their rate; all wait for %.1f s", wait_s)
        if self._configured_gap_s:
            await self._clock().move(lambda free_at: max(free_at, until))

    async def _reserve(self, deadline: float) -> float:
        """Take the next free instant, of this host where a rate is configured, else of this object.

        One that comes too late is not taken: it is somebody else's.
        """
        now = time.monotonic()  # one clock for all processes of a host
        gap_s = max(self._configured_gap_s, self._learned_gap_s)

        def step(free_at: float) -> float:
            at = max(free_at, now)
            self._check(deadline, at)
            return at + gap_s

        if self._configured_gap_s:
            return await self._clock().move(step) - gap_s
        self._next_at = step(self._next_at)
        return self._next_at - gap_s

    def _clock(self) -> HostClock:
        if self._host is None:
            self._host = HostClock(self._file())
        return self._host


class HostClock:
    """One instant in a file that several processes move on, each step under a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            self._boot = "unknown"  # then an instant from before a restart may hold creates back for a moment

    async def move(self, step: Callable[[float], float]) -> float:
        """Replace the instant by ``step`` of it; returns the new one. An older boot's instant counts as 0."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot open {self.path}: {error.strerror}; set sandbox.pace_file") from error
        try:
            await _lock(fd, self.path)
            boot, _, text = os.read(fd, 200).decode("ascii", "replace").partition(" ")
            try:
                instant = float(text) if boot == self._boot else 0.0
            except ValueError:
                instant = 0.0
            # Nobody reserves further ahead than a refusal may last and a deadline may wait: it is damaged.
            if not 0 <= instant < time.monotonic() + 1e6:
                instant = 0.0
            instant = step(instant)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{self._boot} {instant!r}".encode("ascii"), 0)
            return instant
        finally:
            os.close(fd)


async def _lock(fd: int, path: Path) -> None:
    """The lock is held for microseconds; one that is not given back must not stop the event loop."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        await asyncio.sleep(_LOCK_WAIT_S)
    raise CreateFailed(
        f"another process keeps the lock on {path} (a stopped one?); end it, or set sandbox.pace_file to another place"
    )


def default_file(provider: str) -> Path:
    """Where processes of this user on this host meet for one provider; never a place that others can prepare."""
    name = f"creates-{re.sub(r'[^A-Za-z0-9.-]', '-', f'{socket.gethostname()}-{provider}')}.pace"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    homes = [Path(runtime)] if runtime else []
    for home in (*homes, Path.home() / ".cache", Path(tempfile.gettempdir())):
        place = home / f"tollway-{os.getuid()}"
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = place.lstat()
        except (OSError, RuntimeError):
            continue
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022:
            return place / name
    raise ConfigError("found no private directory for the host-wide rate of creates; set sandbox.pace_file")
