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
from queue import SimpleQueue
from typing import TypeVar

import torch

from tollway.engine.generation import Generation
from tollway.engine.request import Progress, Request, Result
from tollway.errors import ComponentLost

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Outbox = list[tuple[Callable[[Progress], None] | Callable[[Result], None], Progress]]


class Scheduler:
    """Runs one ``Generation`` on a thread of its own."""

    def __init__(self, generation: Generation, loop: asyncio.AbstractEventLoop, on_crash: Callable[[], None]) -> None:
        self._generation, self._loop, self._on_crash = generation, loop, on_crash
        self._inbox: SimpleQueue[Request | Callable[[], None] | None] = SimpleQueue()
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
        self._check()
        self._inbox.put(request)

    async def call(self, command: Callable[[Generation], _T]) -> _T:
        """Run ``command`` between two steps and return or raise what it does."""
        self._check()
        done: Future[_T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(command(self._generation))
            except Exception as error:  # boundary: the error belongs to the caller, not to this thread
                done.set_exception(error)

        self._inbox.put(run)
        return await asyncio.wrap_future(done)

    def _check(self) -> None:
        if self.crash is not None or not self._thread.is_alive():
            raise ComponentLost(f"the engine's thread is gone: {self.crash!r}")

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
                    item()
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
        while not self._inbox.empty():
            if isinstance(item := self._inbox.get(), Request):
                generation.submit(item)
        generation.abort(None, message, status)
        self._flush_outbox()


def _deliver(out: _Outbox) -> None:
    for callback, value in out:
        callback(value)  # type: ignore[arg-type]  # a result goes to on_result, progress to on_progress
