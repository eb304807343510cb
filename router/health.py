"""Whether an engine may take traffic: its states, and the rules that move it between them.

joining -> synced(version) -> serving -> draining -> paused -> lost, and quarantined. Dead is not slow: a refused
connection is death at once, failed probes count only while no token arrives, and the engine's 4xx never counts.
An engine that comes back is a new incarnation and waits for its weight version; what it was told before it was
lost (drained, quarantined) still holds. Pure rules, no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tollway.errors import EngineBusy, EngineLost, TollwayError, UpstreamError

__all__ = ["EngineHealth", "EngineState"]


class EngineState(StrEnum):
    """Life of an engine as the router sees it."""

    JOINING = "joining"
    """Known by URL; neither reached nor confirmed."""
    SYNCED = "synced"
    """Its weight version is confirmed, and it may not serve with it: newer weights have to come first."""
    SERVING = "serving"
    DRAINING = "draining"
    """Finishes what it has, takes no new session."""
    PAUSED = "paused"
    """Generates nothing for now: its sessions stay and wait, no new one comes."""
    QUARANTINED = "quarantined"
    """Its weights may be half-loaded: takes no call until a full reload confirmed a version."""
    LOST = "lost"


@dataclass(slots=True)
class EngineHealth:
    """State of one engine. Times are seconds of one monotonic clock, given by the caller."""

    max_failures: int
    busy_window_s: float
    incarnation: int = 0
    failures: int = 0
    """Failed probes or lost connections in a row."""
    last_progress: float = float("-inf")
    last_error: str = ""
    drained: bool = False
    """It takes no new sessions, also when it comes back."""
    waits_for: str = ""
    """Why an engine with a confirmed version may not serve yet."""
    pause_reason: str = ""
    """Why it is paused; empty when it is not."""
    paused_since: float = float("-inf")
    pause_told: bool = False
    """Somebody told us of the pause and will tell of its end; otherwise the engine itself said so."""
    quarantine_reason: str = ""
    """Why it is quarantined; empty when it is not."""
    _reached: bool = False
    _opened: bool = False
    resumes: int = 0
    """Times that it went on. A look that began before one of them says nothing about now."""
    _lost: bool = False

    @property
    def state(self) -> EngineState:
        """What follows from everything that is known; the worst fact decides."""
        if self._lost:
            return EngineState.LOST
        if not self._reached:
            return EngineState.JOINING
        if self.quarantine_reason:
            return EngineState.QUARANTINED
        if not self._opened:
            return EngineState.SYNCED
        if self.pause_reason:
            return EngineState.PAUSED
        return EngineState.DRAINING if self.drained else EngineState.SERVING

    @property
    def reason(self) -> str:
        """Why it does not serve, in words; empty while it does."""
        match self.state:
            case EngineState.QUARANTINED:
                return self.quarantine_reason
            case EngineState.SYNCED:
                return self.waits_for
            case EngineState.PAUSED:
                return self.pause_reason
            case EngineState.DRAINING:
                return "takes no new sessions"
            case EngineState.SERVING:
                return ""
        return self.last_error

    @property
    def takes_calls(self) -> bool:
        """Whether sessions that live here may call. A call to a paused engine waits there."""
        return self.state in (EngineState.SERVING, EngineState.DRAINING, EngineState.PAUSED)

    def progress(self, now: float) -> None:
        """A token or a whole reply arrived: the engine lives, whatever probes say."""
        self.last_progress = now
        self.failures = 0

    def probe_passed(self) -> None:
        """A probe was answered."""
        self.failures = 0

    # -- moves -------------------------------------------------------------------------------------

    def confirmed(self) -> None:
        """The weight version is known: a joining or returned engine is synced, not yet open."""
        if self._lost:
            self.incarnation += 1
            self._opened = False
        self._reached, self._lost = True, False
        self.failures, self.last_error = 0, ""

    def wait(self, reason: str) -> None:
        """The version that it has is not the one that it should serve."""
        self._opened, self.waits_for = False, reason

    def serve(self) -> None:
        """Open a confirmed engine for traffic; a drained one for its own sessions only."""
        if self._reached and not self._lost:
            self._opened, self.waits_for = True, ""

    def drain(self) -> None:
        """Take no new session."""
        self.drained = True

    def undrain(self) -> None:
        """Take new sessions again."""
        self.drained = False

    def pause(self, reason: str, now: float, *, told: bool) -> None:
        """It generates nothing until ``resume``."""
        if not self.pause_reason or (told and not self.pause_told):
            self.pause_reason, self.paused_since, self.pause_told = reason, now, told

    def resume(self) -> None:
        """It generates again."""
        self.pause_reason, self.pause_told = "", False
        self.resumes += 1

    def quarantine(self, reason: str) -> None:
        """Trust its weights no more, until ``reloaded``."""
        self.quarantine_reason = reason

    def reloaded(self) -> None:
        """All its weights came anew, or its process did: nothing is half-loaded any more."""
        self.quarantine_reason = ""

    def exited(self, reason: str) -> None:
        """The engine's process is gone, or as good as gone."""
        self._lost, self.last_error = True, reason
        self.resume()

    def failed(self, error: TollwayError, now: float) -> bool:
        """Count a failed probe or call; return whether the engine is lost by it.

        Only lost connections, deadlines and broken answers count.
        """
        state = self.state
        counts = isinstance(error, (EngineLost, UpstreamError)) and not isinstance(error, EngineBusy)
        if not counts or state is EngineState.LOST:
            return False
        self.last_error = str(error)
        if state is EngineState.JOINING:
            return False
        if isinstance(error, EngineLost) and error.refused:
            self.exited(str(error))
            return True
        if now - self.last_progress <= self.busy_window_s and isinstance(error, EngineLost) and error.timed_out:
            return False  # busy, and tokens still flow
        self.failures += 1
        if self.failures >= self.max_failures:
            self.exited(str(error))
            return True
        return False
