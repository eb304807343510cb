"""The composition root: picks every implementation, starts and stops the processes, joins the parts.

The only module that knows trainer, environments, sandboxes, session server and engine at once. What a part
does is in its own package; here is who is started when, and that nothing is left behind, whatever happens. How the
running fleet is watched is in ``fleet_watch``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiohttp

from tollway.envs.base import Environment, Sessions
from tollway.envs.config import EnvConfig
from tollway.envs.episode import Listener
from tollway.envs.harnesses.registry import open_harness
from tollway.envs.leases import Leases
from tollway.envs.registry import open_environment
from tollway.envs.runner import EpisodeRunner
from tollway.errors import ComponentLost, ConfigError, SandboxUnavailable
from tollway.fleet_watch import FleetKeeper, Members, PatientEpisodes
from tollway.fresh_model import write_fresh_model
from tollway.interrupts import Cancelling
from tollway.launching import check_program, check_transport, launcher
from tollway.router.engines import KEEP_ALIVE_S
from tollway.router.launch import EngineLauncher
from tollway.router.supervisor import ServerProcess
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.probe import probe
from tollway.sandboxes.registry import open_provider
from tollway.serving import say_ready
from tollway.session_server.client import SessionClient
from tollway.session_server.families.registry import load_family
from tollway.settings import ADMIN_KEY_VARIABLE, Settings, admin_key
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.options import missing
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.backends.shape import read_shape
from tollway.trainer.sft import optimizer_settings
from tollway.trainer.weights.payload import Weights
from tollway.trainer.weights.refit import Limits, Refit, Sharing
from tollway.trainer.weights.transport import DiskWeights, TensorWeights
from tollway.trainer.weights.turns import Turns

__all__ = [
    "JOIN_S",
    "Episodes",
    "Fleet",
    "base_model",
    "check_names",
    "check_sandbox",
    "open_backend",
    "open_engines",
    "open_episodes",
    "open_fleet",
    "open_http",
    "open_server",
    "preflight",
    "run_to_end",
    "serve_with_engines",
    "weights_dir",
    "weights_of",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")
_WEDGED_S = 2.0
"""How long tasks may take to end when the work is done."""
JOIN_S = 60.0
"""How long an engine that was started may take to join the session server."""
_SERVER_END_S = 10.0
"""Beyond its running turns, before a session server that was asked to end is made to."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The running processes of one run and the clients that reach them."""

    engines: EngineLauncher
    server: ServerProcess
    sessions: SessionClient
    provider: SandboxProvider
    members: Members
    """The engines as the session server knows them."""
    keeper: FleetKeeper

    @asynccontextmanager
    async def episodes(self, config: EnvConfig, listen: Listener | None = None) -> AsyncIterator[PatientEpisodes]:
        """A source of episodes over this fleet; it waits for engines that are started again."""
        async with open_episodes(config, self.sessions, self.provider, listen=listen) as found:
            yield PatientEpisodes(found.runner, self.keeper, found.environment)

    def turns(self, settings: Settings, backend: BackendProxy) -> Turns:
        """The way of weights into the engines; the session server hears of every step before it can matter."""
        trainer = settings.trainer
        refit = Refit(
            self.members.targets,
            weights_of(settings, backend),
            mode=trainer.pause_mode,
            notify=self.members.tell,
            limits=Limits(trainer.refit_timeout_s, settings.router.rollout_down_timeout_s),
            drained=partial(self.members.drained, limit_s=trainer.exact_drain_s),
            sharing=Sharing(backend, trainer.release_tags) if trainer.colocated else None,
        )
        self.keeper.refit = refit
        return Turns(refit, backend, shared=trainer.colocated)

    async def watch(self) -> None:
        """Keep engines running, bring weights to those that come back, and never return.

        Raises ``ComponentLost`` with last words when the session server ends, too few engines are left, or none was
        ready for ``router.rollout_down_timeout_s``.
        """
        await self.keeper.watch()


@dataclass(frozen=True, slots=True)
class Episodes:
    """An environment that is open, and what runs its episodes."""

    environment: Environment
    runner: EpisodeRunner


@asynccontextmanager
async def open_episodes(
    config: EnvConfig, sessions: Sessions, provider: SandboxProvider, *, listen: Listener | None = None
) -> AsyncIterator[Episodes]:
    """Open the environment and the harness that ``config`` names; close them at the end, within a bound."""
    environment = open_environment(config)
    harness = open_harness(config, environment)
    runner = EpisodeRunner(
        config, environment=environment, harness=harness, sessions=sessions, provider=provider, listen=listen
    )
    leases = Leases(config.release_timeout_s)
    try:
        await environment.open()
        yield Episodes(environment, runner)
    finally:
        await runner.aclose()
        await leases.release(environment.aclose(), f"closing environment {environment.name}")


