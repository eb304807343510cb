"""Embedded engines as real processes that can be killed, stopped, wedged, and cut off from the network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tollway.fresh_model import ModelShape, write_fresh_model

SHAPE = ModelShape(vocab_size=272, hidden_size=48, head_dim=16, intermediate_size=64, max_position_embeddings=4096)

# A fault that is in the process, not in front of it: the scheduler's thread stops while the flag is there, or the
# metrics page is garbage. Everything else is the engine as it ships.
_FAULTY = """
import pathlib, sys, time
kind, flag = sys.argv[1], pathlib.Path(sys.argv[2])
del sys.argv[1:3]
if kind == "wedge":
    from tollway.engine.generation import Generation
    step = Generation.step
    def wedged(self):
        while flag.exists():
            time.sleep(0.01)
        return step(self)
    Generation.step = wedged
else:
    from tollway.engine import control
    def garbage(*_):
        page = b"sglang:evicted_tokens_total 1e999\\nsglang:evicted_tokens_total NaN\\nsglang:token_usage{ 0.5\\n"
        return page + bytes(range(256)) * 4000 + b"\\nsglang:evicted_tokens_total{} -5\\n"
    control.render = garbage
from tollway.engine.__main__ import main
sys.exit(main())
"""


def write_model(path: Path) -> Path:
    """A small random model."""
    write_fresh_model(path, SHAPE, seed=5, std=0.15)
    return path


@dataclass
class LiveEngine:
    """One engine process after the other, at one address."""

    model: Path
    options: tuple[str, ...] = ()
    fault: tuple[str, Path] | None = None
    """("wedge" or "metrics", flag file)."""
    port: int = 0
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start the process; ``ready`` waits for it."""
        head = ["-c", _FAULTY, self.fault[0], str(self.fault[1])] if self.fault else ["-m", "tollway.engine"]
        argv = [sys.executable, *head, "--model-path", str(self.model), "--port", str(self.port), *self.options]
        self.process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ready(self) -> None:
        """Wait until it accepts requests."""
        line = self.process.stdout.readline()
        self.port = int(json.loads(line)["url"].rpartition(":")[2])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End the process with no chance to say anything."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> LiveEngine:
        if self.process is None:
            self.launch()
            self.ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


@contextlib.contextmanager
def live_engines(*engines: LiveEngine) -> Iterator[None]:
    """Run all of them, started side by side."""
    for engine in engines:
        engine.launch()
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        for engine in engines:
            engine.ready()
        yield


@contextlib.asynccontextmanager
async def talking(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that is no engine; its URL. Every connection is closed when its handler returns."""
    running: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await handler(reader, writer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            running.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass
class Relay:
    """The network in front of an engine. Cut, its connections stay open and carry nothing any more."""

    port: int
    """Of the engine."""
    cut: bool = False
    own_port: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.own_port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.own_port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in self._writers:
                writer.close()
            for writer in self._writers:
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers |= {writer, here}
        for source, sink in ((reader, here), (there, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if self.cut:
                    continue  # swallowed: neither side learns that the other is gone
                sink.write(data)
                await sink.drain()
            if not self.cut:
                sink.close()
