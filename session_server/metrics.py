"""Instruments of the session server, each declared once with unit and meaning; rendered by ``/metrics``."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from tollway.telemetry import declare

__all__ = ["SAMPLED", "SESSIONS", "TURNS"]

SESSIONS = Gauge(
    declare("tollway_sessions_open", "sessions", "Sessions that take calls", "gauge"), "Sessions that take calls"
)
TURNS = Counter(
    declare("tollway_turns", "turns", "Model calls by how they ended", "counter"),
    "Model calls by how they ended",
    ["outcome"],
)
SAMPLED = Counter(
    declare("tollway_sampled_tokens", "tokens", "Sampled ids that were committed", "counter"),
    "Sampled ids that were committed",
)
