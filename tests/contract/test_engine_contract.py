"""SGLang's HTTP surface as Tollway uses it: the embedded engine always, the released SGLang with `-m all`.

The released one runs on this machine's CPU (sglang_cpu/). To test a server that runs already, set
TOLLWAY_SGLANG_URL to its URL, and TOLLWAY_SGLANG_MOE_URL to that of one with a mixture of experts (one rank, prefix
cache on, --skip-tokenizer-init, --enable-return-routed-experts; at least 512 ids and a context of 2048).
scripts/gpu_check.py does that on a GPU. Nothing here may assume what only the embedded engine does, nor a shape or a
precision: what must be equal is computed twice from an empty cache, as a hit changes the sums of bf16. Nothing may
send what ends a released server: ids outside the vocabulary, a payload that is no pickle, a release of memory while
requests run.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from safetensors import safe_open

from tollway.fresh_model import ModelShape, write_fresh_model

PROMPT = [40 + (7 * i) % 200 for i in range(60)]
LONG = 1500
"""Tokens of a request that must still be running when something happens to it."""


def model_directory(root: Path, moe: bool) -> Path:
    experts = {"num_experts": 8, "moe_intermediate_size": 32} if moe else {}
    shape = ModelShape(
        vocab_size=512,
        hidden_size=64,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **experts,
    )
    write_fresh_model(root, shape, seed=0, std=0.15)
    return root


REAL = pytest.mark.all


@pytest.fixture(
    scope="module",
    params=[
        "embedded",
        "embedded-moe",
        pytest.param("real_sglang_url", marks=REAL, id="sglang"),
        pytest.param("real_sglang_moe_url", marks=REAL, id="sglang-moe"),
    ],
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param.startswith("real"):
        yield request.getfixturevalue(request.param).rstrip("/")
        return
    model = model_directory(tmp_path_factory.mktemp(request.param), request.param.endswith("moe"))
    command = [sys.executable, "-m", "tollway.engine", "--model-path", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()
        assert process.wait(20) == 0


class Api:
    """Calls as the router and the trainer make them."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http

    async def raw(self, path: str, body: object | None = None) -> tuple[int, str]:
        call = self.http.get(self.url + path) if body is None else self.http.post(self.url + path, json=body)
        async with call as reply:
            return reply.status, await reply.text()

    async def ok(self, path: str, body: object | None = None) -> dict:
        status, text = await self.raw(path, body)
        assert status == 200, text
        return json.loads(text) if text.startswith(("{", "[")) else {}

    async def flush(self) -> None:
        """Empty the cache. A released SGLang may still count a reply as running that it has just sent."""
        for _ in range(50):
            status, text = await self.raw("/flush_cache", {})
            if status == 200:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"the cache is not flushed although nothing runs: {text}")

    async def generate(self, ids=PROMPT, new=8, sampling=None, **body) -> dict:
        sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True, **(sampling or {})}
        return await self.ok(
            "/generate", {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **body}
        )

    @asynccontextmanager
    async def running(self, ids=PROMPT, **body) -> AsyncIterator[asyncio.Task[dict]]:
        """A long request that has produced its first token; the task returns its last event."""
        started = asyncio.Event()

        async def read() -> dict:
            sampling = {"max_new_tokens": LONG, "temperature": 1.0, "ignore_eos": True}
            call = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": True, **body}
            last: dict = {}
            async with self.http.post(f"{self.url}/generate", json=call) as reply:
                assert reply.status == 200, await reply.text()
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        last = json.loads(line[6:])
                        started.set()
            return last

        task = asyncio.create_task(read())
        try:
            waiter = asyncio.create_task(started.wait())
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            if not started.is_set():
                raise AssertionError(f"the engine ended the stream without a token: {await task}")
            yield task
        finally:
            task.cancel()


@pytest.fixture
async def api(url: str) -> AsyncIterator[Api]:
    async with aiohttp.ClientSession(read_bufsize=2**24, timeout=aiohttp.ClientTimeout(60)) as http:
        api = Api(url, http)
        yield api
        await api.raw("/continue_generation", {})
        await api.raw("/abort_request", {"abort_all": True})


