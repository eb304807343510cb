"""Training process, refit and embedded engine over real HTTP: the same weights on both sides, always."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
import torch
from served_engine import serving
from sglang_cpu.fixture import DENSE

from tollway.errors import ComponentLost, TrainerLost
from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.records import Sampling
from tollway.router.engines import EngineClient, GenerateCall, GenerateReply
from tollway.router.wire import Prompt
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.batch import Batch, Row
from tollway.trainer.weights.payload import Payload, TensorPayload
from tollway.trainer.weights.refit import Notify, PauseMode, Refit, RefitNotice, Sharing
from tollway.trainer.weights.transport import DiskWeights, TensorWeights
from tollway.trainer.weights.turns import Turns
from tollway.trainer.weights.wire import serialise

LIMIT = 2e-5
"""Nats; fp32 rounding of two implementations is about 1e-6."""
SGLANG_LIMIT = 1e-4
"""The same against the released SGLang in fp32 on the CPU."""
TAGS = ("kv_cache", "weights")


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


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("moe", "mode"), [(False, "retract"), (True, "retract")])
async def test_engine_and_trainer_agree_on_every_token_across_a_refit_in_mid_flight(
    tmp_path: Path, moe: bool, mode: PauseMode
) -> None:
    base = model_directory(tmp_path / "base", moe=moe)
    spec = BackendSpec(kind="megatron", model_dir=str(base))
    async with BackendProxy(spec, log_path=tmp_path / "trainer.log") as backend:
        await backend.export(tmp_path / "model")
        async with serving(tmp_path / "model") as engine:
            weights = TensorWeights(backend, bucket_bytes=20_000, transport="tensor")
            refit = Refit([engine], weights, mode=mode)
            await refit.push(4)
            sent = calls(6, tokens=40, seed=1)
            before = rows_at(4, sent, list(await asyncio.gather(*map(engine.generate, sent))))
            assert before.trained_tokens == 6 * 40
            assert await gap(backend, before) < LIMIT

            long = calls(4, tokens=700, seed=2)
            begun = [asyncio.Event() for _ in long]
            running = [asyncio.create_task(stream(engine, *each)) for each in zip(long, begun, strict=True)]
            await asyncio.gather(*(event.wait() for event in begun))
            await backend.step(before, lr=1e-2)
            await refit.push(5)
            replies = list(await asyncio.gather(*running))
            assert all(reply.output_ids.size == 700 for reply in replies)
            after = rows_at(5, long, replies)
            assert 0 < after.trained_tokens < 4 * 700
            assert await gap(backend, after) < LIMIT
            old = rows_at(4, long, replies)
            assert old.trained_tokens + after.trained_tokens == 4 * 700
            assert await gap(backend, old) > 100 * LIMIT


def made_up(rows: int) -> Batch:
    """Something to train on."""
    draw = np.random.default_rng(7)
    mask = np.repeat([0, 1], [4, 20]).astype(np.uint8)
    return Batch(
        rows=tuple(
            Row(
                token_ids=draw.integers(0, 64, 24).astype(np.int32),
                loss_mask=mask,
                weights=mask / (20 * rows),
                advantages=mask * float(draw.standard_normal()),
                old_logprobs=np.where(mask == 1, -4.0, np.nan).astype(np.float32),
            )
            for _ in range(rows)
        )
    )


def together(
    backend: BackendProxy, *engines: EngineClient, tags: Sequence[str] = TAGS, notify: Notify | None = None
) -> Turns:
    weights = TensorWeights(backend, bucket_bytes=20_000, transport="tensor")
    return Turns(Refit(engines, weights, sharing=Sharing(backend, tags), notify=notify), backend, shared=True)


async def state_of(engine: EngineClient) -> dict[str, Any]:
    states = cast("list[dict[str, Any]]", (await engine.server_info()).raw["internal_states"])
    return states[0]


@pytest.mark.timeout(180)
async def test_an_engine_sleeps_and_wakes_with_new_weights_under_calls_that_wait(tmp_path: Path) -> None:
    base = model_directory(tmp_path / "base", moe=False)
    spec = BackendSpec(kind="torch", model_dir=str(base))
    async with BackendProxy(spec, log_path=tmp_path / "trainer.log") as backend, serving(base) as engine:
        turns = together(backend, engine)
        await turns.engines(4)
        long = calls(4, tokens=700, seed=2)
        begun = [asyncio.Event() for _ in long]
        running = [asyncio.create_task(stream(engine, *each)) for each in zip(long, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        await turns.trainer()
        state = await state_of(engine)
        assert (state["paused"], state["released_tags"]) == (True, sorted(TAGS))
        assert state["memory_usage_bytes"] == {"kv_cache": 0, "weights": 0}
        await backend.step(made_up(6), lr=1e-2)
        done = await turns.engines(5)
        assert done.asleep_s is not None
        assert done.freed_bytes is None, "there is no device whose driver could be asked"
        replies = list(await asyncio.gather(*running))
        assert all(reply.output_ids.size == 700 for reply in replies)
        after, old = rows_at(5, long, replies), rows_at(4, long, replies)
        assert 0 < after.trained_tokens < 4 * 700
        assert old.trained_tokens + after.trained_tokens == 4 * 700
        await turns.trainer()
        assert await gap(backend, after) < LIMIT
        assert await gap(backend, old) > 100 * LIMIT
        assert (await state_of(engine))["paused"]


class Misled(EngineClient):
    """Asks a real engine for what it refuses, on demand."""

    refused_tag = ""

    async def resume_memory(self, tags: Sequence[str]) -> None:
        nonsense = [self.refused_tag] if self.refused_tag in tags else []
        await super().resume_memory([*tags, *(f"no {tag}" for tag in nonsense)])


class Spoilt:
    """Real weights, or a last bucket that no engine takes."""

    def __init__(self, backend: BackendProxy) -> None:
        self._good = TensorWeights(backend, bucket_bytes=20_000, transport="tensor")
        self.spoil = False

    async def payload(self, version: int) -> Payload:
        good = await self._good.payload(version)
        assert isinstance(good, TensorPayload)
        if not self.spoil:
            return good
        return TensorPayload([*good.buckets, serialise([("model.norm.weight", torch.ones(3))])], good.weight_bytes)


async def version_of(engine: EngineClient) -> list[int]:
    """Versions of a reply that the engine gives now."""
    return [span.version for span in (await engine.generate(calls(1, tokens=4, seed=5)[0])).versions]


@pytest.mark.timeout(180)
async def test_an_engine_that_refuses_serves_whole_weights_or_nothing_and_takes_the_next(tmp_path: Path) -> None:
    base = model_directory(tmp_path / "base", moe=False)
    spec = BackendSpec(kind="torch", model_dir=str(base))
    heard: list[RefitNotice] = []
    deaf = False

    async def notify(notice: RefitNotice) -> None:
        if deaf:
            raise ComponentLost("the session server is gone")
        heard.append(notice)

    async with BackendProxy(spec, log_path=tmp_path / "trainer.log") as backend, serving(base, Misled) as engine:
        assert isinstance(engine, Misled)
        weights = Spoilt(backend)

        def turns(*tags: str) -> Turns:
            refit = Refit([engine], weights, sharing=Sharing(backend, tags or TAGS), notify=notify)
            return Turns(refit, backend, shared=True)

        own = turns()
        await own.engines(1)

        with pytest.raises(ComponentLost, match=r"did not give its memory back.*unknown memory tag 'heap'"):
            await turns("kv_cache", "heap").trainer()
        assert (await state_of(engine))["released_tags"] == []
        assert await version_of(engine) == [1]

        deaf = True
        with pytest.raises(ComponentLost, match="session server is gone"):
            await turns().trainer()
        deaf = False
        assert await version_of(engine) == [1]

        await own.trainer()
        weights.spoil = True
        with pytest.raises(ComponentLost, match=r"no engine took weights 2.*has shape"):
            await own.engines(2)
        state = await state_of(engine)
        assert (state["paused"], state["released_tags"], state["weight_update_session"]) == (True, ["kv_cache"], True)
        assert (heard[-1].phase, heard[-1].version) == ("failed", None)
        weights.spoil = False
        await own.engines(3)
        assert await version_of(engine) == [3]

        await own.trainer()
        engine.refused_tag = "weights"
        with pytest.raises(ComponentLost, match=r"no engine took weights 4.*unknown memory tag"):
            await own.engines(4)
        assert (await state_of(engine))["released_tags"] == sorted(TAGS)
        engine.refused_tag = "kv_cache"
        with pytest.raises(ComponentLost, match=r"no engine woke.*unknown memory tag"):
            await own.engines(4)
        state = await state_of(engine)
        assert (state["paused"], state["released_tags"], heard[-1].phase) == (True, ["kv_cache"], "failed")
        engine.refused_tag = ""
        await own.trainer()
        await own.engines(5)
        assert await version_of(engine) == [5]
        assert (heard[-1].phase, heard[-1].version) == ("resumed", 5)


@pytest.mark.timeout(180)
async def test_who_dies_while_engines_sleep_is_noticed_and_no_engine_serves_without_weights(tmp_path: Path) -> None:
    base = model_directory(tmp_path / "base", moe=False)
    spec = BackendSpec(kind="torch", model_dir=str(base))
    async with (
        BackendProxy(spec, log_path=tmp_path / "trainer.log") as backend,
        serving(base) as engine,
        aiohttp.ClientSession() as http,
    ):
        async with serving(base) as other:
            mortal = EngineClient(other.url, http)
            turns = together(backend, engine, mortal)
            await turns.engines(1)
            await turns.trainer()
        # The end of the block was that engine's end.
        done = await turns.engines(2)
        assert done.pushed.quarantined == (mortal.url,)
        assert await version_of(engine) == [2]

        await turns.trainer()
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(TrainerLost):
            await turns.engines(3)
        state = await state_of(engine)
        assert (state["paused"], state["released_tags"]) == (True, sorted(TAGS))


@pytest.mark.timeout(180)
async def test_weights_from_a_directory_arrive_whole_or_the_engine_is_quarantined(tmp_path: Path) -> None:
    base = model_directory(tmp_path / "base", moe=False)
    spec = BackendSpec(kind="torch", model_dir=str(base))
    heard: list[RefitNotice] = []

    async def notify(notice: RefitNotice) -> None:
        heard.append(notice)

    async with BackendProxy(spec, log_path=tmp_path / "trainer.log") as backend, serving(base) as engine:
        weights = DiskWeights(backend, tmp_path / "weights")
        refit = Refit([engine], weights, notify=notify)
        for version in (1, 2, 3):
            report = await refit.push(version)
            assert report.wire_bytes < 300 < report.weight_bytes
            sent = calls(3, tokens=20, seed=version)
            batch = rows_at(version, sent, list(await asyncio.gather(*map(engine.generate, sent))))
            assert batch.trained_tokens == 60
            assert await gap(backend, batch) < LIMIT
            await backend.step(made_up(4), lr=1e-2)
        kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
        assert kept == ["version_000002", "version_000003"]
        await refit.catch_up([engine])
        assert (await engine.model_info()).model_path.endswith("version_000003")

        class Cut(DiskWeights):
            async def payload(self, version: int) -> Payload:
                made = await super().payload(version)
                file = tmp_path / "weights" / f"version_{version:06d}" / "model.safetensors"
                file.write_bytes(file.read_bytes()[:-100])
                return made

        with pytest.raises(ComponentLost, match=r"no engine took weights 4.*cannot read the weights"):
            await Refit([engine], Cut(backend, tmp_path / "weights"), notify=notify).push(4)
        assert (heard[-1].phase, (await state_of(engine))["paused"]) == ("failed", True)
        await refit.push(5)
        assert await version_of(engine) == [5]


@pytest.mark.all
async def test_the_released_sglang_gets_the_trainers_weights_by_every_way_and_sleeps(
    tmp_path: Path, real_sglang_url: str
) -> None:
    base = tmp_path / "base"
    write_fresh_model(base, DENSE, seed=5, std=0.1)
    spec = BackendSpec(kind="torch", model_dir=str(base), dtype="float32")
    async with BackendProxy(spec, log_path=tmp_path / "trainer.log") as backend, aiohttp.ClientSession() as http:
        engine = EngineClient(real_sglang_url, http)
        own = (await engine.model_info()).model_path
        tensors = TensorWeights(backend, bucket_bytes=100_000, transport="tensor")
        try:
            for version, (weights, shared) in enumerate(
                [(tensors, False), (DiskWeights(backend, tmp_path / "weights"), False), (tensors, True)] * 2, 3
            ):
                sharing = Sharing(backend, (*TAGS, "cuda_graph")) if shared else None
                turns = Turns(Refit([engine], weights, sharing=sharing), backend, shared=shared)
                await turns.trainer()
                await backend.step(made_up(4), lr=1e-2)
                assert (await turns.engines(version)).pushed.quarantined == ()
                sent = calls(3, tokens=12, seed=version)
                batch = rows_at(version, sent, list(await asyncio.gather(*map(engine.generate, sent))))
                assert batch.trained_tokens == 36
                await backend.onload()
                assert await gap(backend, batch) < SGLANG_LIMIT, (type(weights).__name__, shared)
        finally:
            # The server is everybody's: it gets back what it came with.
            await engine.update_weights_from_disk(own, 0)
            await engine.aclose()
