"""The one error tree of Tollway.

Every error that crosses a package boundary is a ``TollwayError``: ``code`` is stable API, ``status`` is
the HTTP status a server answers with, ``retryable`` tells the caller whether the same call can succeed
later. Three treatments follow from it: retry (bounded), fail the episode, or stop the run
(``ComponentLost``). Depends on nothing.
"""

from __future__ import annotations

__all__ = [
    "BadImage",
    "BadRequest",
    "CapabilityMissing",
    "CapacityExceeded",
    "ComponentLost",
    "ConfigError",
    "Conflict",
    "ContextLengthExceeded",
    "CreateFailed",
    "EngineBusy",
    "EngineLost",
    "EngineRefused",
    "EpisodeFailed",
    "InvalidRecord",
    "JournalError",
    "NoEngine",
    "NotFound",
    "PlacementDown",
    "RateLimited",
    "RequestAborted",
    "RolloutDown",
    "SandboxError",
    "SandboxGone",
    "SandboxUnavailable",
    "ServerStopping",
    "TollwayError",
    "TrainerLost",
    "Unauthorized",
    "UpstreamError",
    "VersionNotReady",
    "WorkerDown",
]


class TollwayError(Exception):
    """Root of the tree."""

    code = "internal"
    status = 500
    retryable = False


# -- the caller's request ---------------------------------------------------------------------------


class BadRequest(TollwayError):
    """The request can never succeed as it stands."""

    code, status = "invalid_request", 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """Name of the offending field, when one field is to blame."""


class ContextLengthExceeded(BadRequest):
    """Prompt plus requested tokens do not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"this model's maximum context length is {limit} tokens; the prompt has {prompt_tokens}. "
            "Shorten the conversation or start a new one",
            param="messages",
        )
        self.prompt_tokens, self.limit = prompt_tokens, limit


class Unauthorized(TollwayError):
    """No valid key or token. Unknown and foreign sessions answer the same (no enumeration)."""

    code, status = "unauthorized", 401


class NotFound(TollwayError):
    """The named thing does not exist (only said to callers that may know)."""

    code, status = "not_found", 404


class Conflict(TollwayError):
    """The state does not allow it, e.g. a second, different reward, or a prompt whose fate is decided."""

    code, status = "conflict", 409


class CapacityExceeded(TollwayError):
    """A configured limit is reached; try again after ``retry_after_s``."""

    code, status, retryable = "capacity_exceeded", 429, True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAborted(TollwayError):
    """The client went away or the session was deleted while the engine was generating."""

    code, status = "aborted", 499


class VersionNotReady(TollwayError):
    """No engine serves the wanted policy version yet."""

    code, status, retryable = "version_not_ready", 409, True

    def __init__(
        self, wanted: int, serving: int | None, *, exact: bool = False, available: tuple[int, ...] = ()
    ) -> None:
        kind = "exactly" if exact else "at least"
        others = f" (engines have {', '.join(map(str, available))})" if len(available) > 1 else ""
        super().__init__(
            f"want policy version {wanted}, {kind}, serving {serving}{others}; "
            "send the call again once an engine has it"
        )
        self.wanted, self.exact = wanted, exact
        self.serving, self.available = serving, available
        """Newest version that the call could have had, and every version that engines have."""


# -- engines ----------------------------------------------------------------------------------------


class UpstreamError(TollwayError):
    """An engine answered something that cannot be recorded as truth; the turn is not recorded."""

    code, status = "upstream_error", 502


class EngineRefused(TollwayError):
    """An engine refused a control call or a request (its 4xx); never counted against its health."""

    code, status = "engine_refused", 400

    def __init__(self, message: str, *, upstream_status: int) -> None:
        super().__init__(message)
        self.upstream_status = upstream_status


class EngineLost(TollwayError):
    """The connection or the process of one engine is gone."""

    code, status, retryable = "engine_lost", 503, True

    def __init__(self, message: str, *, refused: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        """Nobody listens at the engine's address: its process is gone."""
        self.timed_out = timed_out
        """A deadline passed; the engine may only be slow."""


class EngineBusy(UpstreamError):
    """An engine answered 503: it lives and takes nothing more for now."""

    code, status, retryable = "engine_busy", 503, True


class NoEngine(TollwayError):
    """No engine can take the call now."""

    code, status, retryable = "no_engine", 503, True


class PlacementDown(TollwayError):
    """The service that places sessions does not answer; sessions that have a place go on."""

    code, status, retryable = "placement_down", 503, True


class ServerStopping(TollwayError):
    """The server ended the call because it is going down; nothing of it was recorded."""

    code, status, retryable = "server_stopping", 503, True


class WorkerDown(TollwayError):
    """The server process that owns the session is starting again; its journal keeps every session."""

    code, status, retryable = "worker_down", 503, True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# -- records and storage ----------------------------------------------------------------------------


class InvalidRecord(TollwayError, ValueError):
    """Arrays or fields of a record do not fit together."""

    code, status = "invalid_record", 422


class JournalError(TollwayError):
    """The journal cannot be written or read; nothing was committed."""

    code, status = "journal_error", 507


# -- sandboxes and episodes -------------------------------------------------------------------------


class SandboxError(TollwayError):
    """Infrastructure under a sandbox failed. Never a program's exit code or timeout."""

    code, status, retryable = "sandbox_error", 503, True


class RateLimited(SandboxError):
    """The provider asks to slow down."""

    code = "sandbox_rate_limited"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SandboxGone(SandboxError):
    """The machine of this sandbox no longer exists."""

    code, retryable = "sandbox_gone", False


class CreateFailed(SandboxError):
    """A sandbox could not be created."""

    code = "sandbox_create_failed"


class BadImage(CreateFailed):
    """The image, template or workspace of the spec does not exist. Never retried."""

    code, retryable = "sandbox_bad_image", False


class SandboxUnavailable(SandboxError):
    """This machine cannot run this provider at all (no bubblewrap, no user namespaces, ...)."""

    code, retryable = "sandbox_unavailable", False


class CapabilityMissing(SandboxError):
    """The provider cannot do this at all; ``SandboxProvider.caps`` says so beforehand."""

    code, status, retryable = "sandbox_capability_missing", 400, False


class EpisodeFailed(TollwayError):
    """One episode failed for infrastructure reasons; it is excluded from statistics, never reward 0."""

    code, status = "episode_failed", 500


# -- the run ----------------------------------------------------------------------------------------


class ConfigError(TollwayError):
    """A configuration value is wrong or missing; the message names the key and the next step."""

    code, status = "config_error", 400


class ComponentLost(TollwayError):
    """A part that the run cannot do without is gone: the run stops with a non-zero exit."""

    code, status = "component_lost", 503


class RolloutDown(ComponentLost):
    """No engine served for ``router.rollout_down_timeout_s``; the message has every engine's last words."""

    code = "rollout_down"


class TrainerLost(ComponentLost):
    """The training backend's process died or stopped answering."""

    code = "trainer_lost"
