"""Checkpoints: what fits is loaded, what does not is named, nothing is half done."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tollway.engine.memory import Memory
from tollway.engine.weight_updates import WeightUpdates
from tollway.engine.weights import WeightMismatch, copy_tensors, load_decoder, load_directory, save_decoder
from tollway.errors import BadRequest, ConfigError


@pytest.mark.parametrize("kind", ["dense", "untied", "moe"])
def test_a_saved_model_loads_bit_for_bit_under_the_same_names(models, kind, tmp_path):
    decoder = load_decoder(models[kind])
    save_decoder(decoder, tmp_path / "copy", json.loads((models[kind] / "config.json").read_text()))
    saved, original = load_file(tmp_path / "copy/model.safetensors"), load_file(models[kind] / "model.safetensors")
    assert saved.keys() == original.keys() == decoder.named_tensors().keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)


def test_bfloat16_checkpoints_are_held_as_they_are(models, tmp_path):
    config = {**json.loads((models["moe"] / "config.json").read_text()), "dtype": "bfloat16"}
    save_decoder(load_decoder(models["moe"], dtype="bfloat16"), tmp_path / "bf16", config)
    assert load_decoder(tmp_path / "bf16").embed.dtype == torch.bfloat16
    assert load_decoder(tmp_path / "bf16", dtype="float32").embed.dtype == torch.float32


def damaged(models, tmp_path, change):
    path = tmp_path / "damaged"
    shutil.copytree(models["other"], path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


NAME = "model.layers.1.mlp.down_proj.weight"
DAMAGE = {
    "missing": (lambda t: t.pop(NAME), NAME),
    "shape": (lambda t: t.update({NAME: torch.zeros(3, 3)}), r"shape \[3, 3\], the model wants \[48, 64\]"),
    "unknown": (lambda t: t.update({"model.layers.9.x": torch.zeros(1)}), "model.layers.9.x"),
    "type": (lambda t: t.update({NAME: torch.zeros(48, 64, dtype=torch.int32)}), NAME),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_directory_that_does_not_fit_is_named_and_changes_nothing(models, driver, tmp_path, kind):
    change, message = DAMAGE[kind]
    path = damaged(models, tmp_path, change)
    engine = driver()
    before = [t.clone() for t in engine.generation.decoder.parameters()]
    updates = WeightUpdates(models["dense"])
    with pytest.raises(BadRequest, match=message) as caught:
        engine.do(lambda g: updates.load_disk(g, path, flush=True, version="2"))
    assert "unchanged" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.generation.decoder.parameters(), strict=True))
    assert (engine.generation.version, updates.model_path) == ("1", models["dense"])
    with pytest.raises(ConfigError, match=message):
        load_decoder(path)


def test_weights_that_would_mean_something_else_are_refused_though_their_shapes_fit(models, driver, tmp_path):
    shutil.copytree(models["other"], tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text()) | {"rope_theta": 5.0}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    engine, updates = driver(), WeightUpdates(models["dense"])
    with pytest.raises(BadRequest, match="rope_theta"):
        engine.do(lambda g: updates.load_disk(g, tmp_path / "m", flush=True, version="2"))


def test_a_truncated_file_is_an_error_and_changes_nothing(models, tmp_path):
    path = damaged(models, tmp_path, lambda t: None)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    decoder = load_decoder(models["dense"])
    before = decoder.embed.clone()
    with pytest.raises(ConfigError, match="cannot read"):
        load_directory(decoder, path)
    assert torch.equal(before, decoder.embed)


def test_a_directory_without_weights_says_what_to_do(models, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_decoder(tmp_path / "empty")
    shutil.copy(models["dense"] / "config.json", tmp_path / "empty")
    with pytest.raises(ConfigError, match="no weights"):
        load_decoder(tmp_path / "empty")
    with pytest.raises(ConfigError, match="does not exist"):
        load_decoder(tmp_path / "nowhere")


def test_sharded_checkpoints_load_through_their_index(models, tmp_path):
    tensors = load_file(models["dense"] / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    shutil.copy(models["dense"] / "config.json", tmp_path)
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_decoder(tmp_path).embed, load_decoder(models["dense"]).embed)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("name", [7, None, ["a"], "x" * 300, "\0", "../" * 2000])
def test_an_index_that_names_no_file_is_refused(models, driver, tmp_path, name):
    shutil.copy(models["dense"] / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    engine, updates = driver(), WeightUpdates(models["dense"])
    with pytest.raises(BadRequest, match="weights in use are unchanged"):
        engine.do(lambda g: updates.load_disk(g, tmp_path, flush=True, version="2"))
    with pytest.raises(BadRequest, match="weights in use are unchanged"):
        engine.do(lambda g: updates.load_disk(g, tmp_path / ("x" * 5000), flush=True, version="2"))


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "yarn"}},
        {"vocab_size": "many"},
    ],
)
def test_models_that_the_decoder_cannot_run_are_refused_by_key(models, tmp_path, change):
    shutil.copytree(models["dense"], tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text()) | change
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=next(iter(change))):
        load_decoder(tmp_path / "m")


def test_a_failed_second_bucket_leaves_the_version_and_says_what_may_be_wrong(models, driver):
    engine, updates = driver(), WeightUpdates(models["dense"])
    updates.begin("all")
    name = "model.norm.weight"
    engine.do(lambda g: updates.load(g, [(name, torch.ones(48))], flush=False, version=None))
    with pytest.raises(WeightMismatch, match="weights may be partly updated"):
        engine.do(
            lambda g: updates.load(g, [(name, torch.zeros(48)), ("nope", torch.ones(1))], flush=False, version="2")
        )
    assert engine.generation.version == "1"
    assert torch.equal(engine.generation.decoder.norm, torch.ones(48))


def test_updates_outside_a_session_and_second_sessions_are_refused(models, driver):
    engine, updates = driver(), WeightUpdates(models["dense"])
    with pytest.raises(BadRequest, match="begin_weight_update"):
        engine.do(lambda g: updates.load(g, [], flush=False, version=None))
    with pytest.raises(BadRequest, match="begin_weight_update"):
        updates.end()
    updates.begin("target")
    with pytest.raises(BadRequest, match="already open"):
        updates.begin("all")
    updates.end()
    with pytest.raises(BadRequest, match="draft"):
        updates.begin("draft")


def test_an_update_that_cannot_flush_loads_nothing(models, driver):
    engine, updates = driver(), WeightUpdates(models["dense"])
    engine.submit([1, 2, 3], 20)
    engine.steps(2)
    before = engine.generation.decoder.embed.clone()
    with pytest.raises(BadRequest, match="flush_cache=false"):
        engine.do(lambda g: updates.load_disk(g, models["other"], flush=True, version="2"))
    assert torch.equal(before, engine.generation.decoder.embed)


def test_released_memory_is_freed_and_comes_back_with_the_same_weights(driver):
    engine, memory = driver(), Memory()
    first = engine.submit([1, 2, 3] * 9, 6, seed=1)
    engine.run()
    held = sum(t.nbytes for t in engine.generation.decoder.parameters())
    freed = engine.do(lambda g: memory.release(g, ["weights", "kv_cache"]))
    assert freed["weights"] == held
    assert freed["kv_cache"] > 0
    assert sum(t.untyped_storage().nbytes() for t in engine.generation.decoder.parameters()) == 0
    assert engine.generation.rows.nbytes + engine.generation.cache.nbytes == 0
    waiting = engine.submit([1, 2, 3] * 9, 6, seed=1)
    assert not engine.generation.step()
    assert engine.do(lambda g: memory.resume(g, ["weights"])) == {"weights": held}
    assert not engine.generation.step()
    engine.do(lambda g: memory.resume(g, ["kv_cache"]))
    engine.run()
    assert waiting.ids == first.ids
    assert waiting.result.cached_tokens == 0


def test_memory_is_not_released_under_running_requests_but_is_when_they_are_retracted(driver):
    engine, memory = driver(), Memory()
    ticket = engine.submit([1, 2, 3], 9, seed=4)
    engine.steps(3)
    with pytest.raises(BadRequest, match="retract"):
        engine.do(lambda g: memory.release(g, ["kv_cache"]))
    engine.do(lambda g: g.retract())
    engine.generation.paused = True
    engine.do(lambda g: memory.release(g, ["kv_cache", "weights"]))
    engine.do(lambda g: memory.resume(g, ["kv_cache", "weights"]))
    engine.generation.paused = False
    engine.run()
    assert len(ticket.ids) == 9
    with pytest.raises(BadRequest, match="unknown memory tag"):
        engine.do(lambda g: memory.release(g, ["disk"]))


def test_tensors_are_copied_all_or_none(models):
    decoder = load_decoder(models["dense"])
    before = decoder.embed.clone()
    with pytest.raises(WeightMismatch):
        copy_tensors(decoder, [("model.embed_tokens.weight", torch.zeros_like(before)), ("x", torch.zeros(1))])
    assert torch.equal(before, decoder.embed)
