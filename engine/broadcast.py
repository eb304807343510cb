"""Receiving weights by broadcast (gloo), as ``update_weights_from_distributed`` asks.

Owns the process groups that trainers opened towards this engine. Tensors arrive in fresh buffers on a worker
thread, so a trainer that dies in the middle leaves the weights alone and the engine serving. Depends on
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

from tollway.errors import BadRequest

__all__ = ["BroadcastGroups"]

_TIMEOUT = timedelta(seconds=120)


class BroadcastGroups:
    """Process groups by name; this engine is one rank of each."""

    def __init__(self) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, address: str, *, rank: int, world_size: int, name: str, backend: str) -> None:
        """Join a group; blocks until the others have, at most two minutes. ``address`` is ``host:port``."""
        if backend != "gloo":
            raise BadRequest(f"backend {backend!r} is not supported on the CPU; use gloo")
        if name in self._groups:
            raise BadRequest(f"group {name!r} exists; destroy it with /destroy_weights_update_group first")
        if not 0 < rank < world_size:
            raise BadRequest(f"rank {rank} is not a receiver in a world of {world_size}; the trainer is rank 0")
        try:
            # The nesting of stores that torch's own helper and SGLang use, so that either end may be stock.
            store, _, _ = next(rendezvous(f"tcp://{address}", rank, world_size, timeout=_TIMEOUT))
            store.set_timeout(_TIMEOUT)
            group, _ = _new_process_group_helper(
                world_size,
                rank,
                [],
                Backend("gloo"),
                PrefixStore(name, store),
                group_name=GroupName(name),
                timeout=_TIMEOUT,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise BadRequest(f"cannot join group {name!r} at {address}: {error}") from error
        self._groups[name] = group

    def leave(self, name: str) -> None:
        """Forget a group."""
        if self._groups.pop(name, None) is None:
            raise BadRequest(f"no group {name!r}")

    def receive(
        self, group: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, bucket: bool
    ) -> list[tuple[str, Tensor]]:
        """Named tensors from rank 0: one broadcast each, or one flat uint8 broadcast with ``bucket``."""
        if group not in self._groups:
            raise BadRequest(f"no group {group!r}; call /init_weights_update_group first")
        if not len(names) == len(dtypes) == len(shapes):
            raise BadRequest(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not fit together")
        empty = [torch.empty(tuple(shape), dtype=_dtype(dtype)) for dtype, shape in zip(dtypes, shapes, strict=True)]
        try:
            if not bucket:
                for tensor in empty:
                    self._broadcast(group, tensor)
                return list(zip(names, empty, strict=True))
            flat = torch.empty(sum(tensor.nbytes for tensor in empty), dtype=torch.uint8)
            self._broadcast(group, flat)
        except RuntimeError as error:
            raise BadRequest(f"receiving over group {group!r} failed: {error}; no weights were changed") from error
        return list(zip(names, _unpack(flat, empty), strict=True))

    def _broadcast(self, group: str, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._groups[group].broadcast([tensor], options).wait()


def _unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [tensor.nbytes for tensor in like])
    return [piece.clone().view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise BadRequest(f"unknown dtype {name!r}")
    return dtype
