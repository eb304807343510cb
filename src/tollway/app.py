"""The composition root: picks every implementation, starts and stops the processes, joins the parts.

The only module that knows trainer, environments, sandboxes, session server and engine at once. What a part
does is in its own package; here is who is started when, and that nothing is left behind, whatever happens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp

from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.tool_loop import ToolLoop
from tollway.envs.registry import open_environment
from tollway.envs.runner import EpisodeRunner
from tollway.errors import ComponentLost, ConfigError, SandboxUnavailable
from tollway.fresh_model import write_fresh_model
from tollway.router.engines import KEEP_ALIVE_S, EngineClient, Timeouts
from tollway.router.supervisor import ServerProcess
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.probe import probe
from tollway.sandboxes.registry import open_provider
from tollway.session_server.client import SessionClient
from tollway.session_server.families.registry import load_family
from tollway.settings import ADMIN_KEY_VARIABLE, Settings, admin_key
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.sft import optimizer_settings
from tollway.trainer.weights.refit import Refit

__all__ = ["Fleet", "base_model", "check_names", "open_backend", "open_fleet", "preflight", "run_to_end"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The running processes of one run and the clients that reach them."""

    engine: ServerProcess
    server: ServerProcess
    engine_client: EngineClient
    sessions: SessionClient
    provider: SandboxProvider
    engine_id: str
    """Name of the engine at the session server."""

    def episodes(self, config: EnvConfig) -> EpisodeRunner:
        """A source of episodes over this fleet."""
        return EpisodeRunner(
            config,
            environment=open_environment(config),
            harness=ToolLoop(max_turns=config.max_turns, blank_tools=config.blank_tools),
            sessions=self.sessions,
            provider=self.provider,
        )

    def refit(self, settings: Settings) -> Refit:
        """The way of weights into the engine; the session server hears of every flush before it can matter."""

        async def notify(_url: str, version: int | None, flushed: bool) -> None:
            await self.sessions.refit(self.engine_id, version, flushed=flushed)

        trainer = settings.trainer
        return Refit([self.engine_client], mode=trainer.pause_mode, notify=notify, timeout_s=trainer.refit_timeout_s)

    async def watch(self) -> None:
        """Raise ``ComponentLost`` with its last words when the engine or the session server ends."""
        waiting = {asyncio.create_task(process.wait()): process for process in (self.engine, self.server)}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            raise waiting[done.pop()].lost()
        finally:
            for task in waiting:
                task.cancel()


def run_to_end(work: Coroutine[object, object, T]) -> T:
    """Run ``work`` in an event loop of its own. SIGTERM ends it as Ctrl-C does: cancelled, cleaned up."""

    async def supervised() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is not None:
            loop.add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def check_names(settings: Settings) -> None:
    """Raise ``ConfigError`` for an environment, sandbox provider or model family that does not exist."""
    open_environment(settings.env)
    open_provider(settings.sandbox)
    server = settings.server
    load_family(server.family, tokenizer=server.tokenizer, thinking=server.thinking, chat_template=server.chat_template)


def preflight(settings: Settings) -> None:
    """Find what cannot work before anything is started: names that do not exist, sandboxes that cannot run.

    Raises ``ConfigError`` or ``SandboxUnavailable`` with the remedy.
    """
    check_names(settings)
    if settings.sandbox.provider != "local":
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
    """The training process over ``model``; starts when it is entered."""
    trainer = settings.trainer
    spec = BackendSpec(
        kind=trainer.backend,
        model_dir=str(model),
        seed=settings.run.seed,
        micro_batch_tokens=trainer.micro_batch_tokens,
        optimizer=optimizer_settings(trainer.optimizer),
        options=dict(trainer.megatron),
    )
    log = settings.run_dir / "logs" / "trainer.log"
    return BackendProxy(spec, log_path=log, timeout_s=trainer.backend_timeout_s)


@asynccontextmanager
async def open_fleet(settings: Settings, model: Path, *, journal: Path) -> AsyncIterator[Fleet]:
    """Start an engine over ``model`` and a session server in front of it; stop both at the end.

    Raises ``ComponentLost`` with the last words of a process that does not come up.
    """
    logs, key = settings.run_dir / "logs", admin_key()
    shown = settings.run_dir / "settings.json"
    shown.write_text(settings.model_dump_json(indent=2), encoding="utf-8")
    one_thread = {"OMP_NUM_THREADS": "1"}
    tollway = [sys.executable, "-P", "-m", "tollway"]
    async with AsyncExitStack() as stack:
        engine = await ServerProcess.start(
            [*tollway, "engine", "-c", str(shown), "--model-path", str(model)],
            name="engine",
            log=logs / "engine.log",
            env=one_thread,
        )
        stack.push_async_callback(engine.stop)
        try:
            server = await ServerProcess.start(
                [
                    *(*tollway, "serve", "-c", str(shown), "--engine", engine.url),
                    *("--set", f"server.journal={json.dumps(str(journal))}", "--set", "server.engine_wait_s=30.0"),
                ],
                name="session server",
                log=logs / "server.log",
                env=one_thread | {ADMIN_KEY_VARIABLE: key},
            )
        except ComponentLost:
            if engine.returncode is not None:
                raise engine.lost() from None  # the server's complaint is only that nobody answers
            raise
        stack.push_async_callback(server.stop)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        sessions = SessionClient(server.url, key, http=http)
        # Every call of this client is a refit's: one deadline, not the smaller of two.
        engine_client = EngineClient(engine.url, http, timeouts=Timeouts(control_s=settings.trainer.refit_timeout_s))
        stack.push_async_callback(engine_client.aclose)
        engines = await sessions.engines()
        if len(engines) != 1:
            raise ComponentLost(f"the session server lists {len(engines)} engines, want the one that was started")
        provider = open_provider(settings.sandbox)
        stack.push_async_callback(provider.aclose)
        yield Fleet(
            engine=engine,
            server=server,
            engine_client=engine_client,
            sessions=sessions,
            provider=provider,
            engine_id=str(engines[0]["id"]),
        )
