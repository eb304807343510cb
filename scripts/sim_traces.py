"""Traces of agent sessions for the routing simulator: synthetic ones, and recorded ones as JSON lines.

One line per session, in order of arrival:

    {"session": "s0", "group": "g0", "turns": [[added, sampled, wait_s], ...]}

``added`` are the prompt tokens that a turn adds to the conversation (the first turn's is the whole first prompt),
``sampled`` those that the model writes, ``wait_s`` the seconds from the end of the reply to the next call (tools; the
last one does not count). Every session of a group has the same first prompt.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

__all__ = ["Shape", "TraceSession", "Turn", "read_trace", "synthetic", "write_trace"]

Turn = tuple[int, int, float]
"""(added tokens, sampled tokens, seconds until the next turn)."""


@dataclass(frozen=True, slots=True)
class TraceSession:
    """One agent: what it sends, gets and waits for."""

    name: str
    group: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Means of lognormal distributions, and how heavy their tails are (sigma of the logarithm)."""

    sessions: int = 1600
    group_size: int = 8
    turns: float = 29.0
    turns_sigma: float = 0.7
    first_tokens: float = 4000.0
    first_sigma: float = 0.3
    sampled_tokens: float = 220.0
    sampled_sigma: float = 1.0
    tool_tokens: float = 450.0
    tool_sigma: float = 1.2
    wait_median_s: float = 2.0
    wait_sigma: float = 1.2
    max_turns: int = 200
    max_added: int = 16_384
    max_sampled: int = 8_192
    max_wait_s: float = 300.0
    context_tokens: int = 131_072
    """A session that would get longer ends."""


def synthetic(shape: Shape, seed: int) -> list[TraceSession]:
    """Sessions drawn from ``shape``; the same for the same seed."""
    rng = random.Random(seed)

    def around(mean: float, sigma: float, most: float) -> float:
        return min(most, rng.lognormvariate(log(mean) - sigma * sigma / 2, sigma))

    out: list[TraceSession] = []
    first = 0
    for number in range(shape.sessions):
        if number % shape.group_size == 0:
            first = max(64, int(around(shape.first_tokens, shape.first_sigma, shape.context_tokens / 2)))
        turns: list[Turn] = []
        length = 0
        for at in range(max(1, round(around(shape.turns, shape.turns_sigma, shape.max_turns)))):
            added = max(8, int(around(shape.tool_tokens, shape.tool_sigma, shape.max_added))) if at else first
            sampled = max(1, int(around(shape.sampled_tokens, shape.sampled_sigma, shape.max_sampled)))
            wait_s = min(shape.max_wait_s, shape.wait_median_s * exp(rng.gauss(0.0, shape.wait_sigma)))
            if length + added + sampled > shape.context_tokens:
                break
            turns.append((added, sampled, wait_s))
            length += added + sampled
        out.append(TraceSession(f"s{number}", f"g{number // shape.group_size}", tuple(turns)))
    return out


def read_trace(path: Path) -> list[TraceSession]:
    """Sessions of a JSON-lines file. ``ValueError`` with the line number when one is not as described above."""
    out: list[TraceSession] = []
    prompts: dict[str, int] = {}
    with path.open(encoding="utf-8") as lines:  # not splitlines: texts may hold other line separators
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                turns = tuple((int(added), int(sampled), float(wait)) for added, sampled, wait in row["turns"])
                session = TraceSession(str(row["session"]), str(row.get("group", "")), turns)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}:{number}: want session, turns: [[added, sampled, wait_s]]: {error}"
                ) from error
            if not turns or any(added < 1 or sampled < 1 or not 0 <= wait < 1e9 for added, sampled, wait in turns):
                raise ValueError(f"{path}:{number}: a session has turns, and each adds, samples and waits 0 s or more")
            first = prompts.setdefault(session.group, turns[0][0])
            if session.group and first != turns[0][0]:
                raise ValueError(f"{path}:{number}: group {session.group} began with {first} tokens, not {turns[0][0]}")
            out.append(session)
    return out


def write_trace(path: Path, sessions: list[TraceSession]) -> None:
    """Write sessions as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for each in sessions:
            row = {"session": each.name, "group": each.group, "turns": [list(turn) for turn in each.turns]}
            file.write(json.dumps(row) + "\n")
