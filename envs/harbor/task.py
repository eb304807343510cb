"""One Harbor task directory: what it says, what machine it needs, and what of it cannot be had here.

Reads files, runs nothing. A directory that breaks the format is a ``ConfigError``; one that asks for something
that no provider of ours has is ``Unsupported``, by name. Depends on ``schema``, ``dockerfile`` and the kernel.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tollway.envs.harbor.config import HarborConfig
from tollway.envs.harbor.dockerfile import Recipe, read_dockerfile
from tollway.envs.harbor.schema import EnvironmentPart, TaskFile, parse
from tollway.errors import ConfigError

__all__ = ["HarborTask", "Place", "Unsupported", "read_task", "resolved", "task_directories"]

Network = Literal["none", "public"] | tuple[str, ...]
DEFAULT_WORKDIR = "/app"
_RESERVED = ("/tests", "/solution", "/logs")
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")


class Unsupported(ConfigError):
    """The task is well formed and needs something that cannot be had here."""

    code = "harbor_unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A machine for a phase: the agent's, or the verifier's own."""

    image: str | None
    """``None``: the provider's own system."""
    workdir: str
    """Absolute inside; commands of the task run there."""
    env: Mapping[str, str]
    files: tuple[tuple[Path, str], ...]
    """Files and directories of this machine, each with its absolute path inside; of directories, the contents."""
    network: Network
    cpu: float | None
    mem_mb: int
    disk_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A whole task."""

    folder: Path
    file: TaskFile
    instruction: str
    agent: Place
    verifier: Place | None
    """``None``: grading shares the agent's machine."""
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its directory's name."""
        return self.folder.name

    @property
    def tests(self) -> Path:
        """What is laid at /tests when the agent is done."""
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        """What ``solve`` lays at /solution."""
        return self.folder / "solution"


def task_directories(path: Path | None) -> tuple[Path, ...]:
    """The task directories at ``path``, which is one or has some. Raises ``ConfigError``."""
    if path is None:
        raise ConfigError("env.harbor.tasks is not set; name a task directory, or a directory of task directories")
    if not path.is_dir():
        raise ConfigError(f"env.harbor.tasks: no directory at {path}")
    path = path.resolve()
    if (path / "task.toml").is_file():
        return (path,)
    found = tuple(sorted(each.parent for each in path.glob("*/task.toml")))
    if not found:
        raise ConfigError(f"env.harbor.tasks: no task.toml in {path} or in a directory below it")
    return found


def read_task(folder: Path, config: HarborConfig, environ: Mapping[str, str]) -> HarborTask:
    """Read and check one directory. Raises ``ConfigError``, or ``Unsupported`` that names what is missing."""
    file = parse(_text(folder / "task.toml"), str(folder / "task.toml"))
    _refuse(folder, file)
    instruction = _without_canary(_text(folder / "instruction.md"))
    if not instruction.strip():
        raise ConfigError(f"{folder / 'instruction.md'} is empty")
    for name in ("tests", "environment", "solution"):
        for _ in tree_files(folder / name):
            pass  # a link that leaves the task is refused here
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder}: tests/test.sh is missing; it is what grades the task")
    network = file.agent if file.agent.network_mode is not None else file.environment
    agent = _place(folder, file.environment, "environment", config, environ, _network(network, config))
    verifier = None
    if file.verifier.separate:
        part = file.verifier.environment or file.environment
        source = file.verifier if file.verifier.network_mode is not None else part
        own = any((folder / "tests" / each).is_file() for each in ("Dockerfile", "docker-compose.yaml"))
        verifier = _place(folder, part, "tests" if own else "environment", config, environ, _network(source, config))
    elif file.verifier.network_mode is not None and _network(file.verifier, config) != agent.network:
        raise Unsupported(
            f"{folder.name}: [verifier].network_mode differs from the agent's, and they share one machine with one "
            'network; use environment_mode = "separate"'
        )
    task = HarborTask(
        folder=folder,
        file=file,
        instruction=instruction,
        agent=agent,
        verifier=verifier,
        verifier_env=resolved(file.verifier.env, f"{folder.name}: verifier.env", config, environ),
        solution_env=resolved(file.solution.env, f"{folder.name}: solution.env", config, environ),
    )
    _check_artifacts(task)
    return task


def tree_files(folder: Path) -> Iterator[Path]:
    """The regular files below ``folder``, in order. Raises ``ConfigError`` for links that leave the task."""
    root = folder.parent.resolve()
    if not folder.is_dir():
        return
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise ConfigError(f"{path} is a link that leaves the task directory")
        if path.is_file():
            yield path


def resolved(
    variables: Mapping[str, str], where: str, config: HarborConfig, environ: Mapping[str, str]
) -> dict[str, str]:
    """Values with ``${NAME}`` and ``${NAME:-default}`` filled in from what the user lets through."""
    found = {}
    for name, value in variables.items():
        template = _TEMPLATE.fullmatch(value)
        if template is None:
            found[name] = value
            continue
        wanted, default = template[1], template[2]
        if wanted in config.pass_env and wanted in environ:
            found[name] = environ[wanted]
        elif default is not None:
            found[name] = default
        elif wanted in config.pass_env:
            raise ConfigError(f"{where}.{name} reads the environment variable {wanted}, which is not set")
        else:
            raise ConfigError(
                f"{where}.{name} reads the environment variable {wanted}; list it in env.harbor.pass_env to allow that"
            )
    return found


