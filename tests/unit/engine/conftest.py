"""Small random models, an in-process driver, and a real engine process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_process import Process, start_engine, stop_engine

from tollway.engine.generation import Generation
from tollway.engine.params import SamplingParams
from tollway.engine.request import Progress, Request, Result
from tollway.engine.sampler import mix_seed
from tollway.engine.spec import read_config
from tollway.engine.text import ByteCodec, StopWatch
from tollway.engine.weights import load_decoder, save_decoder
from tollway.fresh_model import ModelShape, write_fresh_model

DENSE = ModelShape(vocab_size=272, hidden_size=48, head_dim=16, intermediate_size=64, max_position_embeddings=256)
UNTIED = DENSE.model_copy(update={"tie_word_embeddings": False})
MOE = UNTIED.model_copy(update={"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24})


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    kinds = {
        "dense": (DENSE, 1),
        "other": (DENSE, 2),
        "untied": (UNTIED, 3),
        "moe": (MOE, 4),
        "other_moe": (MOE, 77),
    }
    for name, (shape, seed) in kinds.items():
        write_fresh_model(root / name, shape, seed=seed, std=0.15)
        decoder = load_decoder(root / name)
        noise = torch.Generator().manual_seed(seed)
        for tensor in decoder.named_tensors().values():
            if tensor.dim() == 1:  # norm weights of 1 would hide a norm that is left out
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=noise))
        save_decoder(decoder, root / name, read_config(root / name))
    return {name: root / name for name in kinds}


@dataclass
class Ticket:
    """What a caller of the engine would have seen of one request."""

    request: Request
    progress: list[Progress] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def result(self) -> Result:
        assert len(self.results) == 1, f"{len(self.results)} results"
        return self.results[0]

    @property
    def ids(self) -> list[int]:
        return self.result.ids.tolist()


class Driver:
    """Runs a Generation on the test's own thread."""

    def __init__(self, path: Path, **options: object) -> None:
        settings: dict[str, object] = {"max_running": 8, "max_tokens": 4096, "prefix_cache": True, "version": "1"}
        self.generation = Generation(load_decoder(path), **{**settings, **options})
        self._names = iter(range(10**6))

    def submit(self, prompt: Sequence[int], new: int = 8, *, seed: int | None = None, **options: object) -> Ticket:
        name = next(self._names)
        own = {key: options.pop(key) for key in list(options) if key in SamplingParams.model_fields}
        params = SamplingParams(max_new_tokens=new, sampling_seed=seed, **own)
        watch = StopWatch(ByteCodec(), params.stops, skip_special=True) if params.stops else None
        request = Request(
            rid=f"r{name}",
            prompt=np.array(prompt, np.int32),
            params=params,
            limit=new,
            seed=mix_seed(name if seed is None else seed, 0),
            stop_ids=tuple(params.stop_token_ids or ()),
            watch=watch,
            **{"return_logprob": True, **options},
        )
        ticket = Ticket(request)
        request.on_result = ticket.results.append
        request.on_progress = ticket.progress.append
        self.generation.submit(request)
        return ticket

    def steps(self, count: int) -> None:
        with torch.inference_mode():
            for _ in range(count):
                assert self.generation.step()
        self.deliver()

    def run(self) -> None:
        with torch.inference_mode():
            while self.generation.step():
                pass
        self.deliver()

    def do(self, command: Callable[[Generation], object]) -> object:
        with torch.inference_mode():
            out = command(self.generation)
        self.deliver()
        return out

    def deliver(self) -> None:
        for callback, value in self.generation.outbox:
            callback(value)
        self.generation.outbox.clear()


@pytest.fixture
def driver(models: dict[str, Path]) -> Callable[..., Driver]:
    return lambda kind="dense", **options: Driver(models[kind], **options)


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Iterator[Process]:
    started = start_engine(models["dense"])
    yield started
    stop_engine(started)
