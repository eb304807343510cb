"""What a refit sends: one whole set of weights, as the calls that load it into an engine.

A payload belongs to one version and may be sent to any number of engines, one after the other or side by side.
Owns no order of calls around the load; ``session`` does. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["DiskPayload", "PauseMode", "Payload", "RefitTarget", "TensorPayload", "Weights"]

PauseMode = Literal["retract", "in_place", "abort"]


class RefitTarget(Protocol):
    """The part of ``router.engines.EngineClient`` that a refit uses."""

    url: str

    async def ready(self) -> bool | None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def flush_cache(self) -> None: ...
    async def begin_weight_update(self) -> None: ...
    async def update_weights_from_tensor(self, payload: bytes) -> None: ...
    async def update_weights_from_disk(self, path: str) -> None: ...
    async def end_weight_update(self) -> None: ...
    async def set_weight_version(self, version: int) -> None: ...
    async def release_memory(self, tags: Sequence[str]) -> None: ...
    async def resume_memory(self, tags: Sequence[str]) -> None: ...
    async def abort_all(self) -> None: ...


class Payload(Protocol):
    """Weights of one version on their way."""

    @property
    def wire_bytes(self) -> int:
        """Bytes sent to each engine, before base64."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors themselves."""
        ...

    @property
    def session(self) -> bool:
        """Whether it is loaded between ``begin_weight_update`` and ``end_weight_update``."""
        ...

    def parts(self, engine: RefitTarget) -> Iterator[Awaitable[None]]:
        """Calls that load it, each to be awaited before the next is asked for, so that each can be bounded."""
        ...


@dataclass(frozen=True, slots=True)
class TensorPayload:
    """Flattened buckets: the bytes themselves, or handles of them on a device that the engine shares."""

    buckets: Sequence[bytes]
    """Pickles for ``update_weights_from_tensor``."""
    weight_bytes: int
    session: bool = True

    @property
    def wire_bytes(self) -> int:
        """See ``Payload``."""
        return sum(map(len, self.buckets))

    def parts(self, engine: RefitTarget) -> Iterator[Awaitable[None]]:
        """See ``Payload``."""
        for bucket in self.buckets:
            yield engine.update_weights_from_tensor(bucket)


@dataclass(frozen=True, slots=True)
class DiskPayload:
    """A model directory that the engine can read."""

    path: str
    weight_bytes: int
    session: bool = False

    @property
    def wire_bytes(self) -> int:
        """See ``Payload``: only the path travels."""
        return len(self.path.encode())

    def parts(self, engine: RefitTarget) -> Iterator[Awaitable[None]]:
        """See ``Payload``."""
        yield engine.update_weights_from_disk(self.path)


class Weights(Protocol):
    """Where the trainer's current weights come from."""

    async def payload(self, version: int) -> Payload:
        """The weights as they are now, named ``version``. What an earlier payload refers to may be gone afterwards."""
        ...