def run_to_end(work: Coroutine[object, object, T]) -> T:
    """Run ``work`` in an event loop of its own. SIGTERM ends it as Ctrl-C does: cancelled, cleaned up."""

    async def supervised() -> T:
        if (task := asyncio.current_task()) is not None:
            cancelling.follow(asyncio.get_running_loop(), task)
        try:
            return await work
        finally:
            await _leave_no_task_to_wait_for()

    with Cancelling() as cancelling:
        try:
            return asyncio.run(supervised())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _leave_no_task_to_wait_for() -> None:
    """Closing a loop waits for every task: one of a user's part that ignores being cancelled would wait for ever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_WEDGED_S)
    for task in others:
        if not task.done():
            logger.error("task %s ignores being cancelled and is left behind", task.get_name())
            asyncio.tasks._unregister_task(task)


def check_names(settings: Settings) -> None:
    """Raise ``ConfigError`` for an environment, harness, sandbox provider or model family that does not exist."""
    open_harness(settings.env, open_environment(settings.env))
    open_provider(settings.sandbox)
    server = settings.server
    load_family(server.family, tokenizer=server.tokenizer, thinking=server.thinking, chat_template=server.chat_template)


def preflight(settings: Settings) -> None:
    """Find what cannot work before anything is started: names that do not exist, sandboxes that cannot run.

    Raises ``ConfigError`` or ``SandboxUnavailable`` with the remedy.
    """
    check_names(settings)
    if settings.eval.blank_tools:
        blank = settings.env.model_copy(update={"blank_tools": True})
        open_harness(blank, open_environment(blank))  # one that cannot do it shall say so before the training
    check_program(settings.engine)
    check_transport(settings.engine, settings.trainer.refit_transport)
    check_sandbox(settings)


def check_sandbox(settings: Settings) -> None:
    """Raise ``SandboxUnavailable`` where the local provider cannot run; without isolation, on request, it can."""
    if settings.sandbox.provider != "local" or settings.sandbox.local.unsafe:
        return
    found = probe(settings.sandbox.local)
    if not found.available:
        raise SandboxUnavailable(found.reason)
    if found.python is None:
        raise SandboxUnavailable(f"sandboxed tasks need a system Python: {found.reason}")


def base_model(settings: Settings) -> Path:
    """The directory of the model that the run starts from; written now when it is a fresh one."""
    if settings.model.path is not None:
        path = Path(settings.model.path)
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.path: no config.json in {path}; name a Hugging Face model directory")
        if not any(path.glob("*.safetensors")):
            raise ConfigError(
                f"model.path: no *.safetensors in {path}; name a directory with weights, "
                "or write one with random weights: tollway new-model DIR"
            )
        return path
    if settings.model.fresh is None:
        raise ConfigError("no model: set model.path, or [model.fresh] to start from random weights")
    path = settings.run_dir / "base_model"
    if not (path / "config.json").is_file():
        write_fresh_model(path, settings.model.fresh, seed=settings.run.seed)
    return path


def open_backend(settings: Settings, model: Path) -> BackendProxy:
    """The training process over ``model``; starts when it is entered.

    Raises ``ConfigError`` for what that process would find only after the engines were started: a model that the
    backends do not build, a framework that is not installed.
    """
    trainer = settings.trainer
    if (reason := missing(trainer.backend)) is not None:
        raise ConfigError(reason)
    read_shape(model)
    spec = BackendSpec(
        kind=trainer.backend,
        model_dir=str(model),
        seed=settings.run.seed,
        micro_batch_tokens=trainer.micro_batch_tokens,
        optimizer=optimizer_settings(trainer.optimizer),
        dtype=trainer.dtype,
        compile_layers=trainer.compile_layers,
        options=dict(trainer.megatron),
    )
    log = settings.run_dir / "logs" / "trainer.log"
    return BackendProxy(spec, log_path=log, timeout_s=trainer.backend_timeout_s)


def weights_dir(settings: Settings) -> Path:
    """Where ``trainer.refit_transport = "disk"`` writes weights."""
    return settings.trainer.weights_dir or settings.run_dir / "weights"


def weights_of(settings: Settings, backend: BackendProxy) -> Weights:
    """How the trainer's weights leave it, as ``trainer.refit_transport`` says."""
    trainer = settings.trainer
    if trainer.refit_transport == "disk":
        return DiskWeights(backend, weights_dir(settings))
    return TensorWeights(backend, bucket_bytes=trainer.bucket_bytes, transport=trainer.refit_transport)


