"""``tollway engines``: the fleet of a running server, listed and changed.

Everything goes through the server's HTTP surface, so whatever is done here can be done with curl. Owns no state.
Imports what it needs when it runs, because every command parses this one's arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from tollway.errors import ConfigError, EngineLost, NotFound
from tollway.settings import ADMIN_KEY_VARIABLE

if TYPE_CHECKING:
    from rich.table import Table

    from tollway.session_server.client import SessionClient

__all__ = ["add_arguments", "engine_table", "run"]

Row = Mapping[str, object]
_ACTIONS = ("list", "add", "drain", "undrain", "remove")
_STYLES = {
    "serving": "green",
    "draining": "yellow",
    "paused": "yellow",
    "joining": "cyan",
    "synced": "cyan",
    "quarantined": "red",
    "lost": "red",
}
_LOOK_S = 0.1
_WIDE = 100
"""Columns from which on there is room between them."""
_PIPE_COLUMNS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="default: list")
    parser.add_argument("engine", nargs="?", help="an engine's id or address; add wants its address")
    parser.add_argument("--url", help="address of the server (default: server.host and server.port)")
    parser.add_argument(
        "--key-from-env", default=ADMIN_KEY_VARIABLE, metavar="NAME", help="variable that holds the admin key"
    )
    parser.add_argument("--model", default="", metavar="NAME", help="add: its model in the fleet (default: the policy)")
    parser.add_argument("--max-in-flight", type=int, metavar="N", help="add: calls that it may run at once")
    parser.add_argument("--frozen", action="store_true", help="add: no trainer brings it weights")
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="SECONDS", help="add: for its first verdict (default: 30)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace, url: str) -> bool:
    """Do it at the server ``url`` and print the result; whether the engine does what was asked for.

    Raises ``ConfigError`` for a wrong call and what the server answers otherwise.
    """
    if not (key := os.environ.get(arguments.key_from_env)):
        raise ConfigError(
            f"set {arguments.key_from_env} to the server's admin key: it alone may see and change the fleet"
        )
    if arguments.action != "list" and not arguments.engine:
        wanted = "its address, http://HOST:PORT" if arguments.action == "add" else "its id or address"
        raise ConfigError(f"tollway engines {arguments.action}: name an engine, by {wanted}")
    return asyncio.run(_run(arguments, url, key))


async def _run(arguments: argparse.Namespace, url: str, key: str) -> bool:
    import aiohttp

    from tollway.session_server.client import SessionClient

    async with aiohttp.ClientSession() as http:
        client = SessionClient(url, key, http=http, timeout_s=15.0)
        action, named = arguments.action, arguments.engine
        if action == "list":
            _show(await client.fleet(), as_json=arguments.json)
            return True
        if action == "add":
            row = await _add(client, arguments)
            _show({"engines": [row]}, as_json=arguments.json)
            return row["state"] == "serving"
        row = await _find(client, named)
        engine_id = str(row["id"])
        if action == "remove":
            await client.remove_engine(engine_id)
            if arguments.json:
                _show({"engines": [{**row, "state": "lost", "reason": "removed"}]}, as_json=True)
            else:
                goes = f"; its {count} sessions move at their next call" if (count := row.get("sessions")) else ""
                sys.stdout.write(f"removed {engine_id} at {row['url']}{goes}\n")
            return True
        await (client.drain_engine if action == "drain" else client.undrain_engine)(engine_id)
        # Of several workers only the list has the figures of all.
        _show({"engines": [await _find(client, engine_id)]}, as_json=arguments.json)
        return True


async def _add(client: SessionClient, arguments: argparse.Namespace) -> Row:
    """Add it and wait for the first verdict: it serves, or the reason why it does not yet."""
    row: Row = await client.add_engine(
        arguments.engine, model=arguments.model, max_in_flight=arguments.max_in_flight, frozen=arguments.frozen
    )
    deadline = time.monotonic() + arguments.wait
    while row["state"] == "joining" and not row["reason"] and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
        row = await client.engine(str(row["id"]))
    if row["state"] == "joining" and not row["reason"]:
        raise EngineLost(f"engine {row['id']} at {row['url']} has not answered yet; see tollway engines list")
    return row


async def _find(client: SessionClient, named: str) -> Row:
    rows = await client.engines()
    for row in rows:
        if named.rstrip("/") in (row["id"], row["url"]):
            return row
    known = ", ".join(f"{row['id']} ({row['url']})" for row in rows) or "none"
    raise NotFound(f"no engine {named!r}; known engines: {known}")


def _show(fleet: Mapping[str, object], *, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    if as_json:
        sys.stdout.write(json.dumps(fleet) + "\n")
        return
    console = Console()
    rows = cast("Sequence[Row]", fleet["engines"])
    if not rows:
        console.print("no engine yet: tollway engines add http://HOST:PORT")
        return
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS  # nothing is cut for programs that read it
    console.print(engine_table(rows, narrow=console.width < _WIDE))
    for row in rows:
        if row["reason"]:
            line = Text.assemble((str(row["id"]), "bold"), f" is {row['state']}: {row['reason']}")
            console.print(line, soft_wrap=not console.is_terminal)
    if fleet.get("policy_version") is not None:
        console.print(f"policy at version {fleet['policy_version']}")
    for index in cast("Sequence[int]", fleet.get("workers_down", ())):
        console.print(f"[red]worker {index} is down[/]")


def engine_table(rows: Sequence[Row], *, narrow: bool = False) -> Table:
    """One row per engine; colours repeat what the text says. Where it does not fit, addresses are broken."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False, box=None, header_style="bold", collapse_padding=narrow)
    table.add_column("id", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("address", overflow="fold")
    if models := any(row["model"] for row in rows):
        table.add_column("model", no_wrap=True)
    for name in ("version", "sessions", "calls", "KV tokens", "lives"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        state = str(row["state"])
        model = [str(row["model"] or "policy")] if models else []
        version = "-" if row["version"] is None else f"{row['version']}{' frozen' if row['frozen'] else ''}"
        table.add_row(
            str(row["id"]),
            Text(state, style=_STYLES.get(state, "")),
            str(row["url"]),
            *model,
            version,
            _count(row.get("sessions")),
            _of(row.get("in_flight"), row.get("max_in_flight")),
            _of(row.get("resident_tokens"), row.get("kv_budget_tokens")),
            str(cast(int, row["incarnation"]) + 1),
        )
    return table


def _count(value: object) -> str:
    return "-" if value is None else f"{value:,}"


def _of(value: object, most: object) -> str:
    """A figure and its limit, if it has one."""
    return _count(value) if most is None or value is None else f"{value:,}/{most:,}"
