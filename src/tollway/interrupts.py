"""Ctrl-C and SIGTERM: while nothing is there that must be released they end the process at once, later they raise.

An exception in the middle of an import leaves a traceback, or a message of whoever caught it, and says nothing that
anybody could use. Imports next to nothing, since it comes first.
"""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False  # typing itself would take longer than everything else here
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Self

__all__ = ["EXIT_INTERRUPTED", "Cancelling", "EndingAtOnce", "end_at_once", "raise_on_signals"]

EXIT_INTERRUPTED = 130
"""What a shell reports of a program that Ctrl-C ended."""
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_HANGS_S = 1.0
"""An event loop that has not heard of a signal by then is held up by somebody's code."""


class _Instead:
    """Within the block both signals go to ``_hear``. Signals that are ignored stay ignored."""

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        _handle(self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)


class EndingAtOnce(_Instead):
    """Within the block a signal ends the process, silently and with status 130: nothing may be held in it.

    Afterwards signals do what they did before. Signals that are ignored stay ignored; in another thread than the main
    one, which hears of no signal, it does nothing.
    """


class Cancelling(_Instead):
    """Within the block a signal cancels the task that is followed, and a further one what that still waits for.

    An exception, which is what asyncio makes of the second Ctrl-C, would come out of whatever runs just then, and be
    reported by it. Only where the loop hangs in somebody's code, or in the threads that it waits for, is it raised.
    """

    def __init__(self) -> None:
        self._followed: tuple[AbstractEventLoop, Task[object]] | None = None
        self._unheard_s: float | None = None
        """Monotonic second of a signal that the task has not been told of."""

    def follow(self, loop: AbstractEventLoop, task: Task[object]) -> None:
        """From here on it is ``task`` that is cancelled: at once when a signal came before."""
        self._followed = loop, task
        if self._unheard_s is not None:
            self._pass_on()

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._unheard_s is not None and now - self._unheard_s > _HANGS_S:
            raise KeyboardInterrupt
        if self._unheard_s is None:
            self._unheard_s = now
        if self._followed is not None and not self._followed[0].is_closed():
            self._followed[0].call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        if self._followed is not None and self._followed[1].cancel():
            self._unheard_s = None


def end_at_once() -> None:
    """From here on both end the process, as within ``EndingAtOnce``: only the interpreter's own end is left."""
    _handle(EndingAtOnce()._hear)


def raise_on_signals() -> None:
    """From here on both raise ``KeyboardInterrupt``: processes and sandboxes are released, whoever asks for the end."""
    _handle(signal.default_int_handler)


def _handle(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            try:
                signal.signal(number, handler)
            except ValueError:
                return  # not the main thread
