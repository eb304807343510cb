"""Records made by hand, a tiny model, and an engine and episode source that live in this process."""

from __future__ import annotations

import asyncio
import io
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tollway.errors import EngineRefused
from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group, Rollout, Sampling, TokenSpan, Trajectory
from tollway.trainer.backends.base import WeightBuckets
from tollway.trainer.batch import Batch, Row
from tollway.trainer.weights.payload import Payload, TensorPayload

TINY: dict[str, object] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
EXPERTS = {"tie_word_embeddings": False, "num_experts": 4, "moe_intermediate_size": 16}


def model_dir(folder: Path, *, moe: bool = False, seed: int = 0, **changes: object) -> Path:
    """A directory with a tiny random model."""
    shape = ModelShape.model_validate(TINY | (EXPERTS if moe else {}) | changes)
    write_fresh_model(folder, shape, seed=seed)
    return folder


def trajectory(
    mask: Sequence[int],
    *,
    ids: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    versions: int | Sequence[int] = 0,
    session_id: str = "s",
    temperature: float = 1.0,
    reward: float | None = None,
    trainable: bool = True,
) -> Trajectory:
    """One row; arrays outside the mask are NaN and -1."""
    on = np.asarray(mask) == 1
    size = on.size
    known = np.full(size, -1.0) if logprobs is None else np.asarray(logprobs, dtype=float)
    return Trajectory(
        token_ids=np.arange(1, size + 1, dtype=np.int32) % 24 if ids is None else np.asarray(ids, dtype=np.int32),
        loss_mask=on.astype(np.uint8),
        logprobs=np.where(on, known, np.nan).astype(np.float32),
        weight_version=np.where(on, np.asarray(versions), -1).astype(np.int32),
        session_id=session_id,
        leaf=0,
        branch_reason="root",
        turn_spans=(TokenSpan(int(on.argmax()), size),),
        finish_reasons=("stop",),
        sampling=Sampling(temperature=temperature),
        engine_ids=("e#0",),
        cached_tokens=(0,),
        reward=reward,
        trainable=trainable,
    )


def rollout(reward: float | None, *rows: Trajectory, session_id: str = "s", error: str | None = None) -> Rollout:
    """One attempt; a single short row by default."""
    return Rollout(session_id=session_id, rows=rows or (trajectory([0, 1, 1]),), reward=reward, error=error, turns=1)


def group(*rollouts: Rollout, group_id: str = "g") -> Group:
    """All attempts at one prompt."""
    return Group(group_id=group_id, task_id="t", rollouts=rollouts)


def random_batch(rows: int, *, seed: int = 0, vocab: int = 24, lengths: tuple[int, int] = (3, 30)) -> Batch:
    """Rows with random ids, masks, advantages and temperatures; token-mean weights."""
    draw = np.random.default_rng(seed)
    parts = []
    for _ in range(rows):
        size = int(draw.integers(*lengths))
        mask = (draw.random(size) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        parts.append((draw.integers(0, vocab, size).astype(np.int32), mask))
    total = sum(int(mask.sum()) for _, mask in parts)
    return Batch(
        rows=tuple(
            Row(
                token_ids=ids,
                loss_mask=mask,
                weights=mask / total,
                advantages=mask * float(draw.standard_normal()),
                old_logprobs=np.where(mask == 1, -np.log(vocab) + 0.3 * draw.standard_normal(ids.size), np.nan).astype(
                    np.float32
                ),
                temperature=float(draw.choice([0.7, 1.0, 1.3])),
            )
            for ids, mask in parts
        )
    )


class Restricted(pickle.Unpickler):
    """An exact allow-list, as a server has."""

    class FlattenedTensorMetadata(types.SimpleNamespace):
        """Takes the attributes of the wire's class."""

    def find_class(self, module: str, name: str) -> object:
        """Resolve allowed names only."""
        import torch

        allowed = {
            ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): self.FlattenedTensorMetadata,
            ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
            ("torch.storage", "_load_from_bytes"): torch.storage._load_from_bytes,
            ("collections", "OrderedDict"): dict,
            ("torch", "Size"): torch.Size,
            **{("torch", name): getattr(torch, name) for name in ("float32", "bfloat16", "float16", "uint8", "int64")},
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return allowed[module, name]


def open_bucket(payload: bytes) -> dict[str, object]:
    """Rebuild a bucket as the receiver does: views into the flat bytes."""
    bucket = Restricted(io.BytesIO(payload)).load()
    flat = bucket["flattened_tensor"]
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in bucket["metadata"]}


