"""Harnesses that the commands under test open by their path."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from tollway.envs.base import AgentRun, Desk, Environment, Harness, Task
from tollway.envs.config import EnvConfig
from tollway.envs.micro_swe.environment import MicroSwe
from tollway.errors import ConfigError, SandboxGone


class Some(Harness):
    """Solves tasks 0 and 1, loses the sandbox of 2, and never ends with the others."""

    needs_model: ClassVar[bool] = False

    def __init__(self, config: EnvConfig, environment: Environment) -> None:
        self._environment = environment

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        number = int(task.task_id.rpartition("/")[2])
        if number == 2:
            raise SandboxGone("evicted by its provider")
        if number > 2 or desk.sandbox is None:
            await asyncio.Event().wait()
        else:
            await self._environment.solve(task, desk.sandbox)
        return AgentRun(turns=0, submitted=True, finish="submitted", log=b"solved it")


class Noted(MicroSwe):
    """Notes what is done with it in files, and never ends closing."""

    async def open(self) -> None:
        Path("opened").touch()

    async def aclose(self) -> None:
        Path("closed").touch()
        await asyncio.Event().wait()


class Broken(Noted):
    """Cannot be opened, and gets half-way."""

    async def open(self) -> None:
        await super().open()
        raise ConfigError("the server of tasks does not start")


class Wedged(Some):
    """Ignores being cancelled."""

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
