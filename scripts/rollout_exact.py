"""Holds exported sessions against what the engines themselves wrote down, id for id and bit for bit.

The witness is the request log of the engine (SGLang: ``--log-requests-level 3 --log-requests-format json``): for
every finished call the ids that came in, the ids that went out, and a log-probability and a weight version of each.
Every exported call must stand in the log of the engine that the export names, and every logged call must be in the
export. Pure functions over files and records.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tollway.records import Ids, Trajectory, VersionSpan, parse_version

_FINISHED = '"event": "request.finished"'
SHOWN = 10
"""Differences that a report names; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One call as its engine logged it."""

    engine: str
    """Its address."""
    prompt: Ids
    sampled: Ids
    logprobs: NDArray[np.float32]
    """[sampled]"""
    versions: tuple[VersionSpan, ...]
    """Over [0, sampled)."""
    cached: int | None
    finish: str


@dataclass(slots=True)
class Comparison:
    """What was compared and what was found."""

    sessions: int = 0
    calls: int = 0
    ids: int = 0
    """Ids of prompts and replies that were compared, each call's whole prompt counted."""
    logprobs: int = 0
    undelivered: int = 0
    """Calls that a killed engine finished and whose reply nobody got any more."""
    found: list[str] = field(default_factory=list)
    """One line per difference."""

    def lines(self) -> list[str]:
        """The differences to show."""
        more = len(self.found) - SHOWN
        return self.found[:SHOWN] + ([f"and {more} more"] if more > 0 else [])


def read_log(path: Path, engine: str, *, begin: int = 0) -> dict[str, list[Served]]:
    """Finished calls of one engine's log, by routing key, from byte ``begin`` on.

    Raises ``ValueError`` for a log that leaves out what is compared.
    """
    calls: dict[str, list[Served]] = defaultdict(list)
    with path.open("rb") as file:
        file.seek(begin)
        for raw in file:
            if not raw.endswith(b"\n"):
                break  # it was killed while it wrote
            line = raw.decode("utf-8", "replace")
            if _FINISHED not in line:
                continue
            value = json.loads(line[line.index("{") :])
            obj, out = value["obj"], value["out"]
            key = obj.get("routing_key")
            if key is not None:  # a probe of the router has none
                calls[str(key)].append(_served(engine, obj, out))
    return dict(calls)


def _served(engine: str, obj: Mapping[str, object], out: Mapping[str, object]) -> Served:
    meta = out.get("meta_info")
    prompt, sampled = obj.get("input_ids"), out.get("output_ids")
    if not isinstance(meta, dict) or not isinstance(prompt, list) or not isinstance(sampled, list):
        raise ValueError("the log has no ids: the engine wants --log-requests-level 3")
    if "..." in prompt or "..." in sampled:
        raise ValueError("the log is shortened: the engine wants --log-requests-level 3")
    rows = meta["output_token_logprobs"]
    if [row[1] for row in rows] != sampled:
        raise ValueError(f"engine {engine} logged log-probabilities of other ids than it sampled")
    spans = meta.get("weight_versions") or []
    reason = meta.get("finish_reason") or {}
    return Served(
        engine=engine,
        prompt=np.array(prompt, np.int32),
        sampled=np.array(sampled, np.int32),
        logprobs=np.array([row[0] for row in rows], np.float32),
        versions=tuple(VersionSpan(parse_version(str(s["version"])), s["start"], s["end"]) for s in spans),
        cached=meta.get("cached_tokens"),
        finish=str(reason.get("type")) if isinstance(reason, dict) else str(reason),
    )


def compare(
    exported: Mapping[str, Sequence[Trajectory]],
    logs: Iterable[Mapping[str, Sequence[Served]]],
    *,
    turns: int,
    killed: frozenset[str] = frozenset(),
) -> Comparison:
    """Hold the exports of sessions, each ``turns`` calls on one path, against the logs of all engines.

    ``killed``: addresses of engines that were killed; a reply that one of them finished may have been lost on its
    way, and the call stands in the log of another one then.
    """
    said: dict[str, list[Served]] = defaultdict(list)
    for log in logs:
        for key, calls in log.items():
            said[key] += calls
    result = Comparison()
    for session, rows in exported.items():
        result.sessions += 1
        if len(rows) != 1 or len(rows[0].turn_spans) != turns:
            calls_of = [len(row.turn_spans) for row in rows]
            result.found.append(f"session {session} has rows of {calls_of} calls, want one row of {turns}")
            continue
        _session(result, session, rows[0], said[session], killed)
    return result


def _session(result: Comparison, session: str, row: Trajectory, served: list[Served], killed: frozenset[str]) -> None:
    left = list(served)
    for turn in range(len(row.turn_spans)):
        where = f"session {session}, call {turn}"
        engine, span = row.engine_ids[turn].rpartition("#")[0], row.turn_spans[turn]
        at = [each for each in left if each.engine == engine and each.prompt.size == span.start]
        if len(at) != 1:
            result.found.append(f"{where}: {len(at)} calls of {span.start} ids in the log of {engine}, want 1")
            continue
        left.remove(at[0])
        result.calls += 1
        _call(result, where, row, turn, at[0])
    for each in left:
        if each.engine in killed:
            result.undelivered += 1
        else:
            result.found.append(
                f"session {session}: {each.engine} logged a call of {each.prompt.size} ids, not exported"
            )


def _call(result: Comparison, where: str, row: Trajectory, turn: int, served: Served) -> None:
    span = row.turn_spans[turn]
    logprobs = row.logprobs[span.start : span.end]
    result.ids += span.end
    result.logprobs += int(logprobs.size)
    for what, ours, theirs in (
        ("prompt ids", row.token_ids[: span.start], served.prompt),
        ("sampled ids", row.token_ids[span.start : span.end], served.sampled),
        ("log-probabilities", logprobs.view(np.int32), served.logprobs.view(np.int32)),
        ("weight versions", row.weight_version[span.start : span.end], _each(served)),
    ):
        if not np.array_equal(ours, theirs):
            detail = f"{ours.size} against {theirs.size}"
            if ours.size == theirs.size:
                first = int(np.flatnonzero(ours != theirs)[0])
                detail = f"{int((ours != theirs).sum())} of {ours.size} differ, first at {first}"
            result.found.append(f"{where}: {what}: {detail}")
    if (row.loss_mask[span.start : span.end] != 1).any():
        result.found.append(f"{where}: sampled ids without mask")
    for what, said, logged in (
        ("finish reason", row.finish_reasons[turn], served.finish),
        ("cached tokens", row.cached_tokens[turn], served.cached),
    ):
        if said != logged:
            result.found.append(f"{where}: {what} {said!r} in the export, {logged!r} in the log")


def _each(served: Served) -> NDArray[np.int32]:
    """[sampled] the version of each id; -1 where the log says none."""
    out = np.full(served.sampled.size, -1, np.int32)
    for span in served.versions:
        out[span.start : span.end] = span.version
    return out


def moved_sessions(exported: Mapping[str, Sequence[Trajectory]]) -> int:
    """Sessions that did not stay on the engine of their first call."""
    return sum(any(len(set(row.engine_ids)) > 1 for row in rows) for rows in exported.values())
