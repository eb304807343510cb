"""Every stand-in that lets Megatron-Core run without CUDA, in one place.

``apply`` must run before anything of megatron is imported, in a process that does nothing but train: it
replaces names inside torch. It does nothing where CUDA is present. ``patch_megatron`` then mends two gaps
in megatron itself. Each stand-in says who needs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["apply", "patch_megatron"]

P = ParamSpec("P")
R = TypeVar("R")

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")


class _NoStream:
    """A CUDA stream or event where there is nothing to wait for (0.19 optimizer, checkpoint, schedules)."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def wait(self, *_args: object) -> None:
        """Nothing runs ahead."""

    wait_stream = wait_event = record = synchronize = wait

    def record_event(self, *_args: object) -> _NoStream:
        """The event of a stream on which nothing runs."""
        return _NoStream()

    def query(self) -> bool:
        """Always complete."""
        return True

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_args: object) -> None:
        pass


def apply() -> bool:
    """Install the stand-ins. Returns False, and changes nothing, where CUDA is available."""
    if torch.cuda.is_available():
        return False
    if getattr(torch.cuda, "_tollway_shims", False):
        return True
    _cuda_functions()
    _moves()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _tensor_type()
    torch.cuda._tollway_shims = True  # type: ignore[attr-defined]  # marks this process
    return True


def patch_megatron() -> None:
    """Mend megatron itself, after its import."""
    # 0.16.1 without Transformer Engine: the name is used whenever moe_router_dtype is set, and undefined.
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not torch.cuda.is_available():
        # Megatron's own queues the call until CUDA starts, which is never: recompute and dropout need it at once.
        random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
        random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # A save passes results through a manager process, which outlives a killed trainer; up to 0.18 it also forks a
    # writer per file, and waits for ever for one that died. Our saves are synchronous anyway.
    writers: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    writers._results_queue = queue.Queue()
    writers._process_memory = lambda: 0  # logging only, and needs psutil
    writers.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(
        functools.partial(_write_here, writers.FileSystemWriterAsync.write_preloaded_data)
    )


def _write_here(
    write: Callable[..., None],
    transforms: object,
    _use_msc: bool,
    _rank: int,
    parts: Sequence[object],
    results: queue.Queue[object],
) -> None:
    """Megatron's writer loop in this process: write every part, report {index: results} or the error."""
    written: dict[int, object] = {}
    for index, part in enumerate(parts):
        done: queue.Queue[tuple[int, object]] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        write(transforms, index, part, done, pending, True)
        _, outcome = done.get_nowait()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[index] = outcome
    results.put(written)


def _cuda_functions() -> None:
    """Entry points that megatron calls unconditionally."""
    cuda = torch.cuda

    def get_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(new_state)

    stand_ins: dict[str, Callable[..., object]] = {
        "current_device": lambda: torch.device("cpu"),  # passed on as device=
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "manual_seed": torch.manual_seed,
        "synchronize": lambda *_args: None,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_args: (0, 0),
        "memory_allocated": lambda *_args: 0,
        "max_memory_allocated": lambda *_args: 0,
        "current_stream": _NoStream,
        "default_stream": _NoStream,
        "stream": lambda *_args: contextlib.nullcontext(),
        "Stream": _NoStream,
        "Event": _NoStream,
    }
    for name, stand_in in stand_ins.items():
        setattr(cuda, name, stand_in)
    # Activation recompute takes the pair from here.
    for name in ("get_rng_state", "set_rng_state"):
        setattr(cuda.random, name, stand_ins[name])


def _moves() -> None:
    """``.cuda()`` keeps a tensor or module where it is (checkpoint paths, optimizer)."""

    def stay(self: object, *_args: object, **_kwargs: object) -> object:
        return self

    torch.Tensor.cuda = stay  # type: ignore[method-assign,assignment]  # replaced on purpose
    torch.nn.Module.cuda = stay  # type: ignore[method-assign,assignment]  # replaced on purpose


def _on_cpu(factory: Callable[P, R]) -> Callable[P, R]:
    """Rewrite a literal ``device="cuda"`` (optimizer, clip_grads, utils, schedules)."""

    @functools.wraps(factory)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _tensor_type() -> None:
    """DistributedOptimizer and gradient clipping compare ``tensor.type()`` with CUDA type names."""
    original = torch.Tensor.type

    def named(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        found = original(self, *args, **kwargs)  # type: ignore[call-overload]  # passed through unchanged
        if isinstance(found, str) and not args and not kwargs and not found.startswith("torch.cuda."):
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    torch.Tensor.type = named  # type: ignore[method-assign,assignment]  # replaced on purpose
