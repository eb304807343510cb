"""Instruments of the router, each declared once with unit and meaning; rendered by ``/metrics``."""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import Counter, Gauge

from tollway.router.cache_ledger import Entry
from tollway.telemetry import declare

__all__ = ["CALLS", "ENGINES_SERVING", "IN_FLIGHT", "LOST", "REDISPATCHED", "WAITING", "WASTED", "count_cache"]

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
WAITING = Gauge(
    declare(
        "tollway_router_waiting", "requests", "First calls that wait for KV room, calls that wait for a slot", "gauge"
    ),
    "First calls that wait for KV room (session), calls that wait for a slot (call)",
    ["kind"],
    multiprocess_mode="livesum",
)
ENGINES_SERVING = Gauge(
    declare("tollway_router_serving_engines", "engines", "Engines that take traffic now", "gauge"),
    "Engines that take traffic now",
    multiprocess_mode="livemin",  # what every worker of a server can use
)

_TOKENS = ["engine"]
_CAUSES = ["engine", "cause", "reason"]
"""Labels of few values: engines, the fixed causes, and for moves the router's reasons. Never a session."""


def _counter(name: str, unit: str, meaning: str, labels: list[str]) -> Counter:
    return Counter(declare(f"tollway_cache_{name}", unit, meaning, "counter"), meaning, labels)


CACHE_CALLS = _counter(
    "calls", "calls", "Calls whose engine said what was cached: the other figures are theirs", _TOKENS
)
CACHE_FIRST_CALLS = _counter("first_calls", "calls", "Those with no call of their session before them", _TOKENS)
CACHE_PROMPT = _counter("prompt_tokens", "tokens", "Prompt tokens", _TOKENS)
CACHE_CACHED = _counter("cached_tokens", "tokens", "Prompt tokens that the engine found in its cache", _TOKENS)
CACHE_POSSIBLE = _counter(
    "possible_tokens", "tokens", "Prompt tokens that the session's own calls can have left", _TOKENS
)
CACHE_USEFUL = _counter("useful_tokens", "tokens", "Possible tokens that were cached", _TOKENS)
CACHE_SHARED = _counter("shared_tokens", "tokens", "Cached tokens that others left, such as group siblings", _TOKENS)
CACHE_FIRST = _counter("first_prompt_tokens", "tokens", "Prompt tokens of first calls", _TOKENS)
CACHE_HOST = _counter("host_tokens", "tokens", "Cached tokens that came from the host's memory", _TOKENS)
CACHE_STORAGE = _counter("storage_tokens", "tokens", "Cached tokens that came from storage", _TOKENS)
CACHE_LOST_PREFIX = _counter(
    "lost_prefix_tokens", "tokens", "Tokens of earlier calls that a changed prefix made useless", _TOKENS
)
WASTED = _counter("wasted_tokens", "tokens", "Possible tokens that were not cached, by cause", _CAUSES)
CACHE_BEYOND = _counter(
    "beyond_tokens", "tokens", "Prompt tokens that could not have been cached, by cause", ["engine", "cause"]
)
CACHE_UNFINISHED = _counter("unfinished_calls", "calls", "Calls that ended without a reply", ["engine", "outcome"])
CACHE_UNREPORTED = _counter("unreported_calls", "calls", "Calls whose engine did not say what was cached", _TOKENS)
CACHE_UNREPORTED_PROMPT = _counter("unreported_prompt_tokens", "tokens", "Their prompt tokens", _TOKENS)
CACHE_RETRACTIONS = _counter(
    "retractions", "retractions", "Times that an engine took a running call's KV away", _TOKENS
)
CACHE_SPANNING = _counter("spanning_calls", "calls", "Calls sampled by more than one weight version", _TOKENS)
CACHE_RESUMED = _counter("resumed_tokens", "tokens", "Tokens computed again to continue aborted calls", _TOKENS)


@lru_cache(maxsize=1024)
def _sums(engine: str) -> tuple[Counter, ...]:
    """What every counted call adds to, in the order of ``count_cache``. Finding them costs as much as adding."""
    instruments = (
        CACHE_CALLS,
        CACHE_FIRST_CALLS,
        CACHE_PROMPT,
        CACHE_CACHED,
        CACHE_POSSIBLE,
        CACHE_USEFUL,
        CACHE_SHARED,
        CACHE_FIRST,
        CACHE_HOST,
        CACHE_STORAGE,
        CACHE_LOST_PREFIX,
    )
    return tuple(instrument.labels(engine) for instrument in instruments)


def count_cache(entry: Entry) -> None:
    """Add one call of the ledger to the instruments."""
    engine = entry.engine_id
    for instrument, amount in (
        (CACHE_RETRACTIONS, entry.retractions),
        (CACHE_SPANNING, entry.versions > 1),
        (CACHE_RESUMED, entry.resumed_tokens),
    ):
        if amount:
            instrument.labels(engine).inc(amount)
    if entry.outcome != "ok":
        CACHE_UNFINISHED.labels(engine, entry.outcome).inc()
    if entry.cached is None:
        CACHE_UNREPORTED.labels(engine).inc()
        CACHE_UNREPORTED_PROMPT.labels(engine).inc(entry.prompt)
        return
    useful = min(entry.cached, entry.possible)
    amounts = (
        1,
        int(entry.first),
        entry.prompt,
        entry.cached,
        entry.possible,
        useful,
        entry.cached - useful,
        entry.prompt if entry.first else 0,
        entry.host or 0,
        entry.storage,
        entry.lost_prefix,
    )
    for child, amount in zip(_sums(engine), amounts, strict=True):
        if amount:
            child.inc(amount)
    for miss in entry.misses:
        WASTED.labels(engine, miss.cause, miss.reason).inc(miss.tokens)
    for miss in entry.beyond:
        CACHE_BEYOND.labels(engine, miss.cause).inc(miss.tokens)
