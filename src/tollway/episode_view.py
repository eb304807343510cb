"""How evaluations and single episodes look in the terminal: a live line, then tables; plain lines when piped.

Owns no figure: everything comes from ``envs.report`` and the episodes. Fits 80 columns. Only the command line uses it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from tollway.envs.base import AgentRun
from tollway.envs.episode import PHASES, Episode, PhaseBegan
from tollway.envs.report import Report, TaskRow
from tollway.envs.usage import usage_of

__all__ = ["EpisodeView", "EvaluationView", "evaluation_view", "show_episode", "show_report", "task_table"]

_PLAIN_LINES = 40
"""Lines of progress that an evaluation writes where there is no terminal."""
_MOST_ROWS = 60
_WORTH_TELLING_S = 0.05
"""Tasks that the table lists; of more only those that did not solve, up to as many."""
_PIPE_COLUMNS = 100
_NAME_COLUMNS = 36
_FIGURES = (("reward", 6), ("turns", 5), ("s", 6))


class EvaluationView:
    """Follows one evaluation. ``report`` is what is known so far, ``None`` before it began."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._bar: TaskID | None = None
        self._phases: dict[int, str] = {}
        """Phase of each running attempt, by its number."""
        self._numbers: dict[str, list[int]] = {}
        self.report: Report | None = None

    def started(self, report: Report) -> None:
        """The first episodes begin."""
        self.report = report
        samples = f", {report.samples} samples each" if report.samples > 1 else ""
        self._console.print(
            f"[bold]{escape(report.environment)}[/] with harness [bold]{escape(report.harness)}[/]: "
            f"{report.tasks} tasks{samples}"
        )
        self._bar = self._progress.add_task("", total=report.planned)

    def phase(self, news: PhaseBegan) -> None:
        """An attempt goes on to its next phase."""
        if news.number not in self._phases:
            self._numbers.setdefault(news.task_id, []).append(news.number)
        self._phases[news.number] = news.phase
        self._update()

    def done(self, episode: Episode) -> None:
        """An episode is over."""
        report = self.report
        if report is None:
            return
        # Which of a task's attempts it was matters to nobody: they only have to add up.
        for _ in range(min(len(self._numbers.get(episode.task_id, ())), 1 + len(episode.earlier))):
            self._phases.pop(self._numbers[episode.task_id].pop(0), None)
        self._update()
        step = math.ceil(report.planned / _PLAIN_LINES)
        if not self._console.is_terminal and (report.done % step == 0 or report.done == report.planned):
            place = f"{report.done:>{len(str(report.planned))}}/{report.planned}"
            self._console.print(f"  {place}  {_outcome(episode)}", markup=False, soft_wrap=True)

    def _update(self) -> None:
        if self._bar is None or self.report is None:
            return
        counts = Counter(self._phases.values())
        running = " ".join(f"{phase} {counts[phase]}" for phase in PHASES if counts[phase])
        mean = self.report.mean_reward
        failed = sum(self.report.codes.values())
        parts = [f"reward {mean:.3f}" if mean is not None else "", f"{failed} failed" if failed else "", running]
        self._progress.update(self._bar, completed=self.report.done, description=" · ".join(filter(None, parts)))


