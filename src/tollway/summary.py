"""summary.json: the figures of a finished run, all measured, each named once. Depends on the reports only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from tollway.envs.evaluate import Evaluation
from tollway.notes import Notes
from tollway.trainer.atomic import write_file
from tollway.trainer.report import TrainReport

__all__ = ["CacheSummary", "Summary", "evaluation_json", "read_summary", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSummary:
    """Prefix cache over every model call of the run's last process; ``None``: nothing to divide by."""

    hit_rate: float | None
    """Cached tokens of sessions' own prefixes as a share of all prompt tokens."""
    hit_rate_with_shared: float | None
    """The same with what sessions owe to each other: prompts and tool outputs that group siblings share."""
    ceiling: float | None
    """The highest hit rate that the conversations allow, sharing between sessions left out."""
    efficiency: float | None
    """Cached as a share of what could have been."""
    efficiency_without_refit: float | None
    """The same without misses that a refit's flush caused."""
    refit_flush_tokens: int
    """Tokens computed again because a refit flushed them."""
    unknown_tokens: int
    """Missed tokens without a known cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a training run achieved and cost."""

    reward_before: float | None
    """Mean reward on held-out tasks before training; ``None`` where it was not evaluated."""
    reward_after: float | None
    reward_blank_tools: float | None
    """After training, with every tool output replaced by blanks."""
    steps: int
    episodes: int
    """Graded training episodes."""
    logprob_gap_max: float | None
    """Largest |trainer - engine| in nats over tokens scored by the weights that sampled them."""
    logprob_gap_tokens: int
    train_rollout_logprob_abs_diff: float | None
    """Mean |trainer - engine| over all trained tokens, older ones included."""
    cache: CacheSummary
    staleness_max: int
    """Largest age of a trained group, in versions."""
    tokens_generated: int
    """Sampled tokens of all episodes, evaluations and probes included."""
    wall_s: float
    """From the start of the process to here, summed over the processes of a resumed run."""
    phases: Mapping[str, float]
    """Wall seconds by phase; those named ``trainer/...`` lie within ``reinforcement``."""
    drops: Mapping[str, int]
    """Groups that were generated and not trained, by reason."""
    evaluations: Mapping[str, Mapping[str, object]]
    trajectories: str
    """Where the trained trajectories lie."""

    def as_json(self) -> dict[str, object]:
        """The content of summary.json."""
        return asdict(self)


def read_summary(run_dir: Path) -> Summary | None:
    """The summary that a finished run left; ``None`` when there is none or it is not readable."""
    try:
        body = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return Summary(**{**body, "cache": CacheSummary(**body["cache"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def summarise(report: TrainReport, notes: Notes, cache: Mapping[str, object], run_dir: Path) -> Summary:
    """Collect the figures and write them to summary.json in ``run_dir``."""
    figures = cast("Mapping[str, float | None]", cache)
    summary = Summary(
        reward_before=_reward(notes, "before"),
        reward_after=_reward(notes, "after"),
        reward_blank_tools=_reward(notes, "blank_tools"),
        steps=report.steps,
        episodes=report.episodes,
        logprob_gap_max=report.gap.largest if report.gap.tokens else None,
        logprob_gap_tokens=report.gap.tokens,
        train_rollout_logprob_abs_diff=report.train_rollout_logprob_abs_diff,
        cache=CacheSummary(
            hit_rate=figures["hit_rate"],
            hit_rate_with_shared=figures["hit_rate_with_shared"],
            ceiling=figures["ceiling"],
            efficiency=figures["efficiency"],
            efficiency_without_refit=figures["efficiency_without_refit"],
            refit_flush_tokens=int(figures["refit_flush_tokens"] or 0),
            unknown_tokens=int(figures["unknown_tokens"] or 0),
        ),
        staleness_max=report.staleness_max,
        tokens_generated=notes.tokens_generated,
        wall_s=notes.wall_s,
        phases=dict(notes.phases) | {f"trainer/{name}": seconds for name, seconds in report.phases.items()},
        drops=dict(report.drops),
        evaluations=dict(notes.evaluations),
        trajectories=str(run_dir / "trajectories"),
    )
    write_file(run_dir / "summary.json", (json.dumps(summary.as_json(), indent=2) + "\n").encode())
    return summary


def evaluation_json(evaluation: Evaluation) -> dict[str, object]:
    """One evaluation as plain values."""
    return asdict(evaluation)


def _reward(notes: Notes, name: str) -> float | None:
    return cast("float | None", notes.evaluations.get(name, {}).get("reward"))
