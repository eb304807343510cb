"""The training process: one backend behind a private socket pair, one request at a time.

Started by ``proxy`` with ``python -m``; never imported by the controller. It dies with its parent, ignores
Ctrl-C (the controller decides), and answers every request or exits. torch is imported on the first one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tollway.errors import ConfigError, TrainerLost
from tollway.trainer.backends.base import BackendSpec, TrainBackend
from tollway.trainer.batch import Batch, OptimizerSettings, StepReport

__all__ = ["METHODS", "Worker", "main"]

_PR_SET_PDEATHSIG = 1
METHODS = frozenset(
    ["build", "export", "gradients", "load", "reset_optimizer", "save", "score", "step", "usage", "weight_buckets"]
)
"""What a controller may call, with picklable arguments and results."""


class Worker:
    """The calls that a controller can make. Tensors never leave it, only numpy arrays and bytes."""

    def __init__(self) -> None:
        self._backend: TrainBackend | None = None
        self._spec: BackendSpec | None = None

    def build(self, spec: BackendSpec) -> None:
        """Build the backend; a second call replaces it."""
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.|torch\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        from tollway.trainer.backends import factory

        self._backend = None
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

    def weight_buckets(self, max_bytes: int) -> tuple[bytes, ...]:
        """All weights as serialised buckets of about ``max_bytes``."""
        from tollway.trainer.weights import wire

        return tuple(wire.serialise(bucket) for bucket in wire.buckets(self._built.named_weights(), max_bytes))

    def export(self, target: str) -> None:
        """Write a Hugging Face model directory."""
        from tollway.trainer.weights import disk

        backend = self._built
        if self._spec is not None:
            disk.export(backend.named_weights(), Path(self._spec.model_dir), Path(target))

    def save(self, directory: str) -> None:
        """See ``TrainBackend.save``."""
        self._built.save(Path(directory))

    def load(self, directory: str) -> None:
        """See ``TrainBackend.load``."""
        self._built.load(Path(directory))

    def usage(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    @property
    def _built(self) -> TrainBackend:
        if self._backend is None:
            raise TrainerLost("the training process has no model yet: build must come first")
        return self._backend


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
