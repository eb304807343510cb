"""Giving memory back while idle, by tag, and taking it again.

``kv_cache`` drops the prefix cache and the rows; ``weights`` moves the parameters to an unlinked temporary
file, so that their content survives while their memory is free. Runs on the scheduler's thread. Depends on
``generation``.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from typing import IO

import torch
from torch import Tensor

from tollway.engine.generation import Generation
from tollway.errors import BadRequest

__all__ = ["TAGS", "Memory"]

TAGS = ("kv_cache", "weights", "cuda_graph")
"""``cuda_graph`` is accepted for callers that name all tags of a stock server; there is none here."""


class Memory:
    """What is released, and where it went."""

    def __init__(self) -> None:
        self._spill: IO[bytes] | None = None

    def release(self, generation: Generation, tags: Sequence[str]) -> dict[str, int]:
        """Free the memory of ``tags``; returns freed bytes by tag. Needs an idle or retract-paused engine."""
        wanted = _check(tags)
        if generation.batch.n or (generation.waiting and not generation.paused):
            raise BadRequest(
                f"cannot release memory: {generation.batch.n} running and {len(generation.waiting)} waiting requests; "
                "pause with mode retract first"
            )
        freed = dict.fromkeys(wanted, 0)
        for tag in wanted:
            if tag in generation.released:
                continue
            if tag == "kv_cache":
                freed[tag] = (generation.cache.flush() if generation.cache is not None else 0) + generation.rows.clear()
            elif tag == "weights":
                freed[tag] = self._release_weights(generation.decoder.parameters())
            generation.released.add(tag)
        _trim()
        return freed

    def resume(self, generation: Generation, tags: Sequence[str]) -> dict[str, int]:
        """Take the memory of ``tags`` again; returns bytes by tag (keys and values grow when they are needed)."""
        taken = dict.fromkeys(_check(tags), 0)
        if "weights" in taken and "weights" in generation.released:
            taken["weights"] = self._restore_weights(generation.decoder.parameters())
        generation.released -= taken.keys()
        return taken

    def _release_weights(self, parameters: list[Tensor]) -> int:
        # The file has no name and dies with the process; unbuffered, since a buffer would be a copy.
        self._spill = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives until the weights are resumed
        freed = 0
        for tensor in parameters:
            # A copy is written, one tensor at a time: numpy() pins the storage that it looks at.
            raw: memoryview = tensor.clone().view(-1).view(torch.uint8).numpy().data
            while raw:
                raw = raw[self._spill.write(raw) :]
            freed += tensor.nbytes
        for tensor in parameters:
            tensor.untyped_storage().resize_(0)
        return freed

    def _restore_weights(self, parameters: list[Tensor]) -> int:
        if self._spill is None:
            raise RuntimeError("released weights have no spill file")
        taken = 0
        with self._spill as spill:
            spill.seek(0)
            for tensor in parameters:
                size = tensor.numel() * tensor.element_size()
                tensor.untyped_storage().resize_(size)
                raw = bytearray()
                while len(raw) < size:
                    raw += spill.read(size - len(raw))
                tensor.copy_(torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape))
                taken += size
        self._spill = None
        return taken


def _check(tags: Sequence[str]) -> list[str]:
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown:
        raise BadRequest(f"unknown memory tag {unknown[0]!r}; use {', '.join(TAGS)}", param="tags")
    return list(dict.fromkeys(tags))


def _trim() -> None:
    """Hand freed pages of the C heap back to the system (glibc keeps small ones otherwise)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
