"""What a run does with the directory of another."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import cast

import pytest

from tollway.app import open_backend
from tollway.cli import main
from tollway.errors import ComponentLost, ConfigError, EngineLost
from tollway.notes import Notes, locked
from tollway.runs import check_device, move_aside
from tollway.settings import Settings
from tollway.trainer.weights.turns import OnDevice


def test_a_fresh_start_moves_an_old_run_aside_and_never_a_running_one(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    move_aside(run_dir)
    assert not run_dir.exists()
    with locked(run_dir):
        (run_dir / "ledger.sqlite").write_text("mine")
        with pytest.raises(ConfigError, match="another process"):
            move_aside(run_dir)
        assert (run_dir / "ledger.sqlite").read_text() == "mine"
    move_aside(run_dir)
    assert not run_dir.exists()
    assert (tmp_path / "demo.1" / "ledger.sqlite").read_text() == "mine"


@pytest.mark.parametrize(
    "damage", [{"evaluations": {"before": 5}}, {"evaluations": []}, {"phases": {"start": None}}, {"phases": 5}]
)
def test_damaged_notes_are_told_at_the_start_and_not_at_the_end_of_a_run(
    tmp_path: Path, damage: dict[str, object]
) -> None:
    whole: dict[str, object] = {"evaluations": {"before": {"reward": 0.5}}, "phases": {"start": 1.0}}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**whole, "tokens_generated": 1, "wall_s": 1.0, "identity": {}}))
    assert Notes(path).evaluations["before"] == {"reward": 0.5}
    path.write_text(json.dumps({**whole, "tokens_generated": 1, "wall_s": 1.0, "identity": {}, **damage}))
    with pytest.raises(ConfigError, match="not readable"):
        Notes(path)


def test_a_full_disk_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tollway.runs.train", full)
    assert main(["train", "--set", "model.path=/nowhere"]) == 1
    assert "make room" in capsys.readouterr().err


@pytest.mark.parametrize("lost", [EngineLost("session server at http://x: no answer in time"), ComponentLost("gone")])
def test_whatever_is_lost_the_run_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise lost

    monkeypatch.setattr("tollway.runs.train", fails)
    assert main(["train", "--set", "model.path=/nowhere"]) == 1
    said = capsys.readouterr().err
    assert str(lost) in said
    assert "the same command goes on" in said


async def test_handles_of_memory_without_a_gpu_are_refused_before_the_run_works_for_them() -> None:
    class OnCpu:
        async def device_memory(self) -> None:
            return None

    ipc, tensor = (Settings.model_validate({"trainer": {"refit_transport": way}}) for way in ("cuda_ipc", "tensor"))
    backend = cast(OnDevice, OnCpu())
    await check_device(tensor, backend)
    with pytest.raises(ConfigError, match=r'set trainer\.refit_transport = "tensor"'):
        await check_device(ipc, backend)


def test_a_model_that_the_trainer_does_not_build_is_refused_before_an_engine_loads_it(tmp_path: Path) -> None:
    for config, words in (
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM is not built here; use Qwen3ForC"),
        ({"architectures": ["Qwen3ForCausalLM"], "rope_scaling": {"type": "yarn"}}, "rope_scaling"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=words):
            open_backend(Settings(), tmp_path)


def test_a_run_goes_on_only_with_the_settings_that_make_it_that_run(tmp_path: Path) -> None:
    Notes(tmp_path / "run.json").claim({"run.seed": 0, "trainer.backend": "torch"})
    Notes(tmp_path / "run.json").claim({"run.seed": 0, "trainer.backend": "torch"})
    with pytest.raises(ConfigError, match=r"started with run\.seed = 0, now it is 1"):
        Notes(tmp_path / "run.json").claim({"run.seed": 1, "trainer.backend": "torch"})
    assert Notes(tmp_path / "run.json").identity["run.seed"] == 0
