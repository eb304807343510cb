"""``tollway doctor``: what this machine can run, what is missing, and the command that brings it; with an address,
whether a running server can serve, and why not.

Every line is something that was tried or found just now, not guessed. What a server says is its ``/readyz``, word
for word. Owns no repair. Depends on the configuration, the sandboxes' own probe and the server's client.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tollway.errors import ConfigError, EngineLost, NotFound, TollwayError
from tollway.sandboxes.config import LocalConfig
from tollway.sandboxes.probe import bounds, probe
from tollway.session_server.client import Json, SessionClient
from tollway.settings import Settings

__all__ = ["Finding", "diagnose", "diagnose_server", "show", "show_server"]

_MIN_FREE_GB = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked fact."""

    name: str
    ok: bool
    detail: str
    """What was found, and the next step when it is not enough."""
    needed: bool = True
    """Whether the demo needs it; other findings never fail the command."""


def diagnose(settings: Settings) -> list[Finding]:
    """Check everything that ``tollway train`` with these settings needs. Takes well under a second."""
    sandbox = probe(settings.sandbox.local)
    return [
        _python(),
        Finding("bubblewrap sandbox", sandbox.available, sandbox.reason, needed=settings.sandbox.provider == "local"),
        Finding(
            "sandbox python",
            sandbox.python is not None,
            str(sandbox.python or "none under /usr/bin: install the system package python3"),
        ),
        *_sandbox_bounds(settings.sandbox.local),
        _package("torch", "engine", needed=True),
        _package("megatron-core", "megatron", needed=settings.trainer.backend == "megatron"),
        _package("renderers", "renderers", needed=settings.server.family != "compact-bytes"),
        _gpu(),
        _cores(),
        _memory(),
        _disk(settings.run_dir),
        *([_workers(settings.server.workers)] if settings.server.workers > 1 else []),
        _ports(settings.server.host, settings.server.port, settings.server.workers),
    ]


def _sandbox_bounds(config: LocalConfig) -> list[Finding]:
    found = bounds(config)
    filtered = "for this architecture" if found.filtered else f"none for {os.uname().machine}"
    return [
        Finding("sandbox mounts", found.mounts, found.mounts_detail, needed=False),
        Finding("sandbox limits", found.groups, found.groups_detail, needed=False),
        Finding("sandbox system calls", found.filtered, f"filter {filtered}", needed=False),
    ]


def show(findings: Sequence[Finding]) -> bool:
    """Print a table; return whether everything needed is there."""
    missing = _table(findings)
    Console().print(f"missing: {', '.join(missing)}" if missing else "this machine can run scripts/demo")
    return not missing


def show_server(url: str, key: str) -> bool:
    """Ask the server at ``url`` whether it can serve a turn, print what it says, and return it."""
    ready, findings = asyncio.run(diagnose_server(url, key))
    _table(findings)
    Console().print("this server can serve turns" if ready else "this server cannot serve turns now")
    return ready


async def diagnose_server(url: str, key: str) -> tuple[bool, list[Finding]]:
    """(whether the server can serve a turn now, what it and each of its engines is)."""
    async with aiohttp.ClientSession() as http:
        try:
            said = await SessionClient(url, key, http=http, timeout_s=15.0).readiness()
        except (ConfigError, EngineLost, NotFound) as error:
            return False, [Finding("server", False, str(error))]
        except TollwayError as error:
            return False, [Finding("server", False, f"{url}: {error}")]
    if "fleet" not in said:
        return False, [Finding("server", False, f"{url} is no session server; want what tollway serve printed")]
    ready = said["ready"] is True
    server = Finding("server", ready, f"{url} is {'ready' if ready else 'not ready'}")
    engines = cast("Sequence[Json]", said.get("fleet", ()))
    findings = [
        Finding(f"engine {row['id']}", row["state"] == "serving", _engine_words(row), needed=not ready)
        for row in engines
    ]
    others = [
        Finding("worker" if word.startswith("worker ") else "placement", False, word)
        for word in cast("Sequence[str]", said["engines"])
        if "://" not in word
    ]
    nothing = [] if engines or others else [Finding("engines", False, "none yet: tollway engines add http://HOST:PORT")]
    return ready, [server, *findings, *others, *nothing]


def _engine_words(row: Json) -> str:
    of = f" (model {row['model']})" if row["model"] else ""
    at = f" with weights {row['version']}" if row["version"] is not None else ""
    return f"{row['url']}{of} is {row['state']}{at}" + (f": {row['reason']}" if row["reason"] else "")


def _table(findings: Sequence[Finding]) -> list[str]:
    """Print the findings; return the names of those that are needed and not there."""
    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.needed else "[yellow]no[/]"
        table.add_row(mark, finding.name, Text(finding.detail))
    Console().print(table)
    return [finding.name for finding in findings if finding.needed and not finding.ok]


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, version if ok else f"{version}: install Python 3.11 or newer")


def _package(name: str, extra: str, *, needed: bool) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name), needed=needed)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed: pip install 'tollway[{extra}]'", needed=needed)


def _gpu() -> Finding:
    found = Path("/dev/nvidia0").exists()
    return Finding("gpu", found, "NVIDIA device present" if found else "none: engine and trainer run on the CPU", False)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    return Finding(
        "cpu cores", cores >= 2, f"{cores}" if cores >= 2 else "1: training and generation take turns", False
    )


def _memory() -> Finding:
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        facts = dict(line.split(":", 1) for line in file)
    free_gb = int(facts["MemAvailable"].split()[0]) / 2**20
    ok = free_gb >= _MIN_FREE_GB
    return Finding("free memory", ok, f"{free_gb:.1f} GiB" + ("" if ok else f": the demo needs {_MIN_FREE_GB:.0f}"))


def _disk(run_dir: Path) -> Finding:
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free_gb = shutil.disk_usage(existing).free / 2**30
    ok = free_gb >= 1.0
    return Finding("free disk", ok, f"{free_gb:.1f} GiB at {existing}" + ("" if ok else ": set run.dir elsewhere"))


def _workers(workers: int) -> Finding:
    cores = len(os.sched_getaffinity(0))
    enough = f"{workers} on {cores} cores"
    return Finding(
        "server workers",
        workers <= cores,
        enough if workers <= cores else f"{enough}: more than {cores} take turns; set server.workers",
        needed=False,
    )


def _ports(host: str, port: int, workers: int) -> Finding:
    if port == 0:
        return Finding("server port", True, "a free one is taken at start", needed=False)
    last = port if workers == 1 else port + workers
    for each in range(port, last + 1):
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe_socket:
                probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe_socket.bind((host, each))
        except (OSError, OverflowError) as error:
            detail = f"{host}:{each}: {getattr(error, 'strerror', error)}; set server.port, or 0 for a free one"
            return Finding("server port", False, detail, needed=False)
    shown = f"{host}:{port}" if workers == 1 else f"{host}:{port} to {last}"
    return Finding("server port", True, f"{shown} {'is' if workers == 1 else 'are'} free", needed=False)
