"""The engine's process: load, listen, say ready, serve, stop.

``run`` blocks. One JSON line on stdout announces readiness; everything else is logged to stderr. Depends on
uvicorn and ``service``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from tollway.engine.config import EngineConfig
from tollway.engine.control import routes
from tollway.engine.http import Application
from tollway.engine.service import EngineService
from tollway.errors import ComponentLost, ConfigError
from tollway.serving import KEEP_ALIVE_S, announce, listen

__all__ = ["API_KEY_VARIABLE", "run"]

logger = logging.getLogger(__name__)
API_KEY_VARIABLE = "TOLLWAY_ENGINE_KEY"
"""When set, every route but health wants it as a Bearer token."""
_SWITCH_INTERVAL_S = 0.0005
"""The decode thread gives the interpreter lock up at every operator; at Python's 5 ms it would get it back late."""


def run(config: EngineConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ``ConfigError`` (port in use, no model directory, no weights, ...) and ``ComponentLost`` when the
    engine's thread crashes.
    """
    if config.kind != "embedded":
        raise ConfigError(f"engine.kind is {config.kind!r}; this process runs the embedded engine only")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    listener = listen(config.host, config.port, key="engine.port")
    with listener, asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(config, listener))


async def _serve(config: EngineConfig, listener: socket.socket) -> None:
    crashed = asyncio.Event()
    service = EngineService.build(config, asyncio.get_running_loop(), crashed)
    app = Application(routes(service), os.environ.get(API_KEY_VARIABLE) or None)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service.scheduler.start()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(sockets=[listener]))
        await _first(serving, tasks.create_task(server.listening.wait()))
        announce(listener)
        await _first(serving, tasks.create_task(stop.wait()), tasks.create_task(crashed.wait()))
        logger.info("stopping")
        # Open requests must end before the server waits for their connections.
        await asyncio.to_thread(service.scheduler.stop)
        server.should_exit = True
        stop.set()
        crashed_before = crashed.is_set()
        crashed.set()
    if crashed_before:
        raise ComponentLost(f"the engine's thread crashed: {service.scheduler.crash!r}")


async def _first(*tasks: asyncio.Task[object]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals to us: uvicorn raises them again after its shutdown, and the exit
    code would not be 0."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
