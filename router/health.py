"""Whether an engine may take traffic: its states, and the rules that move it between them.

joining -> synced(version) -> serving -> draining -> lost. Dead is not slow: a refused connection
is death at once, failed probes count only while no token arrives, and the engine's 4xx never counts. An
engine that comes back is a new incarnation and waits for its weight version. Pure rules, no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tollway.errors import EngineLost, TollwayError, UpstreamError

__all__ = ["EngineHealth", "EngineState"]


class EngineState(StrEnum):
    """Life of an engine as the router sees it."""

    JOINING = "joining"
    """Known by URL; neither reached nor confirmed."""
    SYNCED = "synced"
    """Its weight version is confirmed."""
    SERVING = "serving"
    DRAINING = "draining"
    """Finishes what it has, takes no new session."""
    LOST = "lost"


@dataclass(slots=True)
class EngineHealth:
    """State of one engine. Times are seconds of one monotonic clock, given by the caller."""

    max_failures: int
    busy_window_s: float
    state: EngineState = EngineState.JOINING
    incarnation: int = 0
    failures: int = 0
    """Failed probes or lost connections in a row."""
    last_progress: float = float("-inf")
    last_error: str = ""

    @property
    def takes_calls(self) -> bool:
        """Whether sessions that live here may call."""
        return self.state in (EngineState.SERVING, EngineState.DRAINING)

    def progress(self, now: float) -> None:
        """A token or a whole reply arrived: the engine lives, whatever probes say."""
        self.last_progress = now
        self.failures = 0

    def probe_passed(self) -> None:
        """A probe was answered."""
        self.failures = 0

    def confirmed(self) -> None:
        """The weight version is known: a joining or returned engine may serve."""
        if self.state is EngineState.LOST:
            self.incarnation += 1
        if self.state in (EngineState.LOST, EngineState.JOINING):
            self.state = EngineState.SYNCED
        self.failures, self.last_error = 0, ""

    def serve(self) -> None:
        """Open the engine for traffic."""
        if self.state in (EngineState.SYNCED, EngineState.DRAINING):
            self.state = EngineState.SERVING

    def drain(self) -> None:
        """Take no new session."""
        if self.state in (EngineState.SYNCED, EngineState.SERVING):
            self.state = EngineState.DRAINING

    def exited(self, reason: str) -> None:
        """The engine's process is gone."""
        self.state, self.last_error = EngineState.LOST, reason

    def failed(self, error: TollwayError, now: float) -> bool:
        """Count a failed probe or call; return whether the engine is lost by it.

        Only lost connections, deadlines and broken answers count.
        """
        if not isinstance(error, (EngineLost, UpstreamError)) or self.state is EngineState.LOST:
            return False
        self.last_error = str(error)
        if isinstance(error, EngineLost) and error.refused and self.state is not EngineState.JOINING:
            self.exited(str(error))
            return True
        if self.state is EngineState.JOINING:
            return False
        if now - self.last_progress <= self.busy_window_s and isinstance(error, EngineLost) and error.timed_out:
            return False  # busy, and tokens still flow
        self.failures += 1
        if self.failures >= self.max_failures:
            self.exited(str(error))
            return True
        return False