@asynccontextmanager
async def open_fleet(settings: Settings, model: Path, *, journal: Path) -> AsyncIterator[Fleet]:
    """Start the engines over ``model`` and a session server in front of them; stop all at the end.

    Raises ``ComponentLost`` with the last words of a process that does not come up.
    """
    key = admin_key()
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(open_engines(settings, model, count=settings.engine.count))
        more = [f"server.journal={json.dumps(str(journal))}", "server.engine_wait_s=30.0"]
        server = await stack.enter_async_context(open_server(settings, engines.urls, key, more, engines=engines))
        http = await stack.enter_async_context(open_http())
        sessions = SessionClient(server.url, key, http=http)
        members = Members(sessions, http, control_s=settings.trainer.refit_timeout_s)
        stack.push_async_callback(members.aclose)
        await members.wait_joined(engines.urls, JOIN_S)
        provider = open_provider(settings.sandbox)
        stack.push_async_callback(provider.aclose)
        keeper = FleetKeeper(engines, server, members, needs_engines=True)
        yield Fleet(engines, server, sessions, provider, members, keeper)


@asynccontextmanager
async def open_engines(settings: Settings, model: Path, *, count: int) -> AsyncIterator[EngineLauncher]:
    """Start ``count`` engines as ``[engine]`` says; stop them at the end. Raises ``ComponentLost``."""
    engines = launcher(settings, model, shown=_shown(settings), count=count)
    await engines.start()
    try:
        yield engines
    finally:
        await engines.stop()


@asynccontextmanager
async def open_server(
    settings: Settings,
    urls: Sequence[str],
    key: str,
    overrides: Sequence[str],
    *,
    engines: EngineLauncher | None = None,
    grace_s: float = 5.0,
) -> AsyncIterator[ServerProcess]:
    """Start a session server in front of the engines at ``urls``; stop it at the end, within ``grace_s``.

    Raises ``ComponentLost``, of those ``engines`` that were started here rather than of the server.
    """
    argv = [sys.executable, "-P", "-m", "tollway", "serve", "-c", str(_shown(settings))]
    argv += [part for url in urls for part in ("--engine", url)]
    argv += [part for each in overrides for part in ("--set", each)]
    try:
        server = await ServerProcess.start(
            argv,
            name="session server",
            log=settings.run_dir / "logs" / "server.log",
            env={"OMP_NUM_THREADS": "1", ADMIN_KEY_VARIABLE: key},
        )
    except ComponentLost:
        if engines is not None and (lost := engines.dead()) is not None:
            raise lost from None  # the server's complaint is only that nobody answers
        raise
    try:
        yield server
    finally:
        await server.stop(grace_s=grace_s)


async def serve_with_engines(settings: Settings, count: int) -> None:
    """Start ``count`` engines and a session server in front of them, say ready, run until cancelled.

    Raises ``ConfigError`` before anything is started, ``ComponentLost`` when a part is lost for good.
    """
    key = admin_key()
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    model = settings.engine.model_path or base_model(settings)
    wait, grace_s = ["server.engine_wait_s=30.0"], settings.server.drain_s + _SERVER_END_S
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(open_engines(settings, model, count=count))
        server = await stack.enter_async_context(
            open_server(settings, engines.urls, key, wait, engines=engines, grace_s=grace_s)
        )
        http = await stack.enter_async_context(open_http())
        members = Members(SessionClient(server.url, key, http=http), http)
        stack.push_async_callback(members.aclose)
        await members.wait_joined(engines.urls, JOIN_S)
        say_ready(server.url, engines=engines.urls)
        # Whether to live without engines is for whoever uses a server; a run has a deadline.
        await FleetKeeper(engines, server, members, needs_engines=False).watch()


def _shown(settings: Settings) -> Path:
    """A file with the settings of this run, for the processes that it starts."""
    path = settings.run_dir / "settings.json"
    path.write_text(settings.model_dump_json(indent=2), encoding="utf-8")
    return path


def open_http() -> aiohttp.ClientSession:
    """Connections to servers and engines, as many as calls are in flight."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))
