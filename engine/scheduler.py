"""The engine's thread: drains an inbox of requests and commands between steps of ``Generation``.

The only thread that touches the model, the rows and the cache. The HTTP side talks to it through ``submit``
and ``call``; results go back in one hop per step. A crash of this thread ends the process: ``on_crash`` is
called once, open requests end with an abort. Depends on ``generation``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from tollway.engine.generation import Generation
from tollway.engine.request import Progress, Request, Result
from tollway.errors import ComponentLost

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Outbox = list[tuple[Callable[[Progress], None] | Callable[[Result], None], Progress]]


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do between two steps, and where its outcome goes."""

    command: Callable[[Generation], object]
    done: Future[Any]

    def run(self, generation: Generation) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.command(generation))
        except Exception as error:  # boundary: the error belongs to the caller, not to the engine's thread
            self.done.set_exception(error)

    def fail(self, error: Exception) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class Scheduler:
    """Runs one ``Generation`` on a thread of its own."""

    def __init__(self, generation: Generation, loop: asyncio.AbstractEventLoop, on_crash: Callable[[], None]) -> None:
        self._generation, self._loop, self._on_crash = generation, loop, on_crash
        self._inbox: SimpleQueue[Request | _Command | None] = SimpleQueue()
        self._gate = threading.Lock()
        self._over = False
        """Set under the gate when nothing reads the inbox any more."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.crash: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its current step; open requests end with an abort."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def submit(self, request: Request) -> None:
        """Queue a request; its callbacks run on the loop."""
        self._put(request)

    async def call(self, command: Callable[[Generation], _T]) -> _T:
        """Run ``command`` between two steps and return or raise what it does."""
        done: Future[_T] = Future()
        self._put(_Command(command, done))
        return await asyncio.wrap_future(done)

    def _put(self, item: Request | _Command) -> None:
        with self._gate:
            if self._over:
                raise ComponentLost(f"the engine's thread is gone: {self.crash!r}")
            self._inbox.put(item)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._loop_until_stopped()
        except BaseException as error:  # boundary: nothing above this thread could report it
            logger.exception("the engine's thread crashed")
            self.crash = error
            self._end_all(f"the engine crashed: {error!r}", 500)
            self._loop.call_soon_threadsafe(self._on_crash)

    def _loop_until_stopped(self) -> None:
        generation, inbox = self._generation, self._inbox
        busy = False
        while True:
            while not busy or not inbox.empty():
                item = inbox.get()
                if item is None:
                    self._end_all("the server is shutting down", 503)
                    return
                if isinstance(item, Request):
                    generation.submit(item)
                else:
                    item.run(generation)
                busy = True
                self._flush_outbox()
            busy = generation.step()
            self._flush_outbox()

    def _flush_outbox(self) -> None:
        if self._generation.outbox:
            out, self._generation.outbox = self._generation.outbox, []
            self._loop.call_soon_threadsafe(_deliver, out)

    def _end_all(self, message: str, status: int) -> None:
        generation = self._generation
        with self._gate:
            self._over = True
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Request):
                generation.submit(item)
            elif item is not None:
                item.fail(ComponentLost(message))
        generation.abort(None, message, status)
        self._flush_outbox()


def _deliver(out: _Outbox) -> None:
    for callback, value in out:
        callback(value)  # type: ignore[arg-type]  # a result goes to on_result, progress to on_progress
