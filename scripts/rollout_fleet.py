"""Processes of the rollout benchmark: engines, started here or given, and one ``tollway serve`` in front of them.

Owns their start and end, and what is asked of them between two rounds: drop the prefix cache, log requests or not,
counters. Engines are started by the product's own launcher as ``[engine]`` says, each with a log file of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from model_shapes import QWEN3_06B

from tollway.engine.config import LAUNCH_FIELDS
from tollway.errors import ConfigError, TollwayError
from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.launching import engine_plan
from tollway.router.engines import EngineClient
from tollway.router.launch import EngineLauncher, RestartRule
from tollway.router.supervisor import ServerProcess
from tollway.session_server.client import SessionClient
from tollway.settings import ADMIN_KEY_VARIABLE, Settings

HERE = Path(__file__).resolve().parent
IDLE_S = 30.0
"""Longest wait until an engine that has nothing to do says so."""
HITS = re.compile(r"^sglang:prefill_effective_tokens_total\{(.*)\} (\S+)$", re.MULTILINE)
SHAPES = {
    "tiny": ModelShape(
        vocab_size=512, hidden_size=48, head_dim=16, intermediate_size=64, max_position_embeddings=16_384
    ),
    "small": ModelShape(
        vocab_size=2048,
        hidden_size=256,
        num_hidden_layers=4,
        head_dim=128,
        intermediate_size=768,
        max_position_embeddings=16_384,
    ),
    "qwen3-0.6b": QWEN3_06B,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAt:
    """One engine of the benchmark."""

    url: str
    log: Path | None = None
    """Where its request log goes; ``None``: not known, so nothing can be compared."""
    pid: int | None = None
    """Leader of its process group, for an engine that was given; ``None``: the launcher ends it."""


class Fleet:
    """Engines and the server in front of them."""

    def __init__(
        self,
        engines: Sequence[EngineAt],
        launcher: EngineLauncher | None,
        server: ServerProcess,
        client: SessionClient,
        http: aiohttp.ClientSession,
        key: str,
    ) -> None:
        self.engines = list(engines)
        self.dead: set[str] = set()
        self.server, self.client, self.key = server, client, key
        self._launcher, self._http = launcher, http

    @property
    def alive(self) -> list[EngineAt]:
        """Engines that were not killed."""
        return [each for each in self.engines if each.url not in self.dead]

    async def flush(self) -> None:
        """Every engine drops its prefix cache. Raises ``TollwayError`` when one stays busy."""
        for each in self.alive:
            client, ends = EngineClient(each.url, self._http), time.monotonic() + IDLE_S
            while True:
                try:
                    await client.flush_cache()
                    break
                except TollwayError:
                    if time.monotonic() > ends:
                        raise
                    await asyncio.sleep(0.1)

    async def log_requests(self, on: bool) -> None:
        """Switch the request log of every engine. Raises ``ConfigError`` for an engine that has none."""
        body = {"log_requests": on, "log_requests_level": 3, "log_requests_format": "json"}
        for each in self.alive:
            async with self._http.post(f"{each.url}/configure_logging", json=body) as response:
                if response.status != 200:
                    raise ConfigError(
                        f"{each.url}/configure_logging answered {response.status}, want 200: without a request log "
                        "exports cannot be checked; use another SGLang, or --exact-sessions 0"
                    )

    def marks(self) -> dict[str, int]:
        """How long each engine's log is now."""
        return {each.url: each.log.stat().st_size for each in self.engines if each.log is not None}

    async def kv_tokens(self) -> int:
        """Tokens whose keys and values all engines together can hold."""
        rows = await self.client.engines()
        return sum(int(str(row["kv_budget_tokens"])) for row in rows if row["kv_budget_tokens"] is not None)

    async def hits(self) -> dict[str, float]:
        """Prompt tokens at first prefills by where they came from, of all engines; empty where none counts them."""
        total: dict[str, float] = {}
        for each in self.alive:
            async with self._http.get(f"{each.url}/metrics") as response:
                text = await response.text() if response.status == 200 else ""
            for labels, value in HITS.findall(text):
                mode = re.search(r'mode="(\w+)"', labels)
                if mode is not None:
                    total[mode[1]] = total.get(mode[1], 0.0) + float(value)
        return total

    def kill(self) -> str:
        """SIGKILL for the process group of the first engine that lives; its address."""
        victim = self.alive[0]
        if victim.pid is not None:
            if (group := os.getpgid(victim.pid)) == os.getpgrp():
                raise ConfigError(
                    f"--kill-one: process {victim.pid} is in this process's own group; start it with setsid"
                )
            os.killpg(group, signal.SIGKILL)
        elif self._launcher is not None:
            self._launcher.give_up(victim.url)
        else:
            raise ConfigError(f"--kill-one: who runs {victim.url}? Give its process id: --engine URL LOG PID")
        self.dead.add(victim.url)
        return victim.url

    def cpu_s(self) -> float:
        """Time on a CPU of the server and its workers, all threads, to the nanosecond."""
        return sum(_cpu_s(pid) for pid in _tree(self.server.pid))


