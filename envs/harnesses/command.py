"""A harness that is a command: it runs in the sandbox, reaches its model over the bridge, and its exit status says
whether the agent is done.

One run is one command. It is never started a second time in the same sandbox: what infrastructure breaks, ends the
episode. Secrets reach the harness by files and its own environment, never by arguments, and are taken out of its log.
Depends on ``envs.base``, ``envs.bridge`` and siblings; knows no particular harness.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

from tollway.envs.base import AgentRun, Desk, Environment, Harness, Outfit, Task
from tollway.envs.beside import EXEC_KEY, ExecSocket
from tollway.envs.bridge import INSIDE, Bridge, BridgeLimits
from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.links import BridgeLink, Link, PublicLink
from tollway.envs.harnesses.recipes import HOME, Kit, Place, Recipe, fill
from tollway.errors import (
    CapabilityMissing,
    CapacityExceeded,
    ConfigError,
    ContextLengthExceeded,
    EpisodeFailed,
    TollwayError,
)
from tollway.sandboxes.base import ExecResult, Sandbox, SandboxSpec
from tollway.session_server.client import Session

__all__ = ["CommandHarness"]

logger = logging.getLogger(__name__)
_PYTHON = ("/usr/bin/python3", "-I", "-S")
_MARGIN_S = 5.0
"""Before the agent phase ends, so that a run that takes too long ends as one, with its log and its turns."""
_GRACE_S = 120.0
"""For the sandbox of a harness beside the task's: to be killed before its TTL ends it."""
_BESIDE_MEM_MB = 512
_BRIDGE_WANTED = (
    "the harness reaches its model by a socket; set env.command.public_url to an address of the session server that "
    "sandboxes can reach, or use the provider local or docker"
)
_TAIL = 2000
_MAX_ANSWER = 1 << 16


