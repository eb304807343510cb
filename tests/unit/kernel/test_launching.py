"""From ``[engine]`` to a command line, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tollway.engine.config import EngineConfig
from tollway.errors import ConfigError
from tollway.launching import check_program, check_transport, engine_plan
from tollway.settings import ADMIN_KEY_VARIABLE

MODEL, SHOWN = Path("/models/m"), Path("/run/settings.json")


def program(tmp_path: Path) -> str:
    path = tmp_path / "sglang"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_options_of_sglang_pass_through_by_their_own_names(tmp_path: Path) -> None:
    options = {"tp_size": 2, "enable-metrics": True, "enable-lora": False, "lora-paths": ["a=b", "c"], "dtype": "auto"}
    config = EngineConfig(kind="sglang", executable=program(tmp_path), sglang=options)
    plan = engine_plan(config, MODEL, SHOWN)
    assert plan.command(31000) == [
        *(program(tmp_path), "serve", "--model-path", "/models/m", "--host", "127.0.0.1", "--port", "31000"),
        *("--tp-size", "2", "--enable-metrics", "--lora-paths", "a=b", "c", "--dtype", "auto"),
    ]
    assert not plan.says_ready


def test_a_given_command_gets_model_host_and_port_and_keeps_its_other_braces(tmp_path: Path) -> None:
    words = [program(tmp_path), "--json", '{"a": {}}', "--at={host}:{port}", "{model_path}"]
    plan = engine_plan(EngineConfig(kind="command", command=words), MODEL, SHOWN)
    assert plan.command(9) == [program(tmp_path), "--json", '{"a": {}}', "--at=127.0.0.1:9", "/models/m"]


@pytest.mark.parametrize("kind", ["embedded", "sglang", "command"])
def test_no_engine_gets_the_admin_key(tmp_path: Path, kind: str) -> None:
    config = EngineConfig(kind=kind, executable=program(tmp_path), command=[program(tmp_path)])  # type: ignore[arg-type]
    env = engine_plan(config, MODEL, SHOWN).env
    assert [env[name] for name in (ADMIN_KEY_VARIABLE, "TOLLWAY_ROUTER_KEY", "TOLLWAY_GATEWAY_KEY")] == [""] * 3


def test_a_program_that_is_not_installed_is_named_with_what_to_do(tmp_path: Path) -> None:
    assert check_program(EngineConfig()) is None
    with pytest.raises(ConfigError, match=r"no program 'no-sglang' here: install SGLang 0\.5\.22 or later"):
        check_program(EngineConfig(kind="sglang", executable="no-sglang"))
    with pytest.raises(ConfigError, match=r"engine\.command: there is no program 'nothing'"):
        check_program(EngineConfig(kind="command", command=["nothing"]))


@pytest.mark.parametrize("name", ["tp-size", "tp_size", "tp", "tensor-parallel-size"])
def test_weights_for_one_rank_are_not_sent_to_engines_of_several(name: str) -> None:
    several = EngineConfig(kind="sglang", sglang={name: 2})
    for transport in ("tensor", "cuda_ipc"):
        with pytest.raises(ConfigError, match=rf'engine\.sglang\.{name} is 2.*refit_transport = "disk"'):
            check_transport(several, transport)
    check_transport(several, "disk")
    check_transport(EngineConfig(kind="sglang", sglang={name: 1, "dp-size": 2}), "tensor")
    check_transport(EngineConfig(), "tensor")
    check_transport(EngineConfig(kind="sglang", count=2), "cuda_ipc")


def test_handles_of_a_gpus_memory_are_not_for_an_engine_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r'engine\.kind = "sglang", or trainer\.refit_transport = "tensor"'):
        check_transport(EngineConfig(), "cuda_ipc")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "command"}, "wants engine.command"),
        ({"kind": "sglang", "sglang": {"model_path": "x", "port": 1}}, "may not name model-path, port"),
        ({"count": 2, "min_engines": 3}, "min_engines 3 is more than count 2"),
        ({"kind": "vllm"}, "kind"),
    ],
)
def test_what_cannot_be_started_is_no_configuration(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EngineConfig.model_validate(wrong)
