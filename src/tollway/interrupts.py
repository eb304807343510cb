"""Ctrl-C and SIGTERM: while nothing is there that must be released they end the process at once, later they raise.

An exception in the middle of an import leaves a traceback, or a message of whoever caught it, and says nothing that
anybody could use. Imports next to nothing, since it comes first.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # typing itself would take longer than everything else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

__all__ = ["EXIT_INTERRUPTED", "EndingAtOnce", "raise_on_signals"]

EXIT_INTERRUPTED = 130
"""What a shell reports of a program that Ctrl-C ended."""
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class EndingAtOnce:
    """Within the block a signal ends the process, silently and with status 130: nothing may be held in it.

    Afterwards signals do what they did before. Signals that are ignored stay ignored; in another thread than the main
    one, which hears of no signal, it does nothing.
    """

    def __enter__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        _handle(_end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is _end:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


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


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
