"""The training process: one backend behind a private socket pair, one request at a time.

Started by ``proxy`` with ``python -m``; never imported by the controller. It dies with its parent, ignores
Ctrl-C (the controller decides), and answers every request or exits. torch is imported on the first one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from tollway.errors import ConfigError, TrainerLost
from tollway.trainer.backends.base import BackendSpec, TrainBackend, WeightBuckets
from tollway.trainer.batch import Batch, OptimizerSettings, StepReport

if TYPE_CHECKING:
    import torch

    from tollway.trainer.weights.ipc import Shared

__all__ = ["METHODS", "Worker", "main"]

_PR_SET_PDEATHSIG = 1
METHODS = frozenset(
    [
        *("build", "export", "gradients", "load", "reset_optimizer", "save", "score", "step", "usage"),
        *("device_memory", "offload", "onload", "weight_buckets"),
    ]
)
"""What a controller may call, with picklable arguments and results."""


class Worker:
    """The calls that a controller can make. Tensors never leave it, only numpy arrays and bytes."""

    def __init__(self) -> None:
        self._backend: TrainBackend | None = None
        self._spec: BackendSpec | None = None
        self.kept: list[Shared] = []
        """Buckets on the device that engines were given handles of; they go with the next payload or ``offload``."""

    def build(self, spec: BackendSpec) -> None:
        """Build the backend; a second call replaces it."""
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.|torch\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        from tollway.trainer.backends import factory

        self._backend = None
        self._drop_kept()
        self._backend, self._spec = factory.build(spec), spec

    def score(self, batch: Batch) -> tuple[NDArray[np.float32], ...]:
        """See ``TrainBackend.score``."""
        return self._built.score(batch)

    def step(self, batch: Batch, lr: float) -> StepReport:
        """See ``TrainBackend.step``."""
        return self._built.step(batch, lr=lr)

    def gradients(self, batch: Batch) -> dict[str, NDArray[np.float32]]:
        """See ``TrainBackend.gradients``."""
        return {name: grad.numpy() for name, grad in self._built.gradients(batch).items()}

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """See ``TrainBackend.reset_optimizer``."""
        self._built.reset_optimizer(settings)

    def weight_buckets(self, max_bytes: int, transport: Literal["tensor", "cuda_ipc"] = "tensor") -> WeightBuckets:
        """See ``BackendHandle.weight_buckets``."""
        import torch

        from tollway.trainer.weights import wire

        if transport == "cuda_ipc":
            if not torch.cuda.is_available():
                raise ConfigError(
                    "trainer.refit_transport is cuda_ipc, and the training process has no GPU; train on the engines' "
                    'GPU, or set trainer.refit_transport = "tensor"'
                )
            return self.share_buckets(max_bytes, torch.device("cuda", torch.cuda.current_device()))
        self._drop_kept()
        sent, size = [], 0
        for bucket in wire.buckets(self._built.named_weights(), max_bytes):
            size += sum(tensor.nbytes for _, tensor in bucket)
            sent.append(wire.serialise(bucket))
        return WeightBuckets(tuple(sent), size)

    def share_buckets(self, max_bytes: int, device: torch.device) -> WeightBuckets:
        """All weights as buckets on ``device``, which stay in ``kept``; what is sent are handles of them."""
        from tollway.trainer.weights import ipc, wire

        self._drop_kept()
        sent = []
        for bucket in wire.buckets(self._built.named_weights(), max_bytes):
            shared = ipc.share(bucket, device)
            self.kept.append(shared)
            sent.append(shared.payload)
        return WeightBuckets(tuple(sent), sum(shared.flat.nbytes for shared in self.kept))

    def device_memory(self) -> tuple[int, int] | None:
        """See ``BackendHandle.device_memory``."""
        import torch

        return torch.cuda.mem_get_info() if torch.cuda.is_available() else None

    def offload(self) -> None:
        """See ``TrainBackend.offload``; engines must have loaded what they were given handles of."""
        self._drop_kept()
        self._built.offload()

    def onload(self) -> None:
        """See ``TrainBackend.onload``. Raises ``TrainerLost`` with what to change when the device has no room."""
        import torch

        try:
            self._built.onload()
        except torch.OutOfMemoryError as error:
            raise TrainerLost(
                f"the trainer's memory does not fit on the device beside what engines keep there: {error}; give the "
                "engines less (engine.sglang.mem-fraction-static, or fewer engines on this device)"
            ) from error

    def _drop_kept(self) -> None:
        """Free the buckets that engines were given handles of."""
        import torch

        while self.kept:
            self.kept.pop().release()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def export(self, target: str) -> None:
        """Write a Hugging Face model directory."""
        from tollway.trainer.weights import disk

        backend, spec = self._ready
        with _writing(Path(target)):
            disk.export(backend.named_weights(), Path(spec.model_dir), Path(target))

    def save(self, directory: str) -> None:
        """See ``TrainBackend.save``."""
        backend, _ = self._ready
        with _writing(Path(directory)):
            backend.save(Path(directory))

    def load(self, directory: str) -> None:
        """See ``TrainBackend.load``."""
        self._built.load(Path(directory))

    def usage(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    @property
    def _built(self) -> TrainBackend:
        return self._ready[0]

    @property
    def _ready(self) -> tuple[TrainBackend, BackendSpec]:
        if self._backend is None or self._spec is None:
            raise TrainerLost("the training process has no model yet: build must come first")
        return self._backend, self._spec


class _NotWritten(Exception):
    """A directory that could not be written, and why."""


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Frameworks say of a full disk what they like, down to "unexpected pos": name the directory and its room."""
    try:
        yield
    except Exception as error:
        there = next(path for path in (target, *target.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free / 2**20
        raise _NotWritten(
            f"cannot write {target}, with {free:.0f} MiB free there: {type(error).__name__}: {error}"
        ) from error


def main(handle: int, parent: int) -> None:
    """Serve requests from the inherited socket ``handle`` until the controller closes it."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker()
    with Connection(handle) as pipe:
        while True:
            try:
                method, arguments = pipe.recv()
            except (EOFError, ConnectionResetError):
                return
            pipe.send(_answer(worker, method, arguments))


def _answer(worker: Worker, method: str, arguments: tuple[object, ...]) -> tuple[str, object]:
    try:
        if method not in METHODS:
            raise ConfigError(f"the training process has no method {method!r}")
        return "ok", getattr(worker, method)(*arguments)
    except ConfigError as error:
        return "config", str(error)
    except _NotWritten as error:
        traceback.print_exc()
        return "not_written", str(error)
    except Exception as error:  # the boundary of the process: every failure becomes an answer
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}"


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the controller's thread ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
