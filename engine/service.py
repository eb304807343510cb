"""The engine as the HTTP side sees it: one object with the scheduler, the intake and the control operations.

Lives on the event loop; everything that touches the model goes through ``Scheduler.call``. Depends on
``scheduler`` and the modules of the single operations.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from tollway.engine.broadcast import BroadcastGroups
from tollway.engine.config import EngineConfig
from tollway.engine.generation import Generation, PauseMode
from tollway.engine.memory import Memory
from tollway.engine.protocol import Intake
from tollway.engine.request import Request, Result
from tollway.engine.scheduler import Scheduler
from tollway.engine.spec import read_eos_ids
from tollway.engine.text import TextCodec, open_codec
from tollway.engine.weight_updates import WeightUpdates, decode_payload
from tollway.engine.weights import load_decoder
from tollway.errors import BadRequest, ConfigError

__all__ = ["EngineService"]

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class EngineService:
    """Everything behind the routes."""

    config: EngineConfig
    generation: Generation
    scheduler: Scheduler
    intake: Intake
    codec: TextCodec | None
    updates: WeightUpdates
    memory: Memory
    groups: BroadcastGroups
    started_at: float
    _rids: set[str] = field(default_factory=set)
    """Request ids of calls that have not ended."""

    @classmethod
    def build(cls, config: EngineConfig, loop: asyncio.AbstractEventLoop, on_crash: asyncio.Event) -> EngineService:
        """Load the model of ``config``; raises ``ConfigError`` when that cannot work."""
        if config.model_path is None:
            raise ConfigError("engine.model_path is not set; name one in HF layout (tollway new-model makes one)")
        torch.set_num_threads(config.threads)
        decoder = load_decoder(config.model_path, dtype=config.dtype, context_length=config.context_length)
        generation = Generation(
            decoder,
            max_running=config.max_running_requests,
            max_tokens=config.max_total_tokens,
            prefix_cache=config.prefix_cache,
            version=config.weight_version,
        )
        codec = open_codec(config.model_path, decoder.spec.vocab_size, skip=config.skip_tokenizer_init)
        limit = min(decoder.context_length, config.max_total_tokens - 1)
        return cls(
            config=config,
            generation=generation,
            scheduler=Scheduler(generation, loop, on_crash.set),
            intake=Intake.make(
                decoder.spec,
                codec,
                limit,
                eos_ids=read_eos_ids(config.model_path, decoder.spec),
                seed=config.seed,
            ),
            codec=codec,
            updates=WeightUpdates(config.model_path),
            memory=Memory(),
            groups=BroadcastGroups(),
            started_at=time.time(),
        )

    # -- generation ---------------------------------------------------------------------------------

    async def abort(self, rid: str | None, message: str) -> int:
        """End one request (``None``: all) with what it has; unknown ids end nothing."""
        return await self.scheduler.call(lambda generation: generation.abort(rid, message))

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping; ``abort`` ends all requests, ``retract`` frees their keys and values, ``in_place`` keeps."""

        def run(generation: Generation) -> None:
            if mode == "abort":
                generation.abort(None, "Aborted by pause_generation")
            elif mode == "retract":
                generation.retract()
            generation.paused = True

        await self.scheduler.call(run)

    async def resume(self) -> None:
        """Step again."""
        await self.scheduler.call(lambda generation: setattr(generation, "paused", False))

    async def probe(self, timeout_s: float) -> bool:
        """Generate one token. While paused, released or busy, an answering scheduler is enough."""
        idle = await self.scheduler.call(lambda g: not (g.paused or g.released or g.batch.n or g.waiting))
        if not idle:
            return True
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        (request,) = self.intake.parse(body)[1]
        request.on_result = lambda result: None if done.done() else done.set_result(result)
        self.scheduler.submit(request)
        try:
            result = await asyncio.wait_for(done, timeout_s)
        except TimeoutError:
            await self.abort(request.rid, "health check timed out")
            return False
        return result.finish.status is None

    @contextmanager
    def claimed(self, rids: Sequence[str]) -> Iterator[None]:
        """Hold request ids for one call: two requests under one id could not be aborted apart."""
        taken = next((rid for at, rid in enumerate(rids) if rid in self._rids or rid in rids[:at]), None)
        if taken is not None:
            raise BadRequest(f"Duplicate request ID detected: {taken}", param="rid")
        self._rids.update(rids)
        try:
            yield
        finally:
            self._rids.difference_update(rids)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.submit(request)

    # -- control ------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Empty the prefix cache; refused while requests hold keys and values."""
        if not await self.scheduler.call(lambda generation: generation.flush()):
            raise BadRequest("cache not flushed: requests are running or waiting; pause with retract or abort first")

    async def set_version(self, version: str) -> None:
        """Stamp the weights."""
        await self.scheduler.call(lambda generation: generation.set_version(version))

    async def load_payload(self, payload: bytes, load_format: str | None, *, flush: bool, version: str | None) -> str:
        """Load pickled tensors inside a session."""
        await self.scheduler.call(lambda _: self.updates.require_session("update_weights_from_tensor"))
        tensors = await asyncio.to_thread(decode_payload, payload, load_format)
        return await self.scheduler.call(lambda g: self.updates.load(g, tensors, flush=flush, version=version))

    async def load_broadcast(
        self,
        group: str,
        layout: tuple[list[str], list[str], list[list[int]]],
        *,
        bucket: bool,
        flush: bool,
        version: str | None,
    ) -> str:
        """Receive tensors (names, dtypes, shapes) from rank 0 of a group and load them inside a session."""
        await self.scheduler.call(lambda _: self.updates.require_session("update_weights_from_distributed"))
        tensors = await _detached(partial(self.groups.receive, group, *layout, bucket=bucket))
        return await self.scheduler.call(lambda g: self.updates.load(g, tensors, flush=flush, version=version))

    async def load_disk(self, path: Path, *, flush: bool, version: str | None) -> str:
        """Replace all weights from a directory."""
        return await self.scheduler.call(lambda g: self.updates.load_disk(g, path, flush=flush, version=version))

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory by tag; returns bytes."""
        return await self.scheduler.call(lambda generation: self.memory.release(generation, tags))

    async def take_back(self, tags: Sequence[str]) -> dict[str, int]:
        """Take memory back by tag; returns bytes."""
        return await self.scheduler.call(lambda generation: self.memory.resume(generation, tags))

    async def join_group(self, address: str, *, rank: int, world_size: int, name: str, backend: str) -> None:
        """Join a broadcast group on a worker thread."""
        await _detached(
            partial(self.groups.join, address, rank=rank, world_size=world_size, name=name, backend=backend)
        )

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held by tag."""
        cache = self.generation.cache.nbytes if self.generation.cache is not None else 0
        weights = sum(tensor.untyped_storage().nbytes() for tensor in self.generation.decoder.parameters())
        return {"kv_cache": cache + self.generation.rows.nbytes, "weights": weights}


async def _detached(work: Callable[[], _T]) -> _T:
    """Run something that may wait for another machine. Not ``to_thread``: a process that ends waits for those."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # boundary: the error belongs to the caller
            done.set_exception(error)

    threading.Thread(target=run, name="collective", daemon=True).start()
    return await asyncio.wrap_future(done)
