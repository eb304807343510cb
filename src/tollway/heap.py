"""How a serving process keeps memory: large buffers stay with it, and what it is made of is not searched for garbage.

Depends on nothing. For processes that receive megabytes per request.
"""

from __future__ import annotations

import ctypes
import gc

__all__ = ["collect_if_due", "give_back", "keep_freed_memory", "settle"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
"""Blocks below this come from the heap; glibc takes no higher value."""
_YOUNG = 2_500
"""Containers made, less those freed, between two young collections. Where old state makes room for new the young ones
are many more than that: at 20,000 they were a pause of 50 ms every twelve seconds, at this one of a few."""
_SELDOM = 400, 1000
"""Young collections between two of the middle generation, and those between two full ones that nobody asked for: some
minutes of full load. Either looks at most of what lives."""
_DUE = 100
"""Young collections after which a quiet moment is used for a full one."""
_KEPT = 128 << 20
"""Free memory at the end of the heap that is not given back to the system."""


def keep_freed_memory() -> bool:
    """Reuse freed memory instead of returning it to the system; whether the C library can.

    By default glibc maps blocks of 128 KiB and more anew each time, and the kernel clears their pages: reading a
    reply of 1 MB from a socket took 1.3 ms of CPU that way and 0.55 ms with this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))


def settle() -> None:
    """Call once everything is loaded: the collector leaves that alone from now on, and looks less often.

    Imported modules and tokenizers are a million objects; a full collection over them took 70 ms, in the middle of
    a turn. Over a thousand live sessions it took 170 ms, once in half a minute: ``collect_if_due`` does it between
    turns.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *_SELDOM)
    give_back()  # what only the start needed


def collect_if_due() -> None:
    """A full collection when much was made since the last one. For a moment in which no request waits."""
    _, young, middle = gc.get_count()
    if middle or young >= _DUE:
        gc.collect()


def give_back() -> None:
    """Return free memory to the system, wherever it lies in the heap. Not for an event loop: it takes a while."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
