"""What a run looks like in the terminal: phases, a bar, a line per step, the summary. rich draws it.

Without a terminal (a log file, CI) the same facts come as plain lines. Owns no figure: everything shown was
measured elsewhere. Only the command line uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tollway.envs.evaluate import Evaluation
from tollway.runs import EvaluationDone, PhaseStarted
from tollway.settings import Settings
from tollway.summary import Summary
from tollway.trainer.events import CheckpointSaved, Event, GapMeasured, Resumed, StepFinished, WarmStartStep

__all__ = ["TrainingView", "training_view"]

_STEP_COLUMNS = (
    ("reward", "rollout/raw_reward", "{:.3f}", 1.0),
    ("calls", "rollout/turns", "{:.2f}", 1.0),
    ("age", "rollout/fully_async/max_staleness", "{:.0f}", 1.0),
    ("|Δlogp|", "train/train_rollout_logprob_abs_diff", "{:.0e}", 1.0),
    ("grad", "train/grad_norm", "{:.2f}", 1.0),
    ("wait s", "perf/train_wait_time", "{:.1f}", 1.0),
    ("train s", "perf/actor_train_time", "{:.1f}", 1.0),
    ("pause ms", "perf/update_weights_pause_time", "{:.0f}", 1000.0),
)
"""Title, metric, form, factor; examples/demo/README.md explains them."""
_WIDTH = 9
_LEGEND = "    " + "step".rjust(5) + "".join(title.rjust(_WIDTH) for title, *_ in _STEP_COLUMNS)


class TrainingView:
    """Draws the events of one run."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._bar: TaskID | None = None
        self._legend_shown = False

    def on_event(self, event: Event | PhaseStarted | EvaluationDone) -> None:
        """Show one event."""
        if isinstance(event, PhaseStarted):
            self._phase(event)
        elif isinstance(event, WarmStartStep):
            self._advance(event.step, event.steps, f"loss {event.loss:.3f}")
        elif isinstance(event, StepFinished):
            self._step(event)
        elif isinstance(event, EvaluationDone):
            self._console.print(f"  {_evaluation_line(event.evaluation)}")
        elif isinstance(event, GapMeasured):
            self._console.print(
                f"    logprob gap at weights {event.version}: {event.gap.largest:.1e} over {event.gap.tokens} tokens",
                style="dim",
                soft_wrap=True,
            )
        elif isinstance(event, Resumed):
            self._console.print(
                f"  resumed at step {event.step}, weights {event.version}: {event.reloaded} finished groups reloaded, "
                f"{event.reissued} prompts sent out again"
            )
        elif isinstance(event, CheckpointSaved) and event.step:
            self._console.print(f"    checkpoint {event.path.name}", style="dim")

    def show_summary(self, summary: Summary) -> None:
        """The end of a run."""
        self._console.print(Panel(_summary_table(summary), title="done", expand=False))

    def _phase(self, event: PhaseStarted) -> None:
        self._clear()
        detail = f"  [dim]{event.detail}[/]" if event.detail else ""
        self._console.print(f"[bold]{event.name}[/]{detail}")

    def _step(self, event: StepFinished) -> None:
        if not self._legend_shown:
            self._console.print(_LEGEND, style="dim", soft_wrap=True)
            self._legend_shown = True
        # A dash: nothing was measured, as when every group's attempts scored the same and nothing was trained.
        cells = [
            (form.format(event.metrics[name] * factor) if name in event.metrics else "-").rjust(_WIDTH)
            for _, name, form, factor in _STEP_COLUMNS
        ]
        self._console.print(f"    {event.step:>5}" + "".join(cells), soft_wrap=True)
        self._advance(event.step, event.steps, "")

    def _advance(self, done: int, total: int, note: str) -> None:
        if self._bar is None:
            self._bar = self._progress.add_task("", total=total)
        self._progress.update(self._bar, completed=done, total=total, description=note)
        if done >= total:
            self._clear()

    def _clear(self) -> None:
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None


@contextmanager
def training_view(settings: Settings) -> Iterator[TrainingView]:
    """A view for one run; leaves the terminal as it was, whatever happens."""
    console = Console(highlight=False)
    console.print(f"run directory [bold]{settings.run.dir}[/], backend {settings.trainer.backend}")
    progress = Progress(
        TextColumn("  "),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        yield TrainingView(console, progress)


def _evaluation_line(evaluation: Evaluation) -> str:
    if evaluation.reward is None:
        return f"no episode was graded; {evaluation.errors} failed for infrastructure reasons"
    low, high = evaluation.interval
    failed = f", {evaluation.errors} failed" if evaluation.errors else ""
    return f"reward {evaluation.reward:.3f} (95 % {low:.3f} to {high:.3f}) over {evaluation.episodes} episodes{failed}"


def _summary_table(summary: Summary) -> Table:
    cache = summary.cache
    table = Table(show_header=False, show_edge=False, box=None)
    rows = (
        ("reward before", _number(summary.reward_before)),
        ("reward after", _number(summary.reward_after)),
        ("reward, blank tools", _number(summary.reward_blank_tools)),
        ("steps, episodes", f"{summary.steps}, {summary.episodes}"),
        (
            "logprob gap",
            f"max {_number(summary.logprob_gap_max, '.1e')} over {summary.logprob_gap_tokens} tokens "
            "scored by the weights that sampled them",
        ),
        ("|Δlogp|, older tokens too", f"{_number(summary.train_rollout_logprob_abs_diff, '.1e')} on average"),
        (
            "prefix cache",
            f"hit rate {_number(cache.hit_rate)} of a ceiling of {_number(cache.ceiling)}, efficiency "
            f"{_number(cache.efficiency)}; {_number(cache.hit_rate_with_shared)} with what siblings share",
        ),
        (
            "  outside refits",
            f"efficiency {_number(cache.efficiency_without_refit)}; {cache.refit_flush_tokens} tokens flushed by "
            f"refits, {cache.unknown_tokens} missed for unknown reasons",
        ),
        ("oldest trained group", f"{summary.staleness_max} weight version(s) behind"),
        ("tokens generated", f"{summary.tokens_generated}"),
        (
            "groups not trained",
            f"{summary.drops.get('zero_variance', 0)} whose attempts all scored the same, "
            f"{summary.drops.get('aborted', 0)} failed, {summary.drops.get('stale', 0)} too old",
        ),
        ("wall time", f"{summary.wall_s:.0f} s"),
        *_phase_rows(summary.phases),
        ("trajectories", summary.trajectories),
    )
    for title, value in rows:
        table.add_row(title, value)
    return table


def _phase_rows(phases: Mapping[str, float]) -> list[tuple[str, str]]:
    """Phases in order; the trainer's own lie within reinforcement and are shown there."""
    inner = {name.removeprefix("trainer/"): s for name, s in phases.items() if name.startswith("trainer/")}
    rows = []
    for name, seconds in phases.items():
        if name.startswith("trainer/"):
            continue
        parts = ", ".join(f"{part} {s:.0f}" for part, s in inner.items()) if name == "reinforcement" else ""
        rows.append((f"  {name.replace('_', ' ')}", f"{seconds:.1f} s" + (f" (of it {parts})" if parts else "")))
    return rows


def _number(value: float | None, form: str = ".3f") -> str:
    return "not measured" if value is None else format(value, form)
