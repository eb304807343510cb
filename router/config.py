"""Configuration of the router (``[router]``). Depends on pydantic only."""

from __future__ import annotations

from pydantic import Field

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
    """This server's share of the room that engines report; below 1 where several servers share engines. The
    workers of one server share theirs by themselves."""
    engine_hosts: tuple[str, ...] = ("*",)
    """Hosts that ``POST /engines`` may name, as shell patterns; link-local addresses are refused in any case."""
    max_resumes: int = Field(default=8, ge=0)
    """How often a reply that an engine aborted (pause, abort all) is continued from its partial ids."""