def check(out: dict, prompt: int) -> dict:
    """What must hold of every reply; returns its meta_info."""
    meta, n = out["meta_info"], len(out["output_ids"])
    assert meta["prompt_tokens"] == prompt
    assert meta["completion_tokens"] == n == len(meta["output_token_logprobs"])
    assert [row[1] for row in meta["output_token_logprobs"]] == out["output_ids"]
    assert all(row[0] <= 1e-6 and len(row) == 3 for row in meta["output_token_logprobs"])
    spans = meta["weight_versions"]
    assert [s["start"] for s in spans[1:]] == [s["end"] for s in spans[:-1]]
    if n:
        assert (spans[0]["start"], spans[-1]["end"]) == (0, n)
    return meta


async def test_a_reply_has_ids_logprobs_and_versions_of_one_length(api):
    out = await api.generate(rid="mine-1")
    meta = check(out, 60)
    assert meta["id"] == "mine-1"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert isinstance(meta["weight_version"], str)


async def test_output_ids_include_the_matched_stop_id(api):
    await api.flush()
    free = await api.generate(sampling={"temperature": 0.0})
    stop = free["output_ids"][3]
    await api.flush()
    out = await api.generate(sampling={"temperature": 0.0, "stop_token_ids": [stop], "ignore_eos": False}, new=30)
    meta = check(out, 60)
    if meta["finish_reason"]["type"] == "stop" and meta["finish_reason"]["matched"] == stop:
        assert out["output_ids"][-1] == stop
        assert stop not in out["output_ids"][:-1]
    else:  # an end-of-sequence id of the model came first
        assert out["output_ids"] == free["output_ids"][: len(out["output_ids"])]


async def test_cached_tokens_are_the_known_prefix_less_the_last_position(api):
    await api.flush()
    first = await api.generate()
    assert first["meta_info"]["cached_tokens"] == 0
    again = await api.generate(logprob_start_len=-1)
    assert again["meta_info"]["cached_tokens"] == 59
    second = await api.generate(PROMPT + first["output_ids"] + [5, 6, 7])
    assert second["meta_info"]["cached_tokens"] == 60 + 8 - 1
    whole = await api.generate(logprob_start_len=0)
    assert whole["meta_info"]["cached_tokens"] == 0
    assert len(whole["meta_info"]["input_token_logprobs"]) == 60
    apart = await api.generate(extra_key="another")
    assert apart["meta_info"]["cached_tokens"] == 0


async def test_an_over_long_input_is_400_with_the_known_text(api):
    limit = (await api.ok("/server_info")).get("context_length") or 200_000
    status, text = await api.raw(
        "/generate", {"input_ids": [1] * (limit + 1), "sampling_params": {"max_new_tokens": 1}}
    )
    assert status == 400
    assert "longer than the model's context length" in text


@pytest.mark.parametrize("bad", [{"rid": 7}, {"input_ids": "abc"}, {"stream": "perhaps"}, {"sampling_params": 3}])
async def test_wrong_types_are_400(api, bad):
    status, _ = await api.raw("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, **bad})
    assert status == 400


async def test_unknown_keys_are_ignored(api):
    check(await api.generate(who_knows={"x": 1}, routing_key="session"), 60)


async def test_an_unknown_sampling_parameter_is_400_and_named(api):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1, "temprature": 0.5}}
    status, text = await api.raw("/generate", body)
    assert (status, "temprature" in text) == (400, True), text


async def test_a_request_id_in_flight_cannot_be_used_again(api):
    async with api.running(rid="contract-twin") as first:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "rid": "contract-twin"}
        status, text = await api.raw("/generate", body)
        assert (status, "Duplicate request ID detected: contract-twin" in text) == (400, True), text
        await api.raw("/abort_request", {"rid": "contract-twin"})
        await first
    await api.generate(rid="contract-twin")


