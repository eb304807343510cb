"""``tollway episode`` and ``tollway eval``: their arguments, and what their results do to the exit status.

Exit status: 0 when it ran to its end and at least one episode was graded, 1 otherwise. Imports what it needs when it
runs, because every command parses these arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from tollway.errors import ConfigError, TollwayError
from tollway.interrupts import EndingAtOnce

if TYPE_CHECKING:
    from tollway.envs.report import Report
    from tollway.settings import Settings
    from tollway.stage import Where

__all__ = ["EPISODE", "EVAL", "add_episode_arguments", "add_eval_arguments", "overrides", "run_episode", "run_eval"]

EPISODE = "run one episode of a task with a harness, and keep what it left: verdict, trajectory, logs, diff"
EVAL = (
    "evaluate many tasks: the latest checkpoint of a run, or whatever --url, --engine or --start-engines name; "
    "harnesses that call no model (gold, empty) need neither"
)


def add_episode_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``tollway episode``."""
    parser.add_argument("action", choices=["run"], help="run: one episode, now")
    parser.add_argument("task", metavar="TASK", help="a task id, or its place in the environment's order: 0, 1, ...")
    _add_common(parser)
    parser.add_argument("--artifacts", metavar="DIR", help="where its folder goes (default: episodes/ in run.dir)")


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``tollway eval``."""
    parser.add_argument(
        "--tasks",
        action="append",
        default=[],
        metavar="SEL",
        help="which: 3, 0-9, an id, or a pattern over ids (may repeat)",
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="episodes of each task (default: 1)")
    parser.add_argument(
        "--episodes",
        type=int,
        metavar="N",
        help="episodes in all (default: every task, or eval.episodes of an endless order)",
    )
    parser.add_argument("--blank-tools", action="store_true", help="replace every tool result by blanks")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", metavar="NAME", help="the environment (default: env.name)")
    parser.add_argument("--harness", metavar="NAME", help="what lets the model work (default: env.harness)")
    parser.add_argument("--url", help="address of a running server; its admin key comes from TOLLWAY_ADMIN_KEY")
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="an engine (may repeat)")
    parser.add_argument("--start-engines", type=int, default=0, metavar="N", help="start N engines as [engine] says")
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")


def overrides(arguments: argparse.Namespace) -> dict[str, object]:
    """Settings that the flags of either command name."""
    return {
        "env__name": arguments.env,
        "env__harness": arguments.harness,
        "env__artifacts": getattr(arguments, "artifacts", None),
    }


def run_episode(arguments: argparse.Namespace, settings: Settings) -> int:
    """Run it and print what came of it."""
    with EndingAtOnce():
        from tollway.envs.artifacts import record_of
        from tollway.episode_view import EpisodeView, show_episode
        from tollway.evaluation import run_episode as run

    if settings.env.artifacts is None:
        env = settings.env.model_copy(update={"artifacts": str(settings.run_dir / "episodes")})
        settings = settings.model_copy(update={"env": env})
    view = EpisodeView(on_stderr=arguments.json)
    episode = run(settings, arguments.task, _where(arguments), view.phase)
    if arguments.json:
        folder = None if episode.folder is None else str(episode.folder)
        sys.stdout.write(json.dumps({**record_of(episode), "artifacts": folder}, default=str) + "\n")
    else:
        show_episode(episode)
    return 0 if episode.error is None else 1


def run_eval(arguments: argparse.Namespace, settings: Settings) -> int:
    """Run it and print what it found; stopped or cut short, what is known by then."""
    with EndingAtOnce():
        from tollway.episode_view import evaluation_view
        from tollway.evaluation import EvalPlan, Watcher, evaluate

    plan = EvalPlan(
        where=_where(arguments),
        tasks=tuple(arguments.tasks),
        episodes=arguments.episodes,
        samples=arguments.samples,
        blank_tools=arguments.blank_tools,
    )
    with evaluation_view(on_stderr=arguments.json) as view:
        watcher = Watcher(started=view.started, phase=view.phase, done=view.done)
        stopped: BaseException | None = None
        try:
            evaluate(settings, plan, watcher)
        except (KeyboardInterrupt, TollwayError) as error:
            stopped = error
    if view.report is not None and (view.report.done or stopped is None):
        _print(view.report, as_json=arguments.json)
    if stopped is not None:
        raise stopped
    return 0 if view.report is not None and view.report.evaluation().episodes else 1


def _print(report: Report, *, as_json: bool) -> None:
    from tollway.episode_view import show_report

    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
        sys.stdout.flush()
    else:
        show_report(report)


def _where(arguments: argparse.Namespace) -> Where:
    from tollway.errors import BadRequest
    from tollway.router.addresses import check_url
    from tollway.stage import Where

    for url in arguments.engine:
        try:
            check_url(url)
        except BadRequest as error:
            raise ConfigError(f"--engine: {error}") from None
    return Where(url=arguments.url, engines=tuple(arguments.engine), start=arguments.start_engines)