class CommandHarness(Harness):
    """Runs ``env.command.argv``. The harnesses of this package override ``kit`` and ``recipe``."""

    title: ClassVar[str] = "the harness's command"
    """What error texts call it."""
    works_beside: ClassVar[bool] = True
    """Whether it can leave the task's sandbox to ``tollway-exec``."""

    def __init__(self, config: EnvConfig, environment: Environment) -> None:
        self.config = config.command
        self._agent_timeout_s = config.agent_timeout_s
        self._links: dict[str, Link] = {}
        if type(self) is CommandHarness and not self.config.argv:
            raise ConfigError('env.command.argv is empty; want the command to run, for example ["my-agent", "--auto"]')
        missing = [] if self.config.public_url else [path for path in self.config.mounts.values() if not path.exists()]
        if missing:
            raise ConfigError(f"env.command.mounts: no {missing[0]} on this machine")
        if config.blank_tools:
            raise ConfigError(
                f"env.blank_tools (--blank-tools) hides the output of tools of ours, and those of {self.title} are its "
                'own; use it with env.harness = "tool-loop"'
            )
        if any("{token}" in part for part in self.config.argv):
            raise ConfigError(
                "env.command.argv must not hold {token}: arguments can be read by others; use env.command.env or files"
            )
        if self.config.where == "beside":
            self._check_beside()
            self.sandboxes = 2
        self._kit = Kit() if self.config.public_url is not None else self.kit()

    def kit(self) -> Kit:
        """What the sandbox needs for it. Called once, at the start: ``ConfigError`` says what is missing."""
        return Kit()

    def recipe(self, place: Place) -> Recipe:
        """What one run consists of, besides what ``[env.command]`` adds; all of it are templates."""
        return Recipe(argv=(), takes_arguments=True)

    # -- Harness -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def outfit(self, task: Task, session: Session) -> AsyncIterator[Outfit]:
        """The bridge of this episode and the harness's own files."""
        limits = BridgeLimits(body_bytes=self.config.max_body_mb << 20, connections=self.config.max_connections)
        async with self._linked(session, limits) as link:
            self._links[session.session_id] = link
            try:
                beside = self.config.where == "beside"
                yield Outfit(this_machine=_BRIDGE_WANTED) if beside else self._outfit(link)
            finally:
                del self._links[session.session_id]

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        """Run the command once. Raises ``EpisodeFailed`` or the model's error when it is no run of an agent."""
        link = self._links[desk.session.session_id]
        place = self._place(task, desk, link)
        whole_s = task.limits.agent_s or self._agent_timeout_s
        limit_s = whole_s - min(_MARGIN_S, whole_s / 2)
        mark = secrets.token_hex(16)
        ends = time.monotonic() + limit_s
        async with self._machine(task, desk, link, limit_s) as sandbox:
            done = await sandbox.exec_agent(
                [*_PYTHON, *link.program],
                timeout_s=max(1.0, ends - time.monotonic()),
                stdin=json.dumps(self._spec(place, link, mark)).encode(),
            )
        log = link.without_secrets(done.stdout + done.stderr)
        if (said := _not_started(log, mark)) is not None:
            raise EpisodeFailed(f"{self.title} did not start: {said}")
        turns = await link.turns()
        finish = self._finish(done, link, turns, log)
        return AgentRun(
            turns=turns,
            submitted=finish == "submitted",
            finish=finish,
            facts={
                **desk.tools.facts,
                "turns": float(turns),
                "refused_calls": float(link.tally.refused),
                **({} if done.exit_code is None else {"exit_code": float(done.exit_code)}),
            },
            answer=link.without_secrets(done.stdout)[-_MAX_ANSWER:].decode("utf-8", "replace").strip(),
            log=log,
        )

    # -- pieces ------------------------------------------------------------------------------------

    def _check_beside(self) -> None:
        if not self.works_beside:
            raise ConfigError(
                f'env.command.where="beside": the tools of {self.title} work where it runs; want "inside", or the '
                "harness command or mini-swe-agent"
            )
        if self.config.public_url is not None:
            raise ConfigError('env.command.where="beside" needs sockets of this machine, which public_url does without')

    def _outfit(self, link: Link) -> Outfit:
        """What the sandbox that the command runs in has to have."""
        return Outfit(
            mounts={**link.mounts, **self._kit.mounts, **self.config.mounts},
            mem_mb=max(self._kit.mem_mb, self.config.mem_mb),
            pids=max(self._kit.pids, self.config.pids),
            network="public" if link.public or self.config.network == "public" else None,
            this_machine=None if link.public else _BRIDGE_WANTED,
        )

    @asynccontextmanager
    async def _machine(self, task: Task, desk: Desk, link: Link, limit_s: float) -> AsyncIterator[Sandbox]:
        """The sandbox that the command runs in: the task's, or one of its own with a way into the task's."""
        if desk.sandbox is None:
            raise CapabilityMissing(f"{task.task_id} has no sandbox for a command to run in; use another harness")
        if self.config.where == "inside":
            yield desk.sandbox
            return
        if desk.provider is None or not isinstance(link, BridgeLink):
            raise CapabilityMissing("a harness beside the task's sandbox needs a provider for its own and a bridge")
        outfit = self._outfit(link)
        spec = SandboxSpec(
            ttl_s=limit_s + _GRACE_S,
            labels={"session": desk.session.session_id, "task": task.task_id, "role": "harness"},
            mounts=outfit.mounts,
            mem_mb=max(_BESIDE_MEM_MB, outfit.mem_mb),
            pids=outfit.pids,
            network=outfit.network or "none",
        )
        async with ExecSocket(link.bridge, desk.sandbox, timeout_s=self.config.exec_timeout_s) as way:
            own = await desk.provider.create(spec)
            try:
                yield own
            finally:
                await own.kill()
            if way.failure is not None:
                raise way.failure

    @asynccontextmanager
    async def _linked(self, session: Session, limits: BridgeLimits) -> AsyncIterator[Link]:
        if self.config.public_url is not None:
            yield PublicLink(session, self.config.public_url)
            return
        port = self.config.port
        if self.config.network == "public":
            # Its loopback may be the machine's, with other episodes on it.
            port = 20_000 + secrets.randbelow(12_000)
        async with Bridge(session, limits=limits) as bridge:
            yield BridgeLink(bridge, port)

    def _place(self, task: Task, desk: Desk, link: Link) -> Place:
        texts = [task.messages[-1].content, *(message.content for message in desk.opening)]
        return Place(
            base_url=link.base_url,
            token=link.key,
            model=self.config.model,
            context_tokens=self.config.context_tokens,
            instruction="\n\n".join(texts),
        )

    def _spec(self, place: Place, link: Link, mark: str) -> dict[str, object]:
        """What the program inside is told."""
        recipe = self.recipe(place)
        added = self.config.argv if recipe.takes_arguments else ()
        argv = [fill(part, place) for part in (*recipe.argv, *added)]
        if any(place.token in part for part in argv):
            raise ConfigError(f"{self.title} would show its key to everyone in its arguments")
        beside = {EXEC_KEY: "{token}"} if self.config.where == "beside" else {}
        files = {"{instruction_file}": "{instruction}", **beside, **recipe.files, **self.config.files}
        env = {**recipe.env, **self.config.env}
        return {
            "mark": mark,
            "ports": link.ports,
            "files": [[_below_home(fill(path, place)), fill(text, place), 0o600] for path, text in files.items()],
            "path": [*self._kit.path, *((INSIDE,) if beside else ())],
            "env": {"HOME": HOME, "TERM": "dumb", "NO_COLOR": "1"} | {name: fill(env[name], place) for name in env},
            "argv": argv,
            "stdin": fill(recipe.stdin or self.config.stdin, place),
        }

    def _finish(self, done: ExecResult, link: Link, turns: int, log: bytes) -> str:
        """How the run ended, for what it is: an agent's end, or one that is nobody's fault and raises."""
        failure = link.tally.failure
        if failure is not None and _is_infrastructure(failure):
            raise failure
        if turns == 0:
            how = "ran out of time" if done.timed_out else f"ended with exit status {done.exit_code}"
            raise EpisodeFailed(f"{self.title} {how} before its model answered once; it said: {_tail(log)}")
        if done.timed_out:
            return "timeout"
        if done.exit_code in self.config.submitted_codes:
            return "submitted"
        return "context" if isinstance(failure, ContextLengthExceeded) else "stopped"


def _is_infrastructure(error: TollwayError) -> bool:
    return error.status >= 500 or isinstance(error, CapacityExceeded) or error.retryable


def _not_started(log: bytes, mark: str) -> str | None:
    """What the program inside said when it could not start the command."""
    at = log.find(mark.encode())
    return None if at < 0 else log[at + len(mark) :].split(b"\n", 1)[0].decode("utf-8", "replace").strip()


def _below_home(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path}"


def _tail(log: bytes) -> str:
    return log[-_TAIL:].decode("utf-8", "replace").strip() or "nothing"
