"""One answer out of every worker's own: engines, cache figures, health. Pure functions over JSON.

Sums are over the workers that answered; those that did not are named in ``workers_down``. Rates are computed
anew from the sums. Depends on the ledger's figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from tollway.router.cache_ledger import CacheFigures

__all__ = ["Json", "merge_cache", "merge_engines", "merge_health", "merge_ready"]

Json = Mapping[str, object]
Answers = Mapping[int, Json]
_SUMS = (
    *("sessions", "resident_tokens", "reserved_tokens", "in_flight", "waiting", "failures"),
    *("exact_sessions", "exact_calls"),
)
_BEST_LAST = ("quarantined", "lost", "joining", "synced", "paused", "draining", "serving")
_OF_STATE = ("state", "reason", "last_error")
"""What goes with a state, and comes from the worker that finds the engine in it."""


def merge_engines(answers: Answers, down: list[int]) -> Json:
    """Engines by id: sums of loads, and where workers differ the worst state, with each worker's own."""
    rows: dict[str, dict[int, dict[str, object]]] = {}
    for index, answer in answers.items():
        for row in cast("list[dict[str, object]]", answer["engines"]):
            rows.setdefault(str(row["id"]), {})[index] = row
    told = [cast(int, version) for a in answers.values() if (version := a.get("policy_version")) is not None]
    return {
        "engines": [_engine(by_worker) for by_worker in rows.values()],
        "policy_version": max(told, default=None),
        # One worker that has an engine is enough to go on.
        "rollout_down": min((str(answer.get("rollout_down", "")) for answer in answers.values()), default=""),
        "down_s": min((cast(float, answer.get("down_s", 0.0)) for answer in answers.values()), default=0.0),
        "workers_down": down,
    }


def _engine(rows: Mapping[int, dict[str, object]]) -> dict[str, object]:
    worst = min(rows.values(), key=lambda row: _rank(str(row["state"])))
    merged = {**next(iter(rows.values())), **{name: worst[name] for name in _OF_STATE if name in worst}}
    for name in _SUMS:
        said = [cast(int, row[name]) for row in rows.values() if name in row]
        if said:
            merged[name] = sum(said)
    versions = [cast(int, row["version"]) for row in rows.values() if row["version"] is not None]
    merged["version"] = min(versions, default=None)  # weights that no worker doubts
    states = {str(index): row["state"] for index, row in rows.items()}
    if len(set(states.values())) > 1:
        merged["states"] = states
    return merged


def _rank(state: str) -> int:
    return _BEST_LAST.index(state) if state in _BEST_LAST else -1


def merge_cache(answers: Answers, down: list[int], *, sessions: int = 0) -> Json:
    """Figures of all workers together: overall, per engine and model, and the most wasteful ``sessions``."""
    merged: dict[str, object] = {
        **_sum(answers.values()).summary(),
        **{kind: _by_name(answers.values(), kind) for kind in ("engines", "models")},
        "workers_down": down,
    }
    if sessions:
        listed = [each for answer in answers.values() for each in cast("list[Json]", answer.get("sessions", []))]
        merged["sessions"] = sorted(listed, key=_worst_first)[:sessions]
    return merged


def _by_name(answers: Iterable[Json], kind: str) -> Json:
    found: dict[str, list[Json]] = {}
    for answer in answers:
        for name, figures in cast("dict[str, Json]", answer[kind]).items():
            found.setdefault(name, []).append(figures)
    return {name: _sum(each).summary() for name, each in sorted(found.items())}


def _worst_first(session: Json) -> tuple[int, str]:
    return -cast(int, session["wasted_tokens"]), str(session["session_id"])


def _sum(summaries: Iterable[Json]) -> CacheFigures:
    total = CacheFigures()
    for summary in summaries:
        total.include(summary)
    return total


def merge_health(answers: Answers, down: list[int]) -> Json:
    """Sums of counters; ``status`` is ``degraded`` while a worker is down."""
    merged: dict[str, object] = {"status": "ok" if not down else "degraded"}
    for answer in answers.values():
        for name, value in answer.items():
            if isinstance(value, int):
                merged[name] = cast(int, merged.get(name, 0)) + value
    return {**merged, "workers": len(answers) + len(down), "workers_down": down}


def merge_ready(answers: Answers, down: list[int]) -> Json:
    """Ready when every worker is; what each engine is, in every worker's words."""
    words = {word: None for answer in answers.values() for word in cast("list[str]", answer["engines"])}
    ready = not down and all(answer["ready"] is True for answer in answers.values())
    by_id: dict[str, dict[int, dict[str, object]]] = {}
    for index, answer in answers.items():
        for row in cast("list[dict[str, object]]", answer.get("fleet", [])):
            by_id.setdefault(str(row["id"]), {})[index] = row
    return {
        "ready": ready,
        "engines": [*words, *(f"worker {index} is down" for index in down)],
        "fleet": [_engine(rows) for rows in by_id.values()],
    }
