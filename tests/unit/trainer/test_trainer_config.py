"""The `[trainer]` section refuses what cannot train, and the controller stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tollway.config import load
from tollway.errors import ConfigError
from tollway.trainer.backends.options import missing
from tollway.trainer.config import TrainerConfig


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"samples_per_group": 1}, "samples_per_group must be at least 2"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"temperature": -1.0}, "temperature above 0"),
        ({"top_p": 0.8}, "top_p = 1.0"),
        ({"top_k": 20}, "top_k = -1"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"pause_mode": "place"}, "in_place"),
        ({"pause_mode": ""}, "in_place"),
        ({"colocated": True}, 'set trainer.schedule = "sync"'),
        ({"colocated": True, "schedule": "sync", "pause_mode": "in_place"}, 'use "retract" or "abort"'),
        ({"colocated": True, "schedule": "sync", "release_tags": []}, "give back at least one of kv_cache"),
        ({"colocated": True, "schedule": "sync", "release_tags": ["weights", "weights"]}, "each named once"),
        ({"release_tags": ["heap"]}, "cuda_graph"),
        ({"refit_transport": "nccl"}, "cuda_ipc"),
        ({"dtype": "float16"}, "bfloat16"),
        ({"backend": "torch", "dtype": "bfloat16"}, 'remove trainer.dtype = "bfloat16", or train with "megatron"'),
        ({"backend": "torch", "compile_layers": True}, "remove trainer.compile_layers = true"),
        ({"backend": "torch", "megatron": {"bias_dropout_fusion": True}}, "takes no [trainer.megatron] options"),
        ({"megatron": {"bf16": True}}, "trainer.megatron.bf16 cannot be set: set trainer.dtype"),
        ({"megatron": {"tensor_model_parallel_size": 2}}, "this backend trains on one rank"),
        ({"bucket_mb": float("inf")}, "finite"),
        ({"refit_timeout_s": float("inf")}, "finite"),
        ({"backend_timeout_s": 1e300}, "less than or equal to 1000000"),
        ({"peak_tflops": 0.0}, "greater than 0"),
        ({"max_staleness": 0}, "max_staleness must be at least 1"),
        ({"group_per_step": 4}, "did you mean 'groups_per_step'"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "must lie in [0, 1)"),
    ],
)
def test_a_value_that_cannot_train_is_refused_with_the_reason(tree: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match="trainer") as caught:
        load(TrainerConfig, tree, source="trainer.toml")
    assert text in str(caught.value)


def test_a_colocated_run_releases_all_that_a_stock_server_can_unless_told_otherwise() -> None:
    tree = {"colocated": True, "schedule": "sync", "refit_transport": "cuda_ipc"}
    config = load(TrainerConfig, tree, source="trainer.toml")
    assert config.release_tags == ("kv_cache", "weights", "cuda_graph")
    fewer = load(TrainerConfig, tree | {"release_tags": ["kv_cache"]}, source="trainer.toml")
    assert fewer.release_tags == ("kv_cache",)


def test_the_schedule_says_how_far_generation_runs_ahead() -> None:
    assert TrainerConfig().lead == 1
    assert TrainerConfig(schedule="sync", max_staleness=0).lead == 0


def test_what_the_reference_can_train_is_taken() -> None:
    for tree in ({"dtype": "auto"}, {"dtype": "float32"}, {}):
        assert load(TrainerConfig, {"backend": "torch", **tree}, source="trainer.toml").backend == "torch"
    one_rank = {"megatron": {"tensor_model_parallel_size": 1, "bias_dropout_fusion": True}, "dtype": "bfloat16"}
    assert load(TrainerConfig, one_rank, source="trainer.toml").compile_layers is False


def test_a_framework_that_is_not_installed_is_named_with_the_extra_that_brings_it() -> None:
    assert (missing("torch"), missing("megatron")) == (None, None)
    code = """
import sys
from tollway.trainer.backends.options import missing
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
print(missing("torch"), missing("megatron"), sep="|")
"""
    said = [
        subprocess.run([sys.executable, "-c", code, *gone], capture_output=True, text=True, timeout=60, check=True)
        for gone in (["megatron"], ["torch", "megatron"])
    ]
    (torch, megatron), (neither, _) = (done.stdout.strip().split("|") for done in said)
    assert torch == "None"
    assert megatron == (
        "the megatron backend needs Megatron-Core: pip install 'tollway[megatron]', or set trainer.backend = \"torch\""
    )
    assert neither == "the torch backend needs torch: pip install 'tollway[engine]'"


def test_the_controller_never_imports_torch() -> None:
    modules = "loop, rollout, sft, checkpoint, probe, backends.proxy, weights.turns, weights.transport"
    names = [f"tollway.trainer.{name}" for name in modules.split(", ")]
    code = f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_buckets_are_large_where_only_handles_travel_and_small_where_an_engine_parses_them() -> None:
    sizes = {way: TrainerConfig(refit_transport=way).bucket_bytes for way in ("tensor", "cuda_ipc")}
    assert sizes == {"tensor": 16 << 20, "cuda_ipc": 512 << 20}
    assert TrainerConfig(bucket_mb=0.5).bucket_bytes == 1 << 19
