"""Listings of model families and of their proof, as tables or JSON.

Owns how they look in a terminal. Depends on ``session_server.families`` and rich.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tollway.session_server.families.base import Family
from tollway.session_server.families.registry import families
from tollway.session_server.families.verify import CaseResult, verify_family

__all__ = ["show_families", "show_verification"]

_STYLE = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def show_families(*, as_json: bool = False) -> None:
    """Print every family, and those that cannot be used with the reason."""
    entries = list(families())
    console = Console()
    if as_json:
        console.print_json(json.dumps([asdict(entry) for entry in entries]))
        return
    table = Table(box=None, header_style="bold")
    for title in ("name", "source", "thinking", "tool calls", "proved with"):
        table.add_column(title, no_wrap=True)
    for entry in entries:
        table.add_row(entry.name, entry.source, entry.thinking, entry.tools, entry.tested)
    console.print(table)
    console.print("\n[dim]* with the family's control strings added[/dim]")
    for entry in entries:
        if entry.note:
            console.print(f"[bold]{escape(entry.name)}[/bold]: {escape(entry.note)}")


def show_verification(family: Family, *, as_json: bool = False) -> bool:
    """Prove ``family`` and print every case; whether none has failed."""
    results = verify_family(family)
    failed = [result for result in results if result.state == "failed"]
    console = Console()
    if as_json:
        console.print_json(json.dumps([asdict(result) for result in results]))
        return not failed
    table = Table(
        box=None, header_style="bold", title=f"{family.name}, {family.vocab_size:,} ids", title_justify="left"
    )
    for title in ("case", "state", "what", "found"):
        table.add_column(title, overflow="fold")
    for result in results:
        if result.title:
            table.add_row(result.case, _state(result), escape(result.title), escape(_short(result.note)))
    console.print(table)
    elsewhere = ", ".join(result.case for result in results if not result.title)
    console.print(f"\n[dim]{elsewhere} are the server's, whatever the family[/dim]")
    for result in failed:
        console.print(f"\n[bold red]{result.case}[/bold red] {escape(result.title)}\n{escape(result.note)}")
    counted = {state: sum(result.state == state for result in results) for state in _STYLE}
    console.print("\n" + ", ".join(f"{count} {state}" for state, count in counted.items()))
    return not failed


def _state(result: CaseResult) -> str:
    style = _STYLE[result.state]
    return f"[{style}]{result.state}[/{style}]"


def _short(note: str) -> str:
    """The table has one line for a note; what failed is printed whole below it."""
    return note if len(note) <= 90 else note[:87] + "..."
