"""Instruments of the session server, each declared once with unit and meaning; rendered by ``/metrics``.

Workers keep their values in files of a folder that their parent names in ``PROMETHEUS_MULTIPROC_DIR``, so that
each of them can render the sums of all.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from tollway.telemetry import declare

__all__ = ["BRANCHES", "LEFT_OUT", "SAMPLED", "SESSIONS", "TURNS", "metrics_text"]

SESSIONS = Gauge(
    declare("tollway_sessions_open", "sessions", "Sessions that take calls", "gauge"),
    "Sessions that take calls",
    multiprocess_mode="livesum",
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
BRANCHES = Counter(
    declare("tollway_branches", "turns", "Turns that did not continue a conversation, by reason", "counter"),
    "Turns that did not continue a conversation, by reason",
    ["reason"],
)
LEFT_OUT = Counter(
    declare("tollway_left_out_tools", "tools", "Offered tools that cannot run here, per turn", "counter"),
    "Offered tools that cannot run here, per turn",
)


def metrics_text() -> bytes:
    """All instruments in Prometheus' text form."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)
