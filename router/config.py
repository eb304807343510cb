"""Configuration of the router (``[router]``). Depends on pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tollway.config import Section

__all__ = ["RouterConfig"]


class RouterConfig(Section):
    """How engines are watched and sessions placed."""

    probe_interval_s: float = Field(default=2.0, gt=0)
    """Pause between two health probes of one engine."""
    probe_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for one probe; there is never a second one beside it."""
    probe_failures: int = Field(default=3, ge=1)
    """Probes in a row that must fail, without any token arriving meanwhile, before an engine is lost."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    control_timeout_s: float = Field(default=120.0, gt=0)
    """Weight updates, flush, pause."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    """Upper bound for one generation call."""
    progress_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence inside a stream."""
    busy_window_s: float = Field(default=30.0, gt=0)
    """How long a token proves that an engine lives whose probes time out: busy is not dead."""
    kv_budget_tokens: int | None = Field(default=None, gt=0)
    """Resident tokens that an engine may hold; by default what the engine reports."""
    kv_share: float = Field(default=1.0, gt=0, le=1)
    """This server's share of the room that engines report; below 1 where several servers share engines
    and no placement service. The workers of one server have one."""
    engine_hosts: tuple[str, ...] = ("*",)
    """Hosts that ``POST /engines`` may name, as shell patterns; link-local addresses are refused in any case."""
    max_resumes: int = Field(default=8, ge=0)
    """How often a reply that an engine aborted (pause, abort all) is continued from its partial ids."""
    max_retries: int = Field(default=2, ge=0)
    """Further attempts of a call that an engine answered with 503; meanwhile that engine gets no new session."""
    retry_pause_s: float = Field(default=0.5, gt=0)
    """Before the first of these further attempts; doubled before each one after it."""
    busy_pause_s: float = Field(default=5.0, gt=0)
    """How long an engine that answered 503 gets no new session; a reply from it ends the pause."""
    abort_wait_s: float = Field(default=1.0, ge=0)
    """How long a call whose connection was lost waits for the abort of its first attempt before it is sent again."""
    version_wait_s: float = Field(default=30.0, ge=0)
    """How long a call waits for the weight version that it wants before it is answered 409."""
    rollout_down_timeout_s: float = Field(default=120.0, gt=0)
    """How long a run goes on without any engine that serves before it ends with every engine's last words."""
    admission_timeout_s: float = Field(default=300.0, gt=0)
    """How long a session waits for KV room at its first call, and a call for a place on its engine, before 429."""
    migrate_factor: float = Field(default=3.0, ge=1)
    """A session leaves its engine when the wait there exceeds this many times its own re-prefill elsewhere."""
    gateway: Literal["", "smg"] = ""
    """``smg``: start an outer gateway in front of the policy's engines; it then chooses the engine of a session."""
    gateway_url: str = ""
    """An outer gateway (``smg``) that runs already, in front of the engines that are given here as well."""
    placement_url: str = ""
    """A ``tollway router`` that places the sessions of several session servers and owns their list of engines."""

    @model_validator(mode="after")
    def _one_chooser(self) -> RouterConfig:
        given = [name for name in ("gateway", "gateway_url", "placement_url") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: one of them chooses the engine of a session")
        for name in ("gateway_url", "placement_url"):
            if (url := getattr(self, name)) and not url.startswith(("http://", "https://")):
                raise ValueError(f"{name} {url!r}: want http://host:port")
        return self
