"""From ``[engine]`` to the command line that starts one engine. Starts nothing; ``router.launch`` does.

Options of upstream servers pass through unread. Depends on the configuration tree.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tollway.engine.config import EngineConfig, Option
from tollway.errors import ConfigError
from tollway.router.facts import NEEDED_RELEASE
from tollway.router.gateway import KEY_VARIABLE as GATEWAY_KEY_VARIABLE
from tollway.router.launch import EngineLauncher, EnginePlan, RestartRule
from tollway.router.placement_link import KEY_VARIABLE as ROUTER_KEY_VARIABLE
from tollway.settings import ADMIN_KEY_VARIABLE, Settings

__all__ = ["check_program", "check_transport", "engine_plan", "launcher"]

_RANKS = ("tp-size", "tp", "tensor-parallel-size")
"""What SGLang calls the number of processes that share one copy of the weights."""
_LAST_PORT = 65_535


def launcher(settings: Settings, model: Path, *, shown: Path, count: int) -> EngineLauncher:
    """The launcher of ``count`` engines over ``model``; ``shown`` is a file with the settings of this run.

    Raises ``ConfigError`` for engines that cannot be started so.
    """
    config = settings.engine
    if config.port and config.port + count - 1 > _LAST_PORT:
        raise ConfigError(
            f"engine.port is {config.port}, and {count} engines take one port after the other, up to "
            f"{config.port + count - 1}, while ports end at {_LAST_PORT}: set a lower one, or 0 for any that are free"
        )
    return EngineLauncher(
        engine_plan(config, model, shown),
        count=count,
        logs=settings.run_dir / "logs",
        rule=RestartRule(
            restarts=config.restarts, window_s=config.restart_window_s, floor=min(config.min_engines, count)
        ),
    )


def engine_plan(config: EngineConfig, model: Path, shown: Path) -> EnginePlan:
    """How ``config`` says that an engine over ``model`` is started. Raises ``ConfigError``."""
    # Keys are for nobody but the session server and its owner.
    env = dict.fromkeys((ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE, GATEWAY_KEY_VARIABLE), "")
    if config.kind == "embedded":
        env["OMP_NUM_THREADS"] = "1"
        argv = [sys.executable, "-P", "-m", "tollway", "engine", "-c", str(shown), "--model-path", str(model)]
        argv += ["--host", "{host}", "--port", "{port}"]
    elif config.kind == "sglang":
        argv = [check_program(config) or config.executable, "serve", "--model-path", str(model)]
        argv += ["--host", "{host}", "--port", "{port}", *_flags(config.sglang)]
    else:
        check_program(config)
        argv = [part.replace("{model_path}", str(model)) for part in config.command]
    return EnginePlan(
        argv=tuple(argv),
        says_ready=config.kind == "embedded",
        host=config.host,
        port=config.port,
        env=env,
        ready_timeout_s=config.ready_timeout_s,
    )


def check_program(config: EngineConfig) -> str | None:
    """Where the program of a foreign engine is; ``None`` for the embedded one. Raises ``ConfigError``."""
    if config.kind == "embedded":
        return None
    named = config.executable if config.kind == "sglang" else config.command[0]
    found = shutil.which(named)
    if found is not None:
        return found
    if config.kind == "sglang":
        raise ConfigError(
            f"engine.kind is sglang, and there is no program {named!r} here: install SGLang {NEEDED_RELEASE} or later "
            "in an environment of its own (pip install sglang) and set engine.executable to its bin/sglang"
        )
    raise ConfigError(f"engine.command: there is no program {named!r} here; name one by its path")


def check_transport(config: EngineConfig, transport: str) -> None:
    """Raise ``ConfigError`` for engines that the weights of ``transport`` do not reach."""
    if config.kind == "embedded" and transport == "cuda_ipc":
        raise ConfigError(
            "trainer.refit_transport is cuda_ipc, and the embedded engine computes on the CPU: set engine.kind = "
            '"sglang", or trainer.refit_transport = "tensor"'
        )
    if config.kind != "sglang" or transport == "disk":
        return
    for name, value in config.sglang.items():
        if name.lstrip("-").replace("_", "-") in _RANKS and str(value) != "1":
            raise ConfigError(
                f"engine.sglang.{name} is {value}, and trainer.refit_transport {transport!r} sends weights to engines "
                'of one tensor-parallel rank: set trainer.refit_transport = "disk", or start more engines of one rank'
            )


def _flags(options: dict[str, Option]) -> list[str]:
    """Command-line flags; what is false is left out.

    >>> _flags({"tp_size": 2, "enable-metrics": True, "enable-lora": False, "lora-paths": ["a", "b"]})
    ['--tp-size', '2', '--enable-metrics', '--lora-paths', 'a', 'b']
    """
    flags: list[str] = []
    for name, value in options.items():
        if value is False:
            continue
        flags.append("--" + name.lstrip("-").replace("_", "-"))
        if isinstance(value, list):
            flags += value
        elif value is not True:
            flags.append(str(value))
    return flags
