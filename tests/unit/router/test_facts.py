"""What an engine is, read from what real ones say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tollway.router.facts import EngineFacts, directory_config, read_facts

STOCK = {"internal_states": [{}], "launch_command": ["x"], "version": "0.5.23", "dtype": "auto", "quantization": None}


@pytest.mark.parametrize(
    ("server", "config", "precision"),
    [
        (STOCK, {"dtype": "bfloat16"}, "bfloat16"),
        (STOCK, {"torch_dtype": "float32"}, "float16"),
        (STOCK, {"torch_dtype": "float32", "model_type": "gemma3"}, "bfloat16"),
        (STOCK | {"dtype": "float32"}, {"dtype": "bfloat16"}, "float32"),
        (STOCK | {"dtype": "half"}, {}, "float16"),
        (STOCK | {"quantization": "fp8"}, {"dtype": "bfloat16"}, "fp8"),
        (STOCK, {"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}, "awq"),
        (STOCK, {}, ""),
        ({}, {"dtype": "float32"}, "float32"),
        ({"dtype": 7}, {"dtype": 7}, ""),
    ],
)
def test_the_number_format_is_the_one_that_the_engine_computes_with(
    server: dict[str, object], config: dict[str, object], precision: str
) -> None:
    assert read_facts({}, server, config).precision == precision


def test_programs_are_told_apart() -> None:
    stock = read_facts({}, STOCK | {"incremental_streaming_output": False}, {})
    assert (stock.kind, stock.release, stock.cumulative_streams) == ("sglang", "0.5.23", True)
    assert not read_facts({}, STOCK | {"incremental_streaming_output": True}, {}).cumulative_streams
    assert read_facts({}, {"engine": "embedded", "version": "tollway-embedded"}, {}).kind == "embedded"
    assert read_facts({}, {}, {}) == EngineFacts()


@pytest.mark.parametrize(
    ("config", "routes", "indexer"),
    [
        ({"num_hidden_layers": 48, "num_experts_per_tok": 8}, (48, 8), None),
        ({"num_hidden_layers": 48, "num_experts_per_tok": None}, None, None),
        ({"num_hidden_layers": 0, "num_experts_per_tok": 8}, None, None),
        ({"num_hidden_layers": "48", "num_experts_per_tok": 8}, None, None),
        ({"num_hidden_layers": 61, "num_experts_per_tok": 8, "index_topk": 2048}, (61, 8), (61, 2048)),
        ({"num_hidden_layers": 5, "index_topk": 4, "compress_ratios": [1, 4, 4, 128]}, None, (2, 4)),
        ({"num_hidden_layers": 5, "index_topk": 4, "num_indexer_layers": 3}, None, (3, 4)),
    ],
)
def test_shapes_of_rows_come_from_whoever_names_them(
    config: dict[str, object], routes: object, indexer: object
) -> None:
    for found in (read_facts(config, {}, {}), read_facts({}, config, {}), read_facts({}, {}, config)):
        assert (found.route_shape, found.indexer_shape) == (routes, indexer)


def test_a_model_directory_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert directory_config("a/model/of/the/hub") == {}
    assert directory_config("x" * 9000) == {}
    assert directory_config("\0") == {}
    (tmp_path / "config.json").write_bytes(b"[1")
    assert directory_config(str(tmp_path)) == {}
    (tmp_path / "config.json").write_bytes(b"[1]")
    assert directory_config(str(tmp_path)) == {}
    (tmp_path / "config.json").write_bytes(b'{"a":1}')
    assert directory_config(str(tmp_path)) == {"a": 1}


def test_how_an_engine_keys_its_prefix_cache_is_known() -> None:
    plain = read_facts({}, STOCK, {})
    assert (plain.bigram_keys, plain.strips_thinking) == (False, False)
    for name in ("EAGLE", "EAGLE3", "NEXTN", "frozen_kv_mtp"):
        assert read_facts({}, STOCK | {"speculative_algorithm": name}, {}).bigram_keys
    assert not read_facts({}, STOCK | {"speculative_algorithm": "NGRAM"}, {}).bigram_keys
    assert read_facts({}, STOCK | {"strip_thinking_cache": True}, {}).strips_thinking


def test_whether_and_how_an_engine_schedules_by_priority_is_known() -> None:
    """A server without priority scheduling may refuse a request that names one."""
    on = {"enable_priority_scheduling": True}
    said = [{}, {"schedule_low_priority_values_first": True}, on, {**on, "schedule_low_priority_values_first": True}]
    assert [read_facts({}, server, {}).priority_sign for server in said] == [0, 0, 1, -1]
