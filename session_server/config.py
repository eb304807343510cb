"""Configuration of the session server (``[server]``). Depends on pydantic only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from tollway.config import Section

__all__ = ["ServerConfig"]


class ServerConfig(Section):
    """Where the server listens, what it serves, and its limits. The admin key comes from the environment."""

    host: str = "127.0.0.1"
    port: int = Field(default=8700, ge=0, le=65535)
    """0 takes a free port and reports it. Worker 0 of several also listens on the next port, worker 1 on the one
    after that, and so on."""
    public_url: str | None = None
    """Address that harnesses use when it differs from host and port, e.g. behind a proxy or a tunnel."""
    workers: int = Field(default=1, ge=1, le=256)
    """Server processes; each owns its sessions, one address serves them all."""
    journal: Path = Path("runs/journal.sqlite")
    """Of worker 0; worker 2 keeps its sessions in ``journal.2.sqlite``, and so on."""
    journal_max_bytes: int | None = Field(default=None, ge=1048576)
    """Largest size of a journal file; a full one answers 507 and keeps what it has."""
    compact_after_bytes: int = Field(default=256 * 1024 * 1024, ge=65536)
    """Space of erased sessions in a journal file that starts giving it back to the file system."""
    family: str = "compact-bytes"
    """Model family: ``compact-bytes``, a name of the ``renderers`` library, an entry point, or ``module:Class``."""
    tokenizer: Path | None = None
    """``tokenizer.json`` or a model directory that has one; for families that need it."""
    chat_template: Path | None = None
    """Jinja template file in place of the tokenizer's own; for the ``jinja`` family."""
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
    sampling_masks: bool = False
    """Record which ids top-p and top-k left to sample from, for training on the same support."""
    indexer_topk: bool = False
    """Record the positions that a sparse-attention indexer chose, for replay in training."""
    side_requests: Literal["mark", "train", "drop"] = "mark"
    """Conversations without tools in a session that also has one with tools, such as title requests:
    exported but not trainable, trainable like any other, or left out of the export."""
    capacity: int = Field(default=4096, ge=1)
    """Open sessions of one worker; one more is answered 429."""
    max_nodes: int = Field(default=4096, ge=1)
    """Model calls per session."""
    max_session_tokens: int | None = Field(default=None, ge=1)
    """Ids that a session may keep over all its branches; by default only ``max_nodes`` bounds it."""
    max_session_bytes: int | None = Field(default=None, ge=65536)
    """Journal bytes that a session may take; by default only ``journal_max_bytes`` bounds it."""
    max_concurrent_turns: int = Field(default=128, ge=1)
    """Model calls of one session at once, each choice of a request counted."""
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Longest request body."""
    ttl_s: float = Field(default=86400.0, gt=0)
    """Life of a session that does not say otherwise."""
    idle_ttl_s: float = Field(default=7200.0, gt=0)
    """A session is closed after so long without a call."""
    loaded_sessions: int = Field(default=1024, ge=1)
    """Open sessions kept in memory; beyond that those used longest ago leave it, as if they had been idle."""
    unload_after_s: float = Field(default=300.0, gt=0)
    """A session idle for so long leaves memory; its next call brings it back from the journal."""
    retry_grace_s: float = Field(default=10.0, ge=0)
    """How long a call with an idempotency key runs on after its client went, waiting for the retry."""
    keep_closed: int = Field(default=512, ge=0)
    """Closed sessions kept in memory; older ones are read from the journal when asked for."""
    engine_wait_s: float = Field(default=0.0, ge=0)
    """How long a start waits for the first engine; 0 starts at once and says not ready."""
    drain_s: float = Field(default=5.0, ge=0)
    """How long a stopping server lets running turns finish before it aborts them; a second signal does not wait."""

    @field_validator("public_url")
    @classmethod
    def _an_address(cls, url: str | None) -> str | None:
        """It becomes the start of every session's URLs."""
        if url is None:
            return None
        parts = urlsplit(url)
        plain = url.isascii() and url.isprintable() and not set(url) & set(" \"'<>\\")
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise ValueError("want http:// or https://, a host, and printable ASCII without spaces or quotes")
        if parts.query or parts.fragment or parts.username is not None or parts.port == 0:
            raise ValueError("want an address without credentials, query and fragment")
        return url
