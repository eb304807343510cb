"""Log-probabilities by pieces against torch's own, and their gradient, in the place of the logits."""

from __future__ import annotations

import pytest
import torch

from tollway.trainer.backends.megatron import logprobs
from tollway.trainer.backends.megatron.logprobs import target_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warm", [False, True])
def test_values_and_gradients_are_those_of_log_softmax(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, warm: bool
) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 40)  # two of seven rows at a time
    draw = torch.Generator().manual_seed(4)
    leaf = (torch.randn(7, 3, 19, generator=draw) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, 19, (7, 3), generator=draw)
    temperatures = torch.rand(7, 3, generator=draw) + 0.5 if warm else None
    upstream = torch.randn(7, 3, generator=draw)
    exact = leaf.detach().double().requires_grad_()
    scaled = exact if temperatures is None else exact / temperatures[..., None].double()
    wanted = scaled.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    wanted.backward(upstream.double())
    logits = leaf * 1  # as a layer makes them: nobody else needs them
    found = target_logprobs(logits, targets, temperatures)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted.detach().float(), atol=1e-5, rtol=1e-5)
    found.backward(upstream)
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 8e-3}
    torch.testing.assert_close(leaf.grad.double(), exact.grad, **tolerance)
    # The gradient took the logits' own memory.
    assert torch.equal(logits.detach().double(), leaf.grad.double())


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 0.0, 3e38]])
    found = target_logprobs(logits, torch.tensor([0, 2]), None)
    assert found.tolist() == [0.0, 0.0]
