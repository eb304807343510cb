"""Training process, refit and embedded engine over real HTTP: the same weights on both sides, always."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.records import Sampling
from tollway.router.engines import EngineClient, GenerateCall, GenerateReply
from tollway.router.wire import Prompt
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.batch import Batch, Row
from tollway.trainer.weights.refit import PauseMode, Refit

LIMIT = 2e-5
"""Nats; fp32 rounding of two implementations is about 1e-6."""


def model_directory(folder: Path, *, moe: bool) -> Path:
    experts: dict[str, object] = {"num_experts": 4, "moe_intermediate_size": 24} if moe else {}
    shape = ModelShape.model_validate(
        {
            "vocab_size": 64,
            "hidden_size": 48,
            "head_dim": 16,
            "intermediate_size": 64,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": not moe,
            **experts,
        }
    )
    write_fresh_model(folder, shape, seed=3, std=0.15)
    return folder


@asynccontextmanager
async def serving(model: Path) -> AsyncIterator[EngineClient]:
    command = [sys.executable, "-m", "tollway.engine", "--model-path", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = await asyncio.to_thread(process.stdout.readline)  # type: ignore[union-attr]  # piped
            async with aiohttp.ClientSession() as http:
                client = EngineClient(json.loads(line)["url"], http)
                yield client
                await client.aclose()
        finally:
            process.terminate()


def calls(count: int, *, tokens: int, seed: int) -> list[GenerateCall]:
    draw = np.random.default_rng(seed)
    sampling = Sampling(temperature=0.8, max_new_tokens=tokens)
    return [
        GenerateCall(
            rid=f"{seed}-{index}",
            prompt=Prompt.of(draw.integers(0, 64, 12 + index).astype(np.int32)),
            sampling=sampling,
            routing_key=f"{index}",
            stream=tokens > 100,
            ignore_eos=True,
        )
        for index in range(count)
    ]


async def stream(engine: EngineClient, call: GenerateCall, begun: asyncio.Event) -> GenerateReply:
    async for part in engine.stream(call):
        begun.set()
        if isinstance(part, GenerateReply):
            return part
    raise AssertionError("the stream ended without a reply")


def rows_at(version: int, sent: list[GenerateCall], replies: list[GenerateReply]) -> Batch:
    """Every reply as a row whose mask is on tokens of ``version``."""
    rows = []
    for call, reply in zip(sent, replies, strict=True):
        mask = np.zeros(reply.output_ids.size, dtype=np.uint8)
        for span in reply.versions:
            mask[span.start : span.end] = span.version == version
        prompt = call.prompt.size
        mask = np.concatenate([np.zeros(prompt, np.uint8), mask])
        known = np.concatenate([np.zeros(prompt, np.float32), reply.logprobs])
        rows.append(
            Row(
                token_ids=np.concatenate([call.prompt.ids(), reply.output_ids]).astype(np.int32),
                loss_mask=mask,
                weights=mask / max(1, int(mask.sum())),
                advantages=mask * 1.0,
                old_logprobs=np.where(mask == 1, known, np.nan).astype(np.float32),
                temperature=0.8,
            )
        )
    return Batch(rows=tuple(rows))


async def gap(backend: BackendProxy, batch: Batch) -> float:
    scores = await backend.score(batch)
    pairs = zip(batch.rows, scores, strict=True)
    return max(float(np.abs(s - r.old_logprobs)[r.loss_mask == 1].max(initial=0.0)) for r, s in pairs)


@pytest.mark.parametrize(("moe", "mode"), [(False, "retract"), (True, "retract")])
async def test_engine_and_trainer_agree_on_every_token_across_a_refit_in_mid_flight(
    tmp_path: Path, moe: bool, mode: PauseMode
) -> None:
    base = model_directory(tmp_path / "base", moe=moe)
    spec = BackendSpec(kind="megatron", model_dir=str(base))
    async with BackendProxy(spec, log_path=tmp_path / "trainer.log") as backend:
        await backend.export(tmp_path / "model")
        async with serving(tmp_path / "model") as engine:
            refit = Refit([engine], mode=mode)
            await refit.push(await backend.weight_buckets(20_000), 4)
            sent = calls(6, tokens=40, seed=1)
            before = rows_at(4, sent, list(await asyncio.gather(*map(engine.generate, sent))))
            assert before.trained_tokens == 6 * 40
            assert await gap(backend, before) < LIMIT

            long = calls(4, tokens=700, seed=2)
            begun = [asyncio.Event() for _ in long]
            running = [asyncio.create_task(stream(engine, *each)) for each in zip(long, begun, strict=True)]
            await asyncio.gather(*(event.wait() for event in begun))
            await backend.step(before, lr=1e-2)
            await refit.push(await backend.weight_buckets(20_000), 5)
            replies = list(await asyncio.gather(*running))
            assert all(reply.output_ids.size == 700 for reply in replies)
            after = rows_at(5, long, replies)
            assert 0 < after.trained_tokens < 4 * 700
            assert await gap(backend, after) < LIMIT
            old = rows_at(4, long, replies)
            assert old.trained_tokens + after.trained_tokens == 4 * 700
            assert await gap(backend, old) > 100 * LIMIT
