"""Options of Megatron-Core that would say something else than a setting, or than the model, are refused by name."""

from __future__ import annotations

import pytest

from tollway.config import load
from tollway.errors import ConfigError
from tollway.trainer.config import TrainerConfig


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr", 0.1, "set trainer.optimizer.lr"),
        ("weight_decay", 0.5, "set trainer.optimizer.weight_decay"),
        ("clip_grad", 0.0, "set trainer.optimizer.clip_grad"),
        ("adam_beta2", 0.999, "set trainer.optimizer.betas"),
        ("calculate_per_token_loss", False, "normalised before they come to the backend"),
        ("num_layers", 3, "config.json decides"),
    ],
)
def test_what_another_setting_decides_is_set_there(name: str, value: float, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.megatron\.{name} cannot be set: .*{words}; remove it"):
        load(TrainerConfig, {"megatron": {name: value}}, source="trainer.toml")


def test_what_nothing_else_says_passes() -> None:
    options: dict[str, object] = {"adam_eps": 1e-6, "layernorm_epsilon": 1e-5, "recompute_granularity": "full"}
    assert load(TrainerConfig, {"megatron": options}, source="trainer.toml").megatron == options
