"""The fields of a Harbor ``task.toml``, schema 1.4, typed and strict. Reads no files but what it is given.

Every key of the format is known here, also those that no provider of ours can honour: ``task`` refuses those by
name. Depends on pydantic and the kernel's errors.
"""

from __future__ import annotations

import math
import re
import tomllib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from tollway.errors import ConfigError

__all__ = ["AgentPart", "ArtifactPart", "EnvironmentPart", "TaskFile", "VerifierPart", "parse"]

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
NetworkMode = Literal["no-network", "public", "allowlist"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Networked(_Part):
    network_mode: NetworkMode | None = None
    """``None``: not said here."""
    allowed_hosts: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _hosts_need_the_list(self) -> _Networked:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError('allowed_hosts needs network_mode = "allowlist"')
        return self


class HealthcheckPart(_Part):
    """A command that must succeed before the agent starts."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class TpuPart(_Part):
    """A TPU slice."""

    type: str
    topology: str


class McpServerPart(_Part):
    """An MCP server beside the agent."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict)


class EnvironmentPart(_Networked):
    """``[environment]``: the machine."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: TpuPart | None = None
    mcp_servers: tuple[McpServerPart, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: HealthcheckPart | None = None
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_names(cls, raw: object) -> object:
        """``memory``, ``storage`` and ``allow_internet`` of older tasks."""
        if not isinstance(raw, dict):
            return raw
        raw = dict(raw)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if isinstance(said := raw.pop(old, None), str):
                size = _megabytes(said)
                if raw.setdefault(new, size) != size:
                    raise ValueError(f"{old} = {said!r} and {new} = {raw[new]} differ")
        internet = raw.pop("allow_internet", None)
        if internet is not None and "network_mode" not in raw and "allowed_hosts" not in raw:
            raw["network_mode"] = "public" if internet else "no-network"
        return raw

    @field_validator("os", mode="before")
    @classmethod
    def _lower(cls, raw: object) -> object:
        return raw.lower() if isinstance(raw, str) else raw

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        if path is not None and not path.startswith("/"):
            raise ValueError("an absolute path is wanted")
        return path


class AgentPart(_Networked):
    """``[agent]``: the agent's phase."""

    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None


class CollectPart(_Part):
    """A command that runs after the agent, before artifacts are taken."""

    command: str
    service: str = "main"
    timeout_sec: float = Field(default=60.0, gt=0)
    user: str | int | None = None


class VerifierPart(_Networked):
    """``[verifier]``: the grader's phase."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentPart | None = None
    collect: tuple[CollectPart, ...] = ()

    @model_validator(mode="after")
    def _one_place(self) -> VerifierPart:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('environment_mode = "shared" and [verifier.environment] exclude each other')
        return self

    @property
    def separate(self) -> bool:
        """Whether grading has a machine of its own."""
        return self.environment_mode == "separate" or self.environment is not None


class SolutionPart(_Part):
    """``[solution]``: variables of the reference solution."""

    env: dict[str, str] = Field(default_factory=dict)


class ArtifactPart(_Part):
    """A file or directory that the agent leaves for the grader."""

    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None

    @field_validator("source")
    @classmethod
    def _inside(cls, path: str) -> str:
        if not path.strip("/") or ".." in path.split("/"):
            raise ValueError("a path without '..' is wanted")
        return path


def _long(raw: object) -> object:
    """Artifacts may be given by their source alone."""
    return [{"source": each} if isinstance(each, str) else each for each in raw] if isinstance(raw, list) else raw


class AuthorPart(_Part):
    """An author."""

    name: str
    email: str | None = None


class PackagePart(_Part):
    """``[task]``: its name in a registry."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    version: str | None = Field(default=None, min_length=1)
    description: str = ""
    authors: tuple[AuthorPart, ...] = ()
    keywords: tuple[str, ...] = ()


class StepPart(_Part):
    """One of ``[[steps]]``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")
    agent: AgentPart = AgentPart()
    verifier: VerifierPart = VerifierPart()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckPart | None = None
    artifacts: tuple[ArtifactPart, ...] = ()

    _long_form = field_validator("artifacts", mode="before")(_long)


class TaskFile(_Part):
    """A whole ``task.toml``."""

    schema_version: str = "1.4"
    task: PackagePart | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    verifier: VerifierPart = VerifierPart()
    agent: AgentPart = AgentPart()
    environment: EnvironmentPart = EnvironmentPart()
    solution: SolutionPart = SolutionPart()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: tuple[StepPart, ...] | None = None
    artifacts: tuple[ArtifactPart, ...] = ()

    _long_form = field_validator("artifacts", mode="before")(_long)

    @model_validator(mode="before")
    @classmethod
    def _old_version(cls, raw: object) -> object:
        if isinstance(raw, dict) and "version" in raw:
            raw = dict(raw)
            raw.setdefault("schema_version", raw.pop("version"))
        return raw

    @field_validator("schema_version")
    @classmethod
    def _known(cls, version: str) -> str:
        if version not in VERSIONS:
            raise ValueError(f"schema {version!r} is unknown here; {VERSIONS[0]} to {VERSIONS[-1]} are read")
        return version

    @field_validator("steps")
    @classmethod
    def _unique(cls, steps: tuple[StepPart, ...] | None) -> tuple[StepPart, ...] | None:
        names = [step.name.casefold() for step in steps or ()]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return steps


def parse(text: str, where: str) -> TaskFile:
    """The file's fields. Raises ``ConfigError`` that names every wrong one.

    >>> parse('[agent]\\ntimeout_sec = 60', "task.toml").agent.timeout_sec
    60.0
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    tree = {key: value for key, value in tree.items() if key != "metadata"} | {"metadata": {}}
    try:
        return TaskFile.model_validate(tree)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"]) or "(top level)"
            said = str(problem["msg"]).removeprefix("Value error, ")
            unknown = problem["type"] == "extra_forbidden"
            lines.append(
                f"  {key}: no key of this format" if unknown else f"  {key}: {said} (found {problem['input']!r})"
            )
        raise ConfigError("\n".join([f"{where} is no Harbor task file:", *lines])) from None


def _megabytes(size: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMK])\s*", size.upper())
    if found is None:
        raise ValueError(f"a size such as '2G' or '512M' is wanted, found {size!r}")
    return math.floor(float(found[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[found[2]])
