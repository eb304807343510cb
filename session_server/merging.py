"""One answer out of every worker's own: engines, cache figures, health. Pure functions over JSON.

Sums are over the workers that answered; those that did not are named in ``workers_down``. Rates are computed
anew from the sums. Depends on the ledger's figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import cast

from tollway.router.cache_ledger import CacheFigures

__all__ = ["Json", "merge_cache", "merge_engines", "merge_health", "merge_ready"]

Json = Mapping[str, object]
Answers = Mapping[int, Json]
_SUMS = ("sessions", "resident_tokens", "in_flight", "failures")
_BEST_LAST = ("lost", "joining", "synced", "paused", "draining", "serving")


def merge_engines(answers: Answers, down: list[int]) -> Json:
    """Engines by id: sums of loads, and where workers differ the worst state, with each worker's own."""
    rows: dict[str, dict[int, dict[str, object]]] = {}
    for index, answer in answers.items():
        for row in cast("list[dict[str, object]]", answer["engines"]):
            rows.setdefault(str(row["id"]), {})[index] = row
    return {"engines": [_engine(by_worker) for by_worker in rows.values()], "workers_down": down}


def _engine(rows: Mapping[int, dict[str, object]]) -> dict[str, object]:
    worst = min(rows.values(), key=lambda row: _rank(str(row["state"])))
    merged = {**next(iter(rows.values())), "state": worst["state"], "last_error": worst["last_error"]}
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


def merge_cache(answers: Answers, down: list[int]) -> Json:
    """Figures of all workers together, overall and per engine."""
    engines: dict[str, list[Json]] = {}
    for answer in answers.values():
        for engine_id, figures in cast("dict[str, Json]", answer["engines"]).items():
            engines.setdefault(engine_id, []).append(figures)
    return {
        **_sum(answers.values()).summary(),
        "engines": {engine_id: _sum(each).summary() for engine_id, each in sorted(engines.items())},
        "workers_down": down,
    }


def _sum(summaries: Iterable[Json]) -> CacheFigures:
    total = CacheFigures()
    for summary in summaries:
        for field in fields(CacheFigures):
            if field.name in summary and field.name not in ("waste", "useful_tokens"):
                setattr(total, field.name, getattr(total, field.name) + summary[field.name])
        useful = summary["wasted_tokens"]
        total.useful_tokens += cast(int, summary["possible_tokens"]) - cast(int, useful)
        total.waste += Counter(cast("dict[str, int]", summary["waste"]))
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
    return {"ready": ready, "engines": [*words, *(f"worker {index} is down" for index in down)]}
