"""Commands with subcommands of their own: how each is declared, and how the chosen one is run.

Every subcommand also takes ``-c`` and ``--set``; those before it count as well. Depends on ``settings``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tollway.settings import Settings, load_settings

__all__ = ["Action", "add_action", "cut_line", "run_action"]

Action = Callable[[argparse.Namespace, Settings], int]
"""Does what one subcommand says; returns the exit status."""


def add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, act: Action, text: str
) -> argparse.ArgumentParser:
    """One subcommand, for its arguments to be added to."""
    command = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    # Without a default of its own, so that those before the subcommand count.
    command.add_argument("-c", "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    command.add_argument(
        "--set", action="append", metavar="KEY=VALUE", default=argparse.SUPPRESS, help="override one key (may repeat)"
    )
    command.set_defaults(act=act)
    return command


def run_action(arguments: argparse.Namespace) -> int:
    """Load the settings of this call and run the subcommand; its exit status."""
    action: Action = arguments.act
    return action(arguments, load_settings(arguments.config, arguments.set))


def cut_line(text: str) -> str:
    """One line that does not wrap in a terminal; whole where a file or a program reads it."""
    line = " ".join(text.splitlines())
    if not sys.stdout.isatty():
        return line
    columns = shutil.get_terminal_size().columns
    return line if len(line) <= columns else f"{line[: columns - 1]}…"