@dataclass
class RecordingEngine:
    """A refit target that writes down what it is told, refuses on demand, and holds the weights it got."""

    url: str = "http://engine"
    fail_at: str | None = None
    """Stage that refuses, once per push, until it is set to None."""
    stall_at: str | None = None
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    in_session: bool = False
    version: int = -1
    weights: dict[str, object] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)

    async def _stage(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.stall_at == name:
            await asyncio.sleep(3600)
        if self.fail_at == name:
            raise EngineRefused(f"{name} refused", upstream_status=400)

    async def ready(self) -> bool:
        """Any answer shows that it lives."""
        return not self.paused

    async def pause(self, mode: str) -> None:
        """Stop generating."""
        await self._stage(f"pause:{mode}")
        self.paused = True

    async def resume(self) -> None:
        """Go on."""
        await self._stage("resume")
        if self.released:
            raise AssertionError(f"an engine without {self.released} was let go on")
        self.paused = False

    async def flush_cache(self) -> None:
        """Drop the cache."""
        await self._stage("flush")

    async def begin_weight_update(self) -> None:
        """Open a session; a second one is refused."""
        await self._stage("begin")
        if self.in_session:
            raise EngineRefused("a session is open", upstream_status=400)
        self.in_session = True

    async def update_weights_from_tensor(self, payload: bytes) -> None:
        """Take one bucket."""
        await self._stage("bucket")
        if not self.in_session:
            raise EngineRefused("no session", upstream_status=400)
        self._check_memory()
        self.weights |= open_bucket(payload)

    async def update_weights_from_disk(self, path: str) -> None:
        """Take a whole directory."""
        from safetensors.torch import load_file

        await self._stage("disk")
        self._check_memory()
        self.weights = load_file(Path(path) / "model.safetensors")

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Forget what lies there; twice is an error, as is a running engine."""
        await self._stage(f"release:{','.join(tags)}")
        if not self.paused or self.released & set(tags):
            raise AssertionError(f"released {tags} of an engine with {self.released} away, paused {self.paused}")
        self.released |= set(tags)
        if "weights" in tags:
            self.weights, self.version = {}, -1

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Memory again, without content; what was not released ends a stock server."""
        await self._stage(f"resume:{','.join(tags)}")
        if not set(tags) <= self.released:
            raise AssertionError(f"resumed {tags} of an engine with {self.released} away")
        self.released -= set(tags)

    def _check_memory(self) -> None:
        if "weights" in self.released:
            raise EngineRefused("no memory for weights", upstream_status=400)

    async def end_weight_update(self) -> None:
        """Close the session."""
        await self._stage("end")
        if not self.in_session:
            raise EngineRefused("no session", upstream_status=400)
        self.in_session = False

    async def set_weight_version(self, version: int) -> None:
        """Stamp."""
        await self._stage("version")
        self.version = version

    async def abort_all(self) -> None:
        """End all requests."""
        await self._stage("abort_all")


@dataclass
class FixedWeights:
    """The same buckets at every push, and how often they were asked for."""

    buckets: Sequence[bytes]
    asked: list[int] = field(default_factory=list)

    async def payload(self, version: int) -> Payload:
        """See the port."""
        self.asked.append(version)
        return TensorPayload(self.buckets, 20)


class PolicySource(EpisodeSource):
    """Episodes sampled from the weights that an in-process engine holds: a real, tiny policy.

    The prompt is two tokens; eight are sampled; the reward is what ``score`` says of them.
    """

    def __init__(self, engine: RecordingEngine, shape: object, score: Callable[[np.ndarray], float]) -> None:
        self.engine, self.shape, self.score = engine, shape, score
        self.requests: list[GroupRequest] = []
        self.delay_turns = 0
        """Event-loop turns that a group waits in the middle, so that refits fall into it."""

    async def run_group(self, request: GroupRequest) -> Group:
        """Sample all attempts of the group together."""
        import torch

        from tollway.trainer.backends.torch_backend import decode

        self.requests.append(request)
        draw = torch.Generator().manual_seed(request.prompt_index)
        ids = torch.tensor([[1, 2 + request.prompt_index % 3]] * request.samples)
        logprobs, versions = [], []
        for token in range(8):
            if token == 4:
                for _ in range(self.delay_turns):
                    await asyncio.sleep(0)
            with torch.no_grad():
                logits = decode(self.engine.weights, self.shape, ids)[:, -1]  # type: ignore[arg-type]
            scores = (logits / request.sampling.temperature).log_softmax(-1)
            chosen = torch.multinomial(scores.exp(), 1, generator=draw)
            logprobs.append(scores.gather(1, chosen)[:, 0])
            versions.append(self.engine.version)
            ids = torch.cat([ids, chosen], dim=1)
        rows = ids.numpy().astype(np.int32)
        known = torch.stack(logprobs, 1).numpy()
        return Group(
            group_id=request.group_id,
            task_id=f"task-{request.prompt_index}",
            rollouts=tuple(
                rollout(
                    self.score(row[2:]),
                    trajectory(
                        [0, 0] + [1] * 8,
                        ids=row,
                        logprobs=[0.0, 0.0, *known[at]],
                        versions=[-1, -1, *versions],
                        temperature=request.sampling.temperature,
                    ),
                    session_id=f"{request.group_id}-{at}",
                )
                for at, row in enumerate(rows)
            ),
        )


class InProcessBackend:
    """The torch backend behind the controller's calls, without a process."""

    def __init__(self, spec: object) -> None:
        from tollway.trainer.backends import factory

        self.backend = factory.build(spec)  # type: ignore[arg-type]
        self.model_dir = Path(spec.model_dir)  # type: ignore[attr-defined]
        self.steps = 0

    async def score(self, batch: Batch) -> object:
        """See the port."""
        return self.backend.score(batch)

    async def step(self, batch: Batch, *, lr: float) -> object:
        """See the port; gives the event loop turns, as a process would."""
        self.steps += 1
        for _ in range(20):
            await asyncio.sleep(0)
        return self.backend.step(batch, lr=lr)

    async def reset_optimizer(self, settings: object) -> None:
        """See the port."""
        self.backend.reset_optimizer(settings)  # type: ignore[arg-type]

    async def weight_buckets(self, max_bytes: int, transport: str) -> WeightBuckets:
        """See the port."""
        from tollway.trainer.weights import wire

        if transport != "tensor":
            raise AssertionError(f"{transport} in one process")
        named = list(self.backend.named_weights())
        sent = tuple(wire.serialise(b) for b in wire.buckets(named, max_bytes))
        return WeightBuckets(sent, sum(tensor.nbytes for _, tensor in named))

    async def export(self, target: Path) -> None:
        """See the port."""
        from tollway.trainer.weights import disk

        disk.export(self.backend.named_weights(), self.model_dir, target)

    async def device_memory(self) -> tuple[int, int] | None:
        """See the port."""
        return None

    async def offload(self) -> None:
        """See the port."""
        self.backend.offload()

    async def onload(self) -> None:
        """See the port."""
        self.backend.onload()

    async def save(self, directory: Path) -> None:
        """See the port."""
        self.backend.save(directory)

    async def load(self, directory: Path) -> None:
        """See the port."""
        self.backend.load(directory)
