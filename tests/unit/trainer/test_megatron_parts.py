"""Parts of the Megatron backend that need no megatron: name conversion and attention."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from trainer_helpers import model_dir

from tollway.trainer.backends.megatron.attention import SdpaAttention
from tollway.trainer.backends.megatron.convert import to_hf, to_megatron
from tollway.trainer.backends.shape import read_shape


@pytest.mark.parametrize("moe", [False, True])
def test_names_and_layouts_survive_a_round_trip_exactly(tmp_path: Path, moe: bool) -> None:
    shape = read_shape(model_dir(tmp_path, moe=moe))
    weights = load_file(tmp_path / "model.safetensors")
    back = dict(to_hf(to_megatron(weights, shape), shape))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_query_rows_lie_beside_the_key_and_value_of_their_group(tmp_path: Path) -> None:
    shape = read_shape(model_dir(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    packed = to_megatron(weights, shape)["decoder.layers.0.self_attention.linear_qkv.weight"]
    head = shape.head_dim
    assert torch.equal(packed[: 2 * head], weights["model.layers.0.self_attn.q_proj.weight"][: 2 * head])
    assert torch.equal(packed[2 * head : 3 * head], weights["model.layers.0.self_attn.k_proj.weight"][:head])
    assert torch.equal(packed[4 * head : 6 * head], weights["model.layers.0.self_attn.q_proj.weight"][2 * head :])


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_packed_sequences_attend_as_if_each_were_alone(key_value_heads: int) -> None:
    torch.manual_seed(0)
    lengths, heads, size = [5, 1, 9], 4, 8
    total = sum(lengths)
    query = torch.randn(total, heads, size, requires_grad=True)
    key, value = (torch.randn(total, key_value_heads, size, requires_grad=True) for _ in range(2))
    edges = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    attention = SdpaAttention()
    packed = attention(query, key, value, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=edges))
    assert packed.shape == (total, 1, heads * size)
    alone, at = [], 0
    for length in lengths:
        one = slice(at, at + length)
        alone.append(attention(*(x[one].unsqueeze(1) for x in (query, key, value)), None))
        at += length
    together = torch.cat(alone)
    assert torch.allclose(packed, together, atol=1e-6)
    wanted = torch.autograd.grad(together.square().sum(), (query, key, value))
    found = torch.autograd.grad(packed.square().sum(), (query, key, value))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_a_padded_batch_attends_causally() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(6, 2, 4, 8) for _ in range(3))
    before = SdpaAttention()(query, key, value, None)
    key[4:] = value[4:] = 99.0
    after = SdpaAttention()(query, key, value, None)
    assert torch.equal(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])