@contextmanager
def evaluation_view(*, on_stderr: bool) -> Iterator[EvaluationView]:
    """A view for one evaluation; leaves the terminal as it was, whatever happens."""
    console = _console(stderr=on_stderr)
    progress = Progress(
        TextColumn(" "),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        yield EvaluationView(console, progress)


class EpisodeView:
    """Follows one episode: a line for each phase that begins."""

    def __init__(self, *, on_stderr: bool) -> None:
        self._console = _console(stderr=on_stderr)
        self._attempt = 0

    def phase(self, news: PhaseBegan) -> None:
        """The episode goes on to its next phase."""
        if news.attempt != self._attempt:
            self._attempt = news.attempt
            again = f", attempt {news.attempt}" if news.attempt > 1 else ""
            self._console.print(f"[bold]{escape(news.task_id)}[/]{again}", soft_wrap=True)
        if news.phase != "wait":
            self._console.print(f"  {news.phase}", style="dim")


def show_episode(episode: Episode) -> None:
    """What came of one episode."""
    console = _console()
    table = Table(show_header=False, show_edge=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    usage, run, verdict = usage_of(episode.rows), episode.run, episode.verdict
    if episode.error is not None or verdict is None:
        table.add_row("failed", Text(f"in {episode.phase}: {episode.failure}", style="red"))
    else:
        table.add_row("reward", Text(f"{verdict.reward:g}", style="bold"))
        table.add_row("verdict", Text(verdict.reason.strip()))
        if verdict.flags:
            table.add_row("flags", Text(", ".join(verdict.flags), style="yellow"))
    for error in episode.earlier:
        table.add_row("earlier", Text("the same" if error == episode.failure else error))
    if run is not None:
        table.add_row("agent", Text(_ending(run)))
    if usage.calls:
        table.add_row("tokens", f"{usage.sampled_tokens} sampled, {_figure(usage.prompt_tokens)} of prompts")
        table.add_row("cache hit", _share(usage.cached_tokens, usage.prompt_tokens))
    # The phases that took any time to speak of: episode.json has them all.
    shown = [phase for phase in PHASES if episode.seconds.get(phase, 0.0) >= _WORTH_TELLING_S]
    spent = ", ".join(f"{phase} {episode.seconds[phase]:.1f} s" for phase in shown)
    table.add_row("time", f"{episode.seconds.get('total', 0.0):.1f} s" + (f" ({spent})" if spent else ""))
    console.print(table)
    if episode.folder is not None:
        # Whole, for whoever copies it.
        console.print(f"artifacts  {episode.folder}", markup=False, soft_wrap=True)


def _ending(run: AgentRun) -> str:
    status = run.facts.get("exit_code")
    told = f" (exit status {status:g})" if status else ""
    how = "the context was full" if run.finish == "context" else run.finish
    return f"{how}{told} after {run.turns} model call{'' if run.turns == 1 else 's'}"


def show_report(report: Report) -> None:
    """What an evaluation found, as two tables."""
    console, evaluation = _console(), report.evaluation()
    table = Table(show_header=False, show_edge=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if report.done < report.planned:
        table.add_row("stopped", Text(f"{report.done} of {report.planned} episodes are over", style="yellow"))
    if evaluation.reward is None:
        table.add_row("reward", Text("no episode was graded", style="red"))
    else:
        low, high = evaluation.interval
        text = f"{evaluation.reward:.3f} (95 % {low:.3f} to {high:.3f}) over {evaluation.episodes} episodes"
        table.add_row("reward", Text(text, style="bold"))
        for k, chance in report.pass_at().items():
            table.add_row(f"pass@{k}", f"{chance:.3f}")
    for code, count in sorted(report.codes.items()):
        table.add_row("failed", Text(f"{count} x {code}", style="red"))
    if evaluation.episodes:
        table.add_row("turns", f"{evaluation.turns:.2f}")
    if report.tokens("sampled_tokens") is not None:
        prompt, sampled = report.tokens("prompt_tokens"), report.tokens("sampled_tokens")
        table.add_row("tokens", f"{_figure(sampled)} sampled, {_figure(prompt)} of prompts")
        table.add_row("cache hit", _share(report.tokens("cached_tokens"), prompt))
    for name, value in evaluation.facts.items():
        if name != "turns" and not name.endswith("_tokens"):
            table.add_row(name, f"{value:.3f}")
    rows = task_table(report, console.width)
    if rows.row_count:
        console.print(rows)
    if left := len(report.in_order()) - rows.row_count:
        which = "solved tasks are" if rows.row_count < _MOST_ROWS else "tasks are"
        console.print(f"{left} {which} not listed; --json has them all", style="dim")
    console.print()
    console.print(table)
    if report.artifacts_lost:
        console.print(f"{report.artifacts_lost} artifact folders could not be written; the log says why", style="red")


def task_table(report: Report, width: int) -> Table:
    """A row per task, in ``width`` columns; of very many tasks those that were not solved."""
    rows = report.in_order()
    shown = rows if len(rows) <= _MOST_ROWS else [row for row in rows if not _is_solved(row)][:_MOST_ROWS]
    names = min(_NAME_COLUMNS, max((len(row.task_id) for row in shown), default=0))
    table = Table(show_edge=False, pad_edge=False, box=None, header_style="bold")
    table.add_column("task", overflow="ellipsis", no_wrap=True, max_width=names)
    for name, columns in _FIGURES:
        table.add_column(name, justify="right", no_wrap=True, min_width=columns)
    # Told its room: columns that do not wrap are otherwise squeezed to nothing by a long one.
    room = width - names - sum(columns for _, columns in _FIGURES) - 2 * (len(_FIGURES) + 1)
    table.add_column("verdict", overflow="ellipsis", no_wrap=True, max_width=max(10, room))
    for row in shown:
        graded = len(row.rewards)
        reward = "-" if row.reward is None else f"{row.reward:.2f}"
        style = "red" if row.reward is None else "green" if _is_solved(row) else ""
        table.add_row(
            Text(row.task_id),
            Text(reward, style=style),
            f"{row.turns / graded:.1f}" if graded else "-",
            f"{row.seconds / graded:.1f}" if graded else "-",
            _said(row),
        )
    return table


def _said(row: TaskRow) -> Text:
    words = [*(f"[{flag}]" for flag in sorted(row.flags)), *dict.fromkeys([*row.errors, *row.reasons])]
    return Text(" ".join(" ".join(words).split()))


def _is_solved(row: TaskRow) -> bool:
    return bool(row.rewards) and not row.errors and min(row.rewards) >= 1.0


def _outcome(episode: Episode) -> str:
    if episode.error is not None or episode.verdict is None:
        return f"{episode.task_id}  failed in {episode.phase}: {episode.failure}"
    turns = f"{episode.run.turns} calls, " if episode.run is not None and episode.run.turns else ""
    return f"{episode.task_id}  {episode.verdict.reward:g}  {turns}{episode.seconds['total']:.1f} s"


def _share(part: int | None, whole: int | None) -> str:
    return "not measured" if part is None or not whole else f"{part / whole:.3f} ({part} of {whole} prompt tokens)"


def _figure(value: int | None) -> str:
    return "an unknown number" if value is None else str(value)


def _console(*, stderr: bool = False) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    return console
