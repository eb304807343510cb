"""Instruments of the router, each declared once with unit and meaning; rendered by ``/metrics``."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from tollway.telemetry import declare

__all__ = ["CALLS", "ENGINES_SERVING", "IN_FLIGHT", "LOST", "REDISPATCHED", "WASTED"]

CALLS = Counter(
    declare("tollway_router_calls", "calls", "Generation calls by outcome", "counter"),
    "Generation calls by outcome",
    ["outcome"],
)
REDISPATCHED = Counter(
    declare("tollway_router_redispatched_calls", "calls", "Calls sent again after a lost connection", "counter"),
    "Calls sent again after a lost connection",
)
LOST = Counter(
    declare("tollway_router_lost_engines", "engines", "Times that an engine was found dead", "counter"),
    "Times that an engine was found dead",
)
IN_FLIGHT = Gauge(
    declare("tollway_router_in_flight_calls", "calls", "Generation calls running now", "gauge"),
    "Generation calls running now",
    multiprocess_mode="livesum",
)
ENGINES_SERVING = Gauge(
    declare("tollway_router_serving_engines", "engines", "Engines that take traffic now", "gauge"),
    "Engines that take traffic now",
    multiprocess_mode="livemin",  # what every worker of a server can use
)
WASTED = Counter(
    declare("tollway_cache_wasted_tokens", "tokens", "Prefix tokens that could have been cached, by cause", "counter"),
    "Prefix tokens that could have been cached, by cause",
    ["cause"],
)
