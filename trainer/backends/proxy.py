"""The controller's side of the training process: start it, call it, notice its death.

Every method awaits one answer; calls queue in order. A dead or silent process is ``TrainerLost`` with its
last lines of stderr. Must not import torch. Depends on ``worker``'s method names and the batch records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from tollway.errors import ConfigError, TrainerLost
from tollway.trainer.backends.base import BackendSpec, WeightBuckets
from tollway.trainer.batch import Batch, OptimizerSettings, StepReport

__all__ = ["BackendProxy"]

_TAIL_LINES = 20
_TAIL_BYTES = 8192
_STOP_S = 5.0


class BackendProxy:
    """An async handle on a training process; use it as a context manager.

    >>> async with BackendProxy(spec, log_path=Path("trainer.log")) as backend:  # doctest: +SKIP
    ...     report = await backend.step(batch, lr=1e-4)
    """

    def __init__(
        self, spec: BackendSpec, *, log_path: Path, timeout_s: float = 1800.0, env: Mapping[str, str] | None = None
    ) -> None:
        self._spec, self._log_path, self._timeout_s = spec, log_path, timeout_s
        self._env = dict(os.environ if env is None else env)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer-pipe")
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._busy = False

    @property
    def pid(self) -> int:
        """Process id of the training process."""
        return self._running.pid

    def start(self) -> None:
        """Start the process without a model, so that it can be asked about its device; entering builds the model.

        Whoever calls this calls ``aclose``.
        """
        if self._process is None:
            self._start()

    async def __aenter__(self) -> Self:
        self.start()
        try:
            await self._call("build", self._spec)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def rebuild(self, spec: BackendSpec) -> None:
        """Replace model and optimizer in the same process, without importing everything again."""
        await self._call("build", spec)
        self._spec = spec

    async def score(self, batch: Batch) -> tuple[NDArray[np.float32], ...]:
        """See ``TrainBackend.score``."""
        return cast("tuple[NDArray[np.float32], ...]", await self._call("score", batch))

    async def step(self, batch: Batch, *, lr: float) -> StepReport:
        """See ``TrainBackend.step``."""
        return cast(StepReport, await self._call("step", batch, lr))

    async def gradients(self, batch: Batch) -> dict[str, NDArray[np.float32]]:
        """See ``TrainBackend.gradients``."""
        return cast("dict[str, NDArray[np.float32]]", await self._call("gradients", batch))

    async def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """See ``TrainBackend.reset_optimizer``."""
        await self._call("reset_optimizer", settings)

    async def weight_buckets(
        self, max_bytes: int, transport: Literal["tensor", "cuda_ipc"] = "tensor"
    ) -> WeightBuckets:
        """See ``BackendHandle.weight_buckets``."""
        return cast(WeightBuckets, await self._call("weight_buckets", max_bytes, transport))

    async def device_memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the device, as its driver counts them; ``None`` without CUDA. Needs no model."""
        return cast("tuple[int, int] | None", await self._call("device_memory"))

    async def offload(self) -> None:
        """See ``TrainBackend.offload``."""
        await self._call("offload")

    async def onload(self) -> None:
        """See ``TrainBackend.onload``."""
        await self._call("onload")

    async def export(self, target: Path) -> None:
        """Write a Hugging Face model directory, atomically."""
        await self._call("export", str(target))

    async def save(self, directory: Path) -> None:
        """Write weights, optimizer and random state into an existing, empty directory."""
        await self._call("save", str(directory))

    async def load(self, directory: Path) -> None:
        """Continue from ``save``."""
        await self._call("load", str(directory))

    async def cpu_seconds(self) -> float:
        """CPU time of the training process so far."""
        return cast(float, await self._call("usage"))

    async def aclose(self) -> None:
        """End the process: at once when a call is running, otherwise by closing the pipe. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._busy:
            process.kill()
        elif self._pipe is not None:
            self._pipe.close()
        try:
            await asyncio.to_thread(process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        await asyncio.to_thread(self._thread.shutdown)
        if self._pipe is not None:
            self._pipe.close()

    def _start(self) -> None:
        """Start from the thread that lives as long as the run: the kernel ties the child to it."""
        ours, theirs = socket.socketpair()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # One thread per process: two on a loaded machine are many times slower.
        threads = {name: self._env.get(name, "1") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        module = "tollway.trainer.backends.worker"
        with theirs, self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=self._env | threads,
            )
        self._pipe = Connection(ours.detach())

    async def _call(self, method: str, *arguments: object) -> object:
        self._running  # noqa: B018  # raises when there is no process
        loop = asyncio.get_running_loop()
        kind, value = await loop.run_in_executor(self._thread, self._exchange, method, arguments)
        if kind == "ok":
            return value
        if kind == "config":
            raise ConfigError(str(value))
        if kind == "not_written":
            raise TrainerLost(f"{value}; make room, or see the traceback in {self._log_path}")
        raise TrainerLost(f"{method} failed in the training process: {value}{self._tail()}")

    def _exchange(self, method: str, arguments: tuple[object, ...]) -> tuple[str, object]:
        """Send and wait; runs on the pipe's thread."""
        pipe = self._pipe
        if pipe is None or self._process is None:
            raise TrainerLost("the training process is closed")
        self._busy = True
        try:
            pipe.send((method, arguments))
            if not pipe.poll(self._timeout_s):
                self._process.kill()
                raise TrainerLost(
                    f"the training process did not answer {method} within {self._timeout_s:.0f} s and was ended; "
                    f"raise trainer.backend_timeout_s if it was only slow{self._tail()}"
                )
            answer = pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise TrainerLost(f"the training process died during {method}{self._fate()}{self._tail()}") from error
        finally:
            self._busy = False
        try:
            kind, value = pickle.loads(answer)  # noqa: S301 - from the process that we started
        except Exception as error:
            # Unpickling runs constructors, which raise what they like.
            raise TrainerLost(
                f"the training process answered {method} with {len(answer)} bytes that cannot be read: "
                f"{type(error).__name__}: {error}{self._tail()}"
            ) from error
        return kind, value

    def _fate(self) -> str:
        process = self._process
        if process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_STOP_S)
            return f" ({signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
        return ""

    def _tail(self) -> str:
        """Last lines of the process's log, for the error message."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                lines = log.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            return ""
        return "".join(f"\n  {line}" for line in ["; its last lines:", *lines]) if lines else ""

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise TrainerLost("the training process is not running: use the proxy as a context manager")
        return self._process
