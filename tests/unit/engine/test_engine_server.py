"""The process: how it starts, ends, refuses and streams."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import aiohttp
import httpx
import numpy as np
import pytest
import torch
from engine_process import start_engine, stop_engine
from engine_reference import sampled_logprobs
from safetensors.torch import load_file

from tollway.engine.config import EngineConfig
from tollway.engine.server import run
from tollway.errors import ConfigError

PROMPT = list(range(40, 70))


@pytest.fixture
def http(engine):
    with httpx.Client(base_url=engine.url, timeout=30) as client:
        yield client


def generate(http, ids=PROMPT, new=8, **body):
    sampling = {"max_new_tokens": new, **body.pop("sampling", {})}
    return http.post("/generate", json={"input_ids": ids, "sampling_params": sampling, **body})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_with_code_0_and_open_requests_with_an_answer(models, number):
    engine = start_engine(models["dense"])
    answers = []

    def ask():
        with httpx.Client(base_url=engine.url, timeout=30) as client:
            client.post("/pause_generation", json={"mode": "in_place"})
            asked.set()
            answers.append(generate(client))

    asked = threading.Event()
    thread = threading.Thread(target=ask)
    thread.start()
    asked.wait(10)
    while httpx.get(f"{engine.url}/v1/loads").json()["loads"][0]["num_waiting_reqs"] == 0:
        time.sleep(0.01)
    engine.process.send_signal(number)
    assert engine.process.wait(20) == 0
    thread.join(10)
    assert answers[0].status_code == 503
    assert engine.process.stdout.read() == ""  # the ready line was the only one
    engine.process.stdout.close()


def test_a_port_in_use_is_a_configuration_error_that_says_what_to_do(models):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"engine\.port"):
        run(EngineConfig(model_path=models["dense"], port=taken.getsockname()[1]))


def test_a_directory_without_a_model_is_a_configuration_error(tmp_path):
    for path, message in ((tmp_path / "none", "does not exist"), (tmp_path, r"config\.json"), (None, "model_path")):
        with pytest.raises(ConfigError, match=message):
            run(EngineConfig(model_path=path))


def test_a_configuration_error_is_a_message_on_stderr_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "tollway.engine", "--model-path", str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "does not exist" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture(scope="module")
def guarded(models):
    """An engine with a key, without a tokenizer, that streams increments of three tokens."""
    options = ("skip_tokenizer_init=true", "incremental_streaming=true", "stream_interval=3")
    flags = [flag for option in options for flag in ("--set", option)]
    started = start_engine(models["dense"], *flags, env={"TOLLWAY_ENGINE_KEY": "secret"})
    with httpx.Client(base_url=started.url, timeout=30, headers={"authorization": "Bearer secret"}) as client:
        yield client
    stop_engine(started)


def test_the_key_guards_everything_but_health(guarded):
    with httpx.Client(base_url=guarded.base_url, timeout=30) as client:
        assert client.get("/health").status_code == 200
        for path in ("/model_info", "/metrics", "/nowhere"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.post("/generate", json={"input_ids": [1]}).status_code == 401
    assert guarded.get("/model_info").status_code == 200


def test_incremental_streams_add_up_to_the_whole(guarded):
    sampling = {"max_new_tokens": 8, "sampling_seed": 3}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    whole = guarded.post("/generate", json=body).json()
    with guarded.stream("POST", "/generate", json={**body, "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert [token for e in events for token in e["output_ids"]] == whole["output_ids"]
    assert [row[1] for e in events for row in e["meta_info"]["output_token_logprobs"]] == whole["output_ids"]
    assert len(events) <= 4


def test_without_a_tokenizer_there_is_no_text_and_no_string_stop(guarded):
    assert "text" not in generate(guarded).json()
    refused = generate(guarded, sampling={"stop": "a"})
    assert refused.status_code == 400
    assert "stop" in refused.json()["error"]["message"]


BAD_BODIES = [
    (b"{nonsense", "JSON"),
    (b"[1]", "object"),
    (b'{"input_ids": [1], "rid": 7}', "rid"),
    (b'{"input_ids": "abc"}', "input_ids"),
    (b'{"input_ids": [1.5]}', "input_ids"),
    (b'{"input_ids": [true]}', "input_ids"),
    (b'{"input_ids": []}', "input_ids"),
    (b'{"input_ids": [272]}', "272"),
    (b'{"input_ids": [-1]}', "-1"),
    (b'{"input_ids": [1], "text": "a"}', "exactly one"),
    (b'{"input_ids": [1], "stream": "yes"}', "stream"),
    (b'{"input_ids": [1], "return_logprob": 1}', "return_logprob"),
    (b'{"input_ids": [1], "lora_path": "x"}', "lora_path"),
    (b'{"input_ids": [1], "sampling_params": {"regex": "a"}}', "regex"),
    (b'{"input_ids": [1], "sampling_params": {"ebnf": "a"}}', "ebnf"),
    (b'{"input_ids": [1], "sampling_params": {"structural_tag": "a"}}', "structural_tag"),
    (b'{"input_ids": [1], "sampling_params": {"temperature": -1}}', "temperature"),
    (b'{"input_ids": [1], "routed_experts_start_len": 2}', "routed_experts_start_len"),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES)
def test_a_bad_body_is_400_and_names_the_field(http, body, named):
    reply = http.post("/generate", content=body)
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update", "/release_memory_occupation"])
def test_half_a_body_does_nothing(http, engine, path):
    port = int(engine.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n".encode() + b'{"mo')
        time.sleep(0.1)
    time.sleep(0.2)
    state = http.get("/server_info").json()["internal_states"][0]
    assert (state["paused"], state["weight_update_session"], state["released_tags"]) == (False, False, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_its_request(engine, stream):
    async def post(path, body) -> None:
        async with session.post(engine.url + path, json=body) as reply:
            await reply.read()

    async def until(total) -> None:
        while True:
            async with session.get(f"{engine.url}/v1/loads") as reply:
                if (await reply.json())["loads"][0]["num_total_reqs"] == total:
                    return
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        await post("/pause_generation", {"mode": "in_place"})
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 220}, "stream": stream}
        task = asyncio.create_task(post("/generate", body))
        await until(1)
        task.cancel()
        await until(0)
        await post("/continue_generation", {})


def test_a_stream_carries_the_same_reply_cumulatively(http):
    body = {"return_logprob": True, "sampling": {"sampling_seed": 3}, "rid": "same", "top_logprobs_num": 2}
    whole = generate(http, **body).json()
    sampling = {"max_new_tokens": 8, "sampling_seed": 3}
    body = {
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        "rid": "same",
        "top_logprobs_num": 2,
    }
    with http.stream("POST", "/generate", json={**body, "stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    top_ids = [[top[1] for top in row] for row in whole["meta_info"]["output_top_logprobs"]]
    assert len({tuple(row) for row in top_ids}) > 1
    for event in events:
        assert event["output_ids"] == whole["output_ids"][: len(event["output_ids"])]
        assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])
        tops = event["meta_info"]["output_top_logprobs"]
        assert [[top[1] for top in row] for row in tops] == top_ids[: len(event["output_ids"])]
    assert all(e["meta_info"]["finish_reason"] is None for e in events[:-1])
    last = events[-1]
    assert last["output_ids"] == whole["output_ids"]
    assert last["text"] == whole["text"]
    assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_the_server_names_its_program_and_its_number_format(http):
    info = http.get("/server_info").json()
    assert (info["engine"], info["dtype"]) == ("embedded", "float32")


def test_the_smallest_repetition_penalty_still_draws_finite_tokens(http):
    sampling = {"max_new_tokens": 6, "repetition_penalty": 1e-6, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}
    entries = http.post("/generate", json=body).json()["meta_info"]["output_token_logprobs"]
    assert len(entries) == 6
    assert all(value is not None and value <= 0 for value, _, _ in entries)


@pytest.mark.parametrize("name", ["return_sampling_mask", "return_indexer_topk"])
def test_records_that_this_engine_cannot_make_are_refused_by_name(http, name):
    answer = http.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, name: True})
    assert answer.status_code == 400
    assert name in answer.text


def test_flat_arrays_are_refused_in_a_stream_as_on_a_stock_server(http):
    body = {"input_ids": [1], "stream": True, "return_logprob": True, "top_logprobs_num": 2}
    answer = http.post("/generate", json={**body, "return_flat_raw_output_top_logprobs": True})
    assert answer.status_code == 400
    assert "stream" in answer.text


def test_several_samples_and_batches_come_back_as_lists(http):
    several = generate(http, sampling={"n": 3, "sampling_seed": 1}).json()
    assert len({tuple(one["output_ids"]) for one in several}) == 3
    assert len({one["meta_info"]["id"] for one in several}) == 3
    batch = generate(http, ids=[PROMPT, PROMPT[:9]], rid=["a", "b"]).json()
    assert [one["meta_info"]["id"] for one in batch] == ["a", "b"]
    assert [one["meta_info"]["prompt_tokens"] for one in batch] == [30, 9]


def test_text_is_trimmed_at_the_stop_unless_asked_not_to(http):
    bias = {str(ord("a")): 60.0, str(ord("b")): 60.0}
    sampling = {"logit_bias": bias, "stop": "ab", "sampling_seed": 2, "max_new_tokens": 60}
    trimmed = generate(http, sampling=sampling).json()
    kept = generate(http, sampling={**sampling, "no_stop_trim": True}).json()
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ab"}
    assert trimmed["output_ids"] == kept["output_ids"]
    assert kept["text"] == trimmed["text"] + "ab" == bytes(kept["output_ids"]).decode()


def test_a_reduce_pickle_on_any_weight_route_creates_no_file(http, tmp_path):
    import os

    target = tmp_path / "owned"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {target}",)

    payload = base64.b64encode(pickle.dumps({"flattened_tensor": Evil(), "metadata": []})).decode()
    assert http.post("/begin_weight_update", json={}).status_code == 200
    try:
        for load_format in (None, "direct", "flattened_bucket", "weird"):
            body = {"serialized_named_tensors": [payload], "load_format": load_format, "flush_cache": False}
            assert http.post("/update_weights_from_tensor", json=body).status_code == 400
        for path in ("/update_weights_from_disk", "/update_weights_from_distributed", "/generate"):
            assert http.post(path, content=pickle.dumps(Evil())).status_code == 400
    finally:
        http.post("/end_weight_update", json={})
    assert not target.exists()


def test_only_loopback_listens_by_default(engine):
    port = int(engine.url.rsplit(":", 1)[1])
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    rows = [line.split()[1:4] for line in lines]
    listening = [local for local, _, state in rows if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port]
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_weights_arrive_by_broadcast(models, http, load_format):
    new, old = (load_file(models[kind] / "model.safetensors") for kind in ("other", "dense"))
    name = f"group-{load_format}"
    layout = {
        "names": list(new),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in new.values()],
        "shapes": [list(t.shape) for t in new.values()],
        "group_name": name,
        "load_format": load_format,
    }
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trainer = threading.Thread(target=broadcast, args=(port, [new, old], load_format, name), daemon=True)
    trainer.start()

    def ok(path, **body):
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text

    refused = http.post("/update_weights_from_distributed", json=layout)
    assert refused.status_code == 400
    assert "begin_weight_update" in refused.json()["message"]
    ok(
        "/init_weights_update_group",
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=2,
        group_name=name,
    )
    for kind, version in (("other", "5"), ("dense", "6")):
        ok("/begin_weight_update")
        ok("/update_weights_from_distributed", **layout, weight_version=version)
        ok("/end_weight_update")
        out = generate(http, return_logprob=True).json()
        assert out["meta_info"]["weight_version"] == version
        expected = sampled_logprobs(models[kind], PROMPT, out["output_ids"])
        got = [row[0] for row in out["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(got, expected, atol=1e-5)
    trainer.join(10)
    ok("/destroy_weights_update_group", group_name=name)


def test_a_trainer_that_never_joins_does_not_keep_the_process_from_ending(models):
    engine = start_engine(models["dense"])
    group = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    with httpx.Client(base_url=engine.url, timeout=1) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/init_weights_update_group", json=group)
    assert stop_engine(engine) == 0


def broadcast(port: int, updates: list[dict[str, torch.Tensor]], load_format: str | None, name: str) -> None:
    """A trainer's side, with the group construction that SGLang's trainers use."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=20)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
    group, _ = _new_process_group_helper(
        2, 0, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=timeout
    )
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    for tensors in updates:
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()])
        for tensor in [flat] if load_format else list(tensors.values()):
            group.broadcast([tensor.contiguous()], options).wait()


def test_health_answers_while_paused_and_generates_when_idle(http):
    assert http.get("/health_generate").status_code == 200
    http.post("/pause_generation", json={"mode": "retract"})
    try:
        assert http.get("/health_generate").status_code == 200
        assert http.get("/health").status_code == 200
    finally:
        http.post("/continue_generation", json={})


def test_metrics_count_hits_by_token(http):
    def effective(mode):
        lines = http.get("/metrics").text.splitlines()
        start = "sglang:prefill_effective_tokens_total{"
        (line,) = [line for line in lines if line.startswith(start) and f'mode="{mode}"' in line]
        return float(line.rsplit(" ", 1)[1])

    http.post("/flush_cache")
    before = effective("device_hit"), effective("input")
    for _ in range(2):
        generate(http, ids=list(range(100, 140)))
    assert (effective("device_hit") - before[0], effective("input") - before[1]) == (39, 41)
