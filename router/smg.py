"""A child process that runs ``smg``, and the workers that it knows: start, add, remove, stop.

The launch line turns off everything by which smg would decide for itself that a session leaves its engine, or
send a call twice: this process owns the life of engines, and smg gets told. Chooses nothing. Depends on
``supervisor`` and aiohttp; docs/gateway.md has what was measured for each flag.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import orjson

from tollway.errors import ComponentLost, ConfigError
from tollway.free_ports import free_ports
from tollway.router.supervisor import ServerProcess

__all__ = ["LAUNCH_LINE", "Smg", "Workers"]

logger = logging.getLogger(__name__)

LAUNCH_LINE = (
    *("launch", "--policy", "manual", "--assignment-mode", "min_load"),
    *("--disable-worker-overload-protection", "--max-concurrent-requests", "0", "--request-timeout-secs", "14400"),
    # Retries stay ours: a body that smg does not hold cannot be sent twice.
    *("--max-buffered-request-bytes", "0", "--disable-retries"),
    # Only this process says which engine lives: else smg takes sessions off a busy one, and back again later.
    *("--disable-circuit-breaker", "--disable-health-check"),
    *("--worker-stall-secs", "86400", "--worker-wedge-secs", "86400"),
    *("--sse-keepalive-secs", "0", "--disable-tokenizer-autoload", "--shutdown-grace-period-secs", "1"),
)
"""``smg`` 1.13; what PROTOCOL calls the proven line, with what trials added."""
_READY_S = 60.0
_CONTROL_S = 10.0
"""Longest wait for a worker to be taken."""
_TRIES = 3
"""Between choosing a free port and smg taking it, somebody else may have it."""
_POLL_S = 0.02


class Workers:
    """The workers of one running smg, over its control routes."""

    def __init__(self, url: str, http: aiohttp.ClientSession, *, key: str, timeout_s: float) -> None:
        self.url = url
        self._http = http
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._removed: set[object] = set()
        """Ids of workers that were told to go."""

    async def listed(self) -> list[dict[str, object]]:
        """Every worker as smg describes it. Raises ``ComponentLost``."""
        found = await self._call("GET", "/workers")
        rows = found.get("workers") if isinstance(found, Mapping) else None
        if not isinstance(rows, list):
            raise ComponentLost(f"gateway {self.url} lists no workers; is it an smg?")
        return [row for row in rows if isinstance(row, dict)]

    async def add(self, url: str, *, model: str) -> None:
        """Register ``url`` and return when calls may go there. A known one is fine. Raises ``ComponentLost``.

        All workers get one model name: with several, smg buffers bodies and sends a call twice when a connection
        breaks.
        """
        body = {"url": url, "models": [{"id": model}], "model_id": model}
        deadline = time.monotonic() + (self._timeout.total or _READY_S)
        posted = False
        while True:
            rows = [row for row in await self.listed() if row.get("url") == url]
            leaving = [row for row in rows if row.get("id") in self._removed]
            if not leaving and not posted:
                await self._call("POST", "/workers", body, known=409)
                posted = True
            elif posted and any(row.get("status") == "ready" for row in rows):
                return
            if time.monotonic() > deadline:
                raise ComponentLost(f"gateway {self.url} did not take {url} as a worker in time")
            await asyncio.sleep(_POLL_S)

    async def remove(self, url: str) -> None:
        """No further call goes to ``url``; those that run there end undisturbed. Raises ``ComponentLost``.

        smg goes on listing a removed worker for about five seconds, and takes its address again only afterwards.
        """
        for row in await self.listed():
            if row.get("url") == url and row.get("id") not in self._removed:
                await self._call("DELETE", f"/workers/{row.get('id')}", known=404)
                self._removed.add(row.get("id"))

    async def _call(self, method: str, path: str, body: object = None, *, known: int = 200) -> object:
        data = orjson.dumps(body) if body is not None else None
        headers = self._headers | ({"content-type": "application/json"} if data else {})
        try:
            async with self._http.request(
                method, self.url + path, data=data, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                text = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ComponentLost(f"gateway {self.url} does not answer {method} {path}: {error}") from error
        if response.status not in (200, 202, known):
            hint = "; set TOLLWAY_GATEWAY_KEY to its key" if response.status in (401, 403) else ""
            words = text[:300].decode("utf-8", "replace")
            raise ComponentLost(f"gateway {self.url} answered {response.status} to {method} {path}: {words}{hint}")
        try:
            return orjson.loads(text) if text else None
        except orjson.JSONDecodeError:
            raise ComponentLost(f"gateway {self.url} answers {path} with no JSON; is it an smg?") from None


class Smg:
    """One smg that this process started. It has no worker until it is told of one.

    >>> smg = await Smg.launch(http)  # doctest: +SKIP
    ... await smg.workers.add("http://127.0.0.1:30000", model="policy")
    """

    def __init__(self, process: ServerProcess, workers: Workers, folder: Path) -> None:
        self.process, self.workers = process, workers
        self._folder = folder

    @property
    def url(self) -> str:
        """Where it takes calls, on loopback."""
        return self.process.url

    @classmethod
    async def launch(cls, http: aiohttp.ClientSession, *, timeout_s: float = _READY_S) -> Smg:
        """Start smg on a free loopback port and return when it answers.

        Raises ``ConfigError`` when it is not installed, ``ComponentLost`` with its last words when it does not
        come up.
        """
        program = _program()
        folder = Path(tempfile.mkdtemp(prefix="tollway-smg-"))
        try:
            for attempt in range(_TRIES):
                key = secrets.token_urlsafe(32)
                process = await _start(program, folder / f"smg.{attempt}.log", key)
                try:
                    await _until_ready(process, http, timeout_s)
                except BaseException as error:
                    await process.stop(grace_s=0.5)
                    if not isinstance(error, ComponentLost) or attempt + 1 == _TRIES:
                        raise
                    logger.warning("%s; trying again on other ports", error)
                    continue
                return cls(process, Workers(process.url, http, key=key, timeout_s=_CONTROL_S), folder)
            raise ComponentLost("smg was not started")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def stop(self) -> None:
        """End it; calls on it break."""
        # Asked nicely it would wait five seconds for load balancers that it does not have.
        await self.process.stop(grace_s=0.2)
        shutil.rmtree(self._folder, ignore_errors=True)


def _program() -> str:
    beside = Path(sys.executable).with_name("smg")
    found = str(beside) if beside.is_file() else shutil.which("smg")
    if found is None:
        raise ConfigError("router.gateway='smg': smg is not installed; add the extra: pip install 'tollway[gateway]'")
    return found


async def _start(program: str, log: Path, key: str) -> ServerProcess:
    port, metrics_port = free_ports(2)
    argv = [
        *(program, *LAUNCH_LINE),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--control-plane-api-keys", f"tollway:tollway:admin:{key}", "--log-level", "warn"),
    ]
    # Our own keys are no business of a program of others.
    keys = {name: "" for name in os.environ if name.startswith("TOLLWAY_") and name.endswith("_KEY")}
    return await ServerProcess.spawn(argv, name="smg", log=log, url=f"http://127.0.0.1:{port}", env=keys)


async def _until_ready(process: ServerProcess, http: aiohttp.ClientSession, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise process.lost()
        try:
            async with http.get(f"{process.url}/liveness", timeout=aiohttp.ClientTimeout(total=2.0)) as response:
                if response.status == 200:
                    return
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        await asyncio.sleep(_POLL_S)
    raise ComponentLost(f"smg was not ready after {timeout_s:.0f} s; its last words:\n{process.last_words()}")
