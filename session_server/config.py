"""Configuration of the session server (``[server]``). Depends on pydantic only."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tollway.config import Section

__all__ = ["ServerConfig"]


class ServerConfig(Section):
    """Where the server listens, what it serves, and its limits. The admin key comes from the environment."""

    host: str = "127.0.0.1"
    port: int = Field(default=8700, ge=0, le=65535)
    """0 takes a free port and reports it."""
    public_url: str | None = None
    """Address that harnesses use when it differs from host and port, e.g. behind a tunnel."""
    journal: Path = Path("runs/journal.sqlite")
    journal_max_bytes: int | None = Field(default=None, ge=65536)
    """Largest size of the journal; a full one answers 507 and keeps what it has."""
    family: str = "compact-bytes"
    """Model family: ``compact-bytes``, a name of the ``renderers`` library, an entry point, or ``module:Class``."""
    tokenizer: Path | None = None
    """``tokenizer.json`` or a model directory that has one; for families that need it."""
    thinking: bool = True
    """Default of families with a thinking switch."""
    model_name: str = "policy"
    """What ``GET /v1/models`` lists; requests may name anything."""
    context_length: int | None = Field(default=None, gt=0)
    """Longest prompt plus reply; by default what the engines report."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Reply limit of requests and sessions that set none; by default what the context leaves."""
    match_tool_call_ids: bool = True
    """Whether a replayed tool call must carry the id that it was given."""
    routed_experts: bool = False
    """Record expert choices for replay in training."""
    top_logprobs: int = Field(default=0, ge=0, le=128)
    """Alternatives recorded per sampled id, whatever requests ask for."""
    capacity: int = Field(default=4096, ge=1)
    """Open sessions; one more is answered 429."""
    max_nodes: int = Field(default=4096, ge=1)
    """Model calls per session."""
    max_concurrent_turns: int = Field(default=64, ge=1)
    """Model calls of one session at once."""
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    ttl_s: float = Field(default=86400.0, gt=0)
    """Life of a session that does not say otherwise."""
    retry_grace_s: float = Field(default=10.0, ge=0)
    """How long a call with an idempotency key runs on after its client went, waiting for the retry."""
    keep_closed: int = Field(default=512, ge=0)
    """Closed sessions kept in memory; older ones are read from the journal when asked for."""
    engine_wait_s: float = Field(default=0.0, ge=0)
    """How long a start waits for the first engine; 0 starts at once and says not ready."""