async def test_flat_top_logprobs_equal_the_nested_ones(api):
    sampling = {"temperature": 0.0}
    await api.flush()
    nested = (await api.generate(sampling=sampling, top_logprobs_num=3))["meta_info"]["output_top_logprobs"]
    assert [len(row) for row in nested] == [3] * 8
    flags = {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    await api.flush()
    meta = (await api.generate(sampling=sampling, top_logprobs_num=3, **flags))["meta_info"]
    rows, width = meta["output_top_logprobs_shape"]
    values = np.frombuffer(base64.b64decode(meta["output_top_logprobs_val_flat_b64"]), np.float32).reshape(rows, width)
    ids = np.frombuffer(base64.b64decode(meta["output_top_logprobs_idx_flat_b64"]), np.int32).reshape(rows, width)
    assert ids.tolist() == [[entry[1] for entry in row] for row in nested]
    np.testing.assert_allclose(values, [[entry[0] for entry in row] for row in nested], atol=0.1)


async def test_a_stream_ends_in_the_whole_reply_and_done(api):
    call = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    async with api.http.post(f"{api.url}/generate", json=call) as reply:
        assert reply.content_type == "text/event-stream"
        blocks = [block for block in (await reply.text()).split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    events = [json.loads(block[6:]) for block in blocks[:-1]]
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    ids = [event["output_ids"] for event in events]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(ids))
    check(events[-1], 60)
    assert len(ids[-1]) == 6


async def test_abort_is_200_with_partial_tokens_also_for_unknown_ids(api):
    assert (await api.raw("/abort_request", {"rid": "nobody"}))[0] == 200
    async with api.running(rid="to-abort") as task:
        assert (await api.raw("/abort_request", {"rid": "to-abort"}))[0] == 200
        out = await task
    meta = check(out, 60)
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(out["output_ids"]) < LONG


async def test_pause_abort_ends_requests_with_what_they_have(api):
    async with api.running() as task:
        await api.ok("/pause_generation", {"mode": "abort"})
        out = await task
    assert check(out, 60)["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_refit_in_flight_splits_the_spans(api, mode):
    await api.ok("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
    async with api.running() as task:
        await api.ok("/pause_generation", {"mode": mode})
        status, _ = await api.raw("/flush_cache", {})
        assert (status == 200) == (mode == "retract")
        await api.ok("/begin_weight_update", {})
        await api.ok("/end_weight_update", {})
        await api.ok("/update_weight_version", {"new_version": "8", "abort_all_requests": False})
        await api.ok("/continue_generation", {})
        out = await task
    meta = check(out, 60)
    assert [span["version"] for span in meta["weight_versions"]] == ["7", "8"]
    assert meta["weight_version"] == "8"
    assert meta["finish_reason"] == {"type": "length", "length": LONG}


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_new_requests_wait_while_paused(api, mode):
    await api.ok("/pause_generation", {"mode": mode})
    task = asyncio.create_task(api.generate())
    done, _ = await asyncio.wait({task}, timeout=0.3)
    assert not done
    await api.ok("/continue_generation", {})
    check(await task, 60)


@pytest.mark.parametrize("mode", ["place", "", 3])
async def test_an_invalid_pause_mode_is_400_and_pauses_nothing(api, mode):
    assert (await api.raw("/pause_generation", {"mode": mode}))[0] == 400
    check(await api.generate(), 60)


async def test_stamping_a_version_aborts_everything_unless_told_not_to(api):
    async with api.running() as task:
        await api.ok("/update_weight_version", {"new_version": "9"})
        out = await task
    assert out["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await api.ok("/model_info"))["weight_version"] == "9"


async def test_updates_need_exactly_one_open_session(api):
    tensors = {"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket", "flush_cache": False}
    broadcast = {"names": [], "dtypes": [], "shapes": [], "group_name": "none", "flush_cache": False}
    assert (await api.raw("/update_weights_from_tensor", tensors))[0] == 400
    assert (await api.raw("/update_weights_from_distributed", broadcast))[0] == 400
    await api.ok("/begin_weight_update", {"selector": "all"})
    try:
        assert (await api.raw("/begin_weight_update", {"selector": "all"}))[0] == 400
    finally:
        await api.ok("/end_weight_update", {})


class FlattenedTensorMetadata:
    def __init__(self, name: str, tensor: torch.Tensor, start: int) -> None:
        self.name, self.shape, self.dtype = name, tensor.shape, tensor.dtype
        self.start_idx, self.end_idx, self.numel = start, start + tensor.nbytes, tensor.numel()


def bucket(monkeypatch: pytest.MonkeyPatch, tensors: dict[str, torch.Tensor]) -> str:
    """A flattened bucket as a trainer without sglang makes it."""
    module = "sglang.srt.weight_sync.tensor_bucket"
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
    monkeypatch.setattr(sys.modules[module], "FlattenedTensorMetadata", FlattenedTensorMetadata, raising=False)
    monkeypatch.setattr(FlattenedTensorMetadata, "__module__", module)
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    metadata, at = [], 0
    for name, tensor in ordered:
        metadata.append(FlattenedTensorMetadata(name, tensor, at))
        at += tensor.nbytes
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in ordered])
    return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": metadata})).decode()


async def test_a_bucket_changes_the_weights_and_stamps_the_version(api, monkeypatch):
    files = sorted(Path((await api.ok("/model_info"))["model_path"]).glob("*.safetensors"))
    if not files:
        pytest.skip("the server's model directory is not on this machine")
    with safe_open(files[-1], framework="pt") as opened:
        norm = opened.get_tensor("model.norm.weight")

    async def push(tensor: torch.Tensor, version: str) -> dict:
        await api.ok("/pause_generation", {"mode": "retract"})
        await api.ok("/flush_cache", {})
        await api.ok("/begin_weight_update", {})
        payload = bucket(monkeypatch, {"model.norm.weight": tensor})
        body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "flush_cache": False}
        await api.ok("/update_weights_from_tensor", body)
        await api.ok("/end_weight_update", {})
        await api.ok("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        await api.ok("/continue_generation", {})
        out = await api.generate(sampling={"temperature": 0.0}, new=1)
        assert out["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 1}]
        return out["meta_info"]["output_token_logprobs"][0][0]

    before = await push(norm, "20")
    flat = await push(torch.zeros_like(norm), "21")  # all logits 0: the uniform distribution
    again = await push(norm, "22")
    vocabulary = np.exp(-flat)
    assert abs(vocabulary - round(vocabulary)) < 0.01 * vocabulary
    assert abs(flat - before) > 0.01
    assert again == pytest.approx(before, abs=1e-4)


async def test_a_disk_update_needs_no_session_and_rolls_back_by_itself(api, tmp_path):
    path = (await api.ok("/model_info"))["model_path"]
    if not Path(path).exists():
        pytest.skip("the server's model directory is not on this machine")
    await api.flush()
    before = await api.generate(sampling={"temperature": 0.0}, new=1)
    body = {"model_path": path, "weight_version": "30", "flush_cache": False}
    await api.ok("/update_weights_from_disk", body)
    await api.flush()
    status, text = await api.raw("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "31"})
    assert status == 400
    assert json.loads(text)["success"] is False
    after = await api.generate(sampling={"temperature": 0.0}, new=1)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "30"


async def test_routed_experts_cover_prompt_and_output_from_the_start_asked_for(api):
    out = await api.generate(return_routed_experts=True)
    if not out["meta_info"].get("routed_experts"):
        pytest.skip("the server's model is dense, or it does not record expert choices")
    whole = np.frombuffer(base64.b64decode(out["meta_info"]["routed_experts"]), np.int32)
    rows = 60 + 8 - 1
    assert whole.size % rows == 0
    turn = PROMPT + out["output_ids"]
    later = await api.generate([*turn, 9], return_routed_experts=True, routed_experts_start_len=50)
    part = np.frombuffer(base64.b64decode(later["meta_info"]["routed_experts"]), np.int32).reshape(
        -1, whole.size // rows
    )
    assert part.shape[0] == 69 + 8 - 1 - 50
    np.testing.assert_array_equal(part[: rows - 50], whole.reshape(rows, -1)[50:])
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
    assert (await api.raw("/generate", {**body, "routed_experts_start_len": 61}))[0] == 400


async def test_several_samples_come_back_as_a_list(api):
    out = await api.generate(sampling={"n": 2})
    assert len(out) == 2
    for one in out:
        check(one, 60)


async def test_memory_is_released_and_resumed_by_tag(api):
    await api.ok("/pause_generation", {"mode": "retract"})
    await api.flush()
    status, text = await api.raw("/release_memory_occupation", {"tags": ["kv_cache"]})
    if status != 200:
        pytest.skip(f"the server has no memory saver: {text[:80]}")
    assert (await api.raw("/resume_memory_occupation", {"tags": ["kv_cache"]}))[0] == 200
    await api.ok("/continue_generation", {})
    check(await api.generate(), 60)


async def test_information_routes_answer_under_their_names(api):
    for path in ("/health", "/health_generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        assert (await api.raw(path))[0] == 200
    load = (await api.ok("/v1/loads"))["loads"][0]
    assert {"num_running_reqs", "num_waiting_reqs", "token_usage"} <= load.keys()
    for path in ("/get_load", "/get_weight_version", "/nowhere"):
        assert (await api.raw(path))[0] == 404


async def test_metrics_carry_the_names_that_the_cache_ledger_reads(api):
    for _ in range(2):  # SGLang shows a counter from its first count on; the second call finds the first one's prefix
        await api.generate()
    status, text = await api.raw("/metrics")
    if status == 404:
        pytest.skip("the server runs without --enable-metrics")
    for name in (
        "cached_tokens_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_running_reqs",
        "token_usage",
    ):
        assert f"sglang:{name}" in text