@asynccontextmanager
async def fleet(settings: Settings, given: Sequence[EngineAt], folder: Path) -> AsyncIterator[Fleet]:
    """Start what is wanted, yield it ready to serve, end it with everything that it started."""
    key = secrets.token_urlsafe(16)
    launcher: EngineLauncher | None = None
    engines = list(given)
    try:
        if not engines:
            launcher = _launcher(settings, folder)
            await launcher.start()
            engines = [
                EngineAt(url=url, log=folder / "logs" / (f"engine.{at}.log" if at else "engine.log"))
                for at, url in enumerate(launcher.urls)
            ]
        server = await _server(settings, [each.url for each in engines], key, folder)
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                client = SessionClient(server.url, key, http=http)
                await _serving(client, len(engines))
                yield Fleet(engines, launcher, server, client, http, key)
        finally:
            await server.stop(grace_s=15.0)
    finally:
        if launcher is not None:
            await launcher.stop()


def _launcher(settings: Settings, folder: Path) -> EngineLauncher:
    """The launcher of ``engine.count`` engines; nothing is started again."""
    config = settings.engine
    model = config.model_path
    if model is None:
        if settings.model.fresh is None:
            raise ConfigError("no model: set engine.model_path or [model.fresh], or name a shape with --shape")
        model = folder / "model"
        write_fresh_model(model, settings.model.fresh, seed=settings.run.seed)
    shown = folder / "engine.json"
    config = config.model_copy(update={"model_path": model})
    shown.write_text(config.model_dump_json(exclude=LAUNCH_FIELDS), encoding="utf-8")
    plan = engine_plan(config, model, shown)
    if config.kind == "embedded":
        argv = (sys.executable, "-P", str(HERE / "rollout_engine.py"), str(shown), "{host}", "{port}")
        plan = replace(plan, argv=argv, says_ready=False)
    return EngineLauncher(plan, count=config.count, logs=folder / "logs", rule=RestartRule(restarts=0))


async def _server(settings: Settings, urls: Sequence[str], key: str, folder: Path) -> ServerProcess:
    shown = folder / "settings.json"
    tree = settings.model_dump(mode="json")
    tree["server"] |= {"port": 0, "journal": str(folder / "journal.sqlite")}
    shown.write_text(json.dumps(tree), encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    return await ServerProcess.start(
        [sys.executable, "-P", "-m", "tollway", "serve", "-c", str(shown), *_each("--engine", urls)],
        name="the session server",
        log=folder / "logs" / "server.log",
        env={ADMIN_KEY_VARIABLE: key, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


async def _serving(client: SessionClient, count: int) -> None:
    """Wait until all engines serve. Raises ``ConfigError`` with the reasons of those that do not."""
    ends = time.monotonic() + IDLE_S
    while True:
        rows = await client.engines()
        if sum(row["state"] == "serving" for row in rows) == count:
            return
        if time.monotonic() > ends:
            reasons = "; ".join(f"{row['url']}: {row['state']}, {row['reason']}" for row in rows)
            raise ConfigError(f"not every engine serves after {IDLE_S:g} s: {reasons}")
        await asyncio.sleep(0.1)


def _cpu_s(pid: int) -> float:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        total = 0
        for task in tasks:
            with contextlib.suppress(FileNotFoundError):
                total += int((task / "schedstat").read_text().split()[0])
        if total:
            return total / 1e9
        # A kernel without schedstat counts in hundredths.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:  # it ended
        return 0.0


def _tree(pid: int) -> list[int]:
    """A process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    out = [pid]
    for each in out:
        out += children.get(each, ())
    return out


def difference(after: Mapping[str, object], before: Mapping[str, object]) -> dict[str, object]:
    """Counts of ``GET /cache`` between two looks, with the rates that follow from them.

    >>> had = {"prompt_tokens": 10, "possible_tokens": 0, "useful_tokens": 0, "cached_tokens": 0, "waste": {}}
    >>> has = {"prompt_tokens": 110, "possible_tokens": 80, "useful_tokens": 60, "cached_tokens": 65,
    ...        "waste": {"eviction": 20}}
    >>> found = difference(has, had)
    >>> found["hit_rate"], found["ceiling"], found["efficiency"], found["waste"]
    (0.6, 0.8, 0.75, {'eviction': 20})
    """
    out: dict[str, object] = {}
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, dict) and name in ("waste", "moved", "beyond"):
            known = earlier if isinstance(earlier, dict) else {}
            counts = {cause: tokens - known.get(cause, 0) for cause, tokens in value.items()}
            out[name] = {cause: tokens for cause, tokens in counts.items() if tokens}
        elif isinstance(value, int) and not isinstance(value, bool):
            out[name] = value - (earlier if isinstance(earlier, int) else 0)
    prompt, possible, useful = (int(str(out[name])) for name in ("prompt_tokens", "possible_tokens", "useful_tokens"))
    out["hit_rate"], out["ceiling"] = _rate(useful, prompt), _rate(possible, prompt)
    out["efficiency"] = _rate(useful, possible)
    return out


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None