def _place(
    folder: Path,
    part: EnvironmentPart,
    context: str,
    config: HarborConfig,
    environ: Mapping[str, str],
    network: Network,
) -> Place:
    recipe, image = Recipe(), part.docker_image or config.images.get(folder.name)
    if image is None:
        recipe = _recipe(folder, context)
        if recipe.problem and "*" in config.images:
            image, recipe = config.images["*"], Recipe()
        elif recipe.problem:
            raise Unsupported(
                f"{folder.name}: {context}/Dockerfile cannot be had without building an image ({recipe.problem}); "
                f'build it and name it: [env.harbor.images] "{folder.name}" = "IMAGE"'
            )
        elif config.base_images:
            image = recipe.base
    workdir = part.workdir or recipe.workdir or (DEFAULT_WORKDIR if image is None else None)
    if workdir is None:
        workdir = DEFAULT_WORKDIR
    return Place(
        image=image,
        workdir=posixpath.normpath(workdir),
        env={**recipe.env, **resolved(part.env, f"{folder.name}: environment.env", config, environ)},
        files=_files(folder, context, recipe, posixpath.normpath(workdir), own_system=image is None),
        network=network,
        cpu=part.cpus,
        mem_mb=part.memory_mb or config.memory_mb,
        disk_mb=part.storage_mb or config.storage_mb,
    )


def _recipe(folder: Path, context: str) -> Recipe:
    """The Dockerfile's; without one, the files of ``environment/`` lie in the working directory."""
    source = folder / context / "Dockerfile"
    if source.is_file():
        return read_dockerfile(_text(source))
    if (folder / context).is_dir() and context == "environment":
        return read_dockerfile(f"FROM scratch\nWORKDIR {DEFAULT_WORKDIR}\nCOPY . ./")
    return Recipe(workdir=DEFAULT_WORKDIR)


def _files(
    folder: Path, context: str, recipe: Recipe, workdir: str, *, own_system: bool
) -> tuple[tuple[Path, str], ...]:
    files: list[tuple[Path, str]] = []
    for copy in recipe.copies:
        for source in copy.sources:
            path = folder / context / source
            if not path.exists():
                raise ConfigError(f"{folder.name}: {context}/Dockerfile copies {source!r}, which is not there")
            target = copy.target
            if path.is_file() and target.endswith("/"):
                target += path.name
            target = posixpath.normpath(target)
            if posixpath.join(target, "").startswith("/tests/"):
                continue  # laid there for grading, and only then
            if own_system and not _within(target, workdir):
                raise Unsupported(
                    f"{folder.name}: {context}/Dockerfile copies to {target}, outside of the working directory "
                    f"{workdir}; that needs an image: set env.harbor.base_images or env.harbor.images"
                )
            files.append((path, target))
    return tuple(files)


def _network(part: object, config: HarborConfig) -> Network:
    mode, hosts = getattr(part, "network_mode", None), getattr(part, "allowed_hosts", None)
    if config.network == "none" or mode == "no-network":
        return "none"
    if mode == "allowlist":
        return tuple(hosts or ()) or "none"
    return "public" if mode == "public" or config.network == "default" else "none"


def _refuse(folder: Path, file: TaskFile) -> None:
    parts = {"environment": file.environment, "verifier.environment": file.verifier.environment}
    for name, part in parts.items():
        if part is None:
            continue
        for key, said in {
            "os": part.os == "windows", "gpus": bool(part.gpus), "tpu": part.tpu is not None,
            "mcp_servers": bool(part.mcp_servers), "skills_dir": part.skills_dir is not None,
            "healthcheck": part.healthcheck is not None,
        }.items():  # fmt: skip
            if said:
                raise Unsupported(f"{folder.name}: {name}.{key} = {getattr(part, key)!r} cannot be had here")
    if file.steps:
        raise Unsupported(f"{folder.name}: tasks of several [[steps]] cannot be run here")
    for context in ("environment", "tests"):
        if (folder / context / "docker-compose.yaml").is_file():
            raise Unsupported(
                f"{folder.name}: {context}/docker-compose.yaml needs Docker Compose, which is not run here"
            )
    services = {each.service for each in file.artifacts} | {each.service for each in file.verifier.collect}
    if others := services - {None, "main"}:
        raise Unsupported(f"{folder.name}: the service {sorted(map(str, others))[0]!r} needs Docker Compose")


def _check_artifacts(task: HarborTask) -> None:
    for place in (task.agent, task.verifier):
        if place is None or place.image is not None or task.verifier is None:
            continue
        for artifact in task.file.artifacts:
            source = posixpath.normpath(posixpath.join(place.workdir, artifact.source))
            if not any(_within(source, each) for each in (place.workdir, *_RESERVED)):
                raise Unsupported(
                    f"{task.name}: the artifact {source} lies outside of the working directory {place.workdir}; that "
                    "needs an image: set env.harbor.base_images or env.harbor.images"
                )


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _without_canary(text: str) -> str:
    """Lines at the top that mark benchmark data are not for agents."""
    lines = text.split("\n")
    while lines and _CANARY.match(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).lstrip("\n")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; a Harbor task has one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
