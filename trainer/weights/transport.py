"""How weights leave the training process: as bytes, as handles on a shared device, or as files.

Each is a ``Weights`` over the controller's handle on that process. Depends on ``payload``; imports no torch.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Literal

from tollway.trainer.backends.base import BackendHandle
from tollway.trainer.weights.payload import DiskPayload, Payload, TensorPayload

__all__ = ["DiskWeights", "TensorWeights"]

_VERSION = "version_"
_OURS = re.compile(r"version_\d{6,}|\.version_\d{6,}\.(\d+\.tmp|old)")
"""Whole directories, drafts, and what a directory's replacement left."""


class TensorWeights:
    """Buckets for ``update_weights_from_tensor``: over HTTP (``tensor``), or handles of CUDA memory (``cuda_ipc``)."""

    def __init__(self, backend: BackendHandle, *, bucket_bytes: int, transport: Literal["tensor", "cuda_ipc"]) -> None:
        self._backend, self._bucket_bytes = backend, bucket_bytes
        self._transport: Literal["tensor", "cuda_ipc"] = transport

    async def payload(self, version: int) -> Payload:
        """See ``Weights``."""
        made = await self._backend.weight_buckets(self._bucket_bytes, self._transport)
        return TensorPayload(made.buckets, made.weight_bytes)


class DiskWeights:
    """Model directories ``version_N`` below ``folder``, which engines read. The last two versions stay.

    An older one goes when the next is made: by then every engine that could load the one between has it. So does a
    later one, which is of steps that a resumed run takes anew, and what a killed process left half-written. What has
    no name of ours stays: the folder may be somebody's.
    """

    def __init__(self, backend: BackendHandle, folder: Path) -> None:
        self._backend, self._folder = backend, folder.resolve()

    async def payload(self, version: int) -> Payload:
        """See ``Weights``. Raises ``TrainerLost`` when the disk refuses; what was there stays."""
        target = self._folder / f"{_VERSION}{version:06d}"
        await asyncio.to_thread(self._make_room, target)
        await self._backend.export(target)
        size = await asyncio.to_thread(_weight_bytes, target)
        return DiskPayload(str(target), size)

    def _make_room(self, target: Path) -> None:
        """Only the newest directory of an earlier version stays beside ``target``, which a resumed run writes again."""
        found = sorted(path for path in self._folder.glob("*version_*") if _OURS.fullmatch(path.name))
        older = [path for path in found if path.name.startswith(_VERSION) and path.name < target.name]
        for path in set(found) - {target, *older[-1:]}:
            shutil.rmtree(path, ignore_errors=True)


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
