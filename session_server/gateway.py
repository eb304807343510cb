"""One session server: its parts, started and stopped together.

Builds family, journal, router, store and turns once and owns their life; routes and the dialects reach
them through here. Chooses nothing else. Depends on everything below it in this package.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import AsyncExitStack

from tollway.errors import BadRequest
from tollway.router.config import RouterConfig
from tollway.router.placement_lease import Service
from tollway.router.service import Router
from tollway.session_server import auth
from tollway.session_server.api import TurnApi
from tollway.session_server.config import ServerConfig
from tollway.session_server.crew import SOLO, Crew
from tollway.session_server.families.registry import load_family
from tollway.session_server.fanout import Fanout
from tollway.session_server.journal import Journal
from tollway.session_server.repeats import Repeats
from tollway.session_server.session import Session
from tollway.session_server.siblings import Siblings
from tollway.session_server.store import SessionStore
from tollway.session_server.turn import Turns

__all__ = ["Gateway"]

logger = logging.getLogger(__name__)


class Gateway:
    """The parts of one server process. ``start`` before use, ``stop`` after."""

    router: Router
    store: SessionStore
    api: TurnApi
    fanout: Fanout

    def __init__(
        self,
        config: ServerConfig,
        router_config: RouterConfig,
        *,
        admin_key: str,
        engine_urls: list[str],
        crew: Crew = SOLO,
    ) -> None:
        self.config = config
        self.admin_key = admin_key
        self.crew = crew
        self.siblings = Siblings(crew, admin_key)
        self.creations = Repeats()
        self.family = load_family(
            config.family, tokenizer=config.tokenizer, thinking=config.thinking, chat_template=config.chat_template
        )
        self.journal = Journal(
            config.journal, max_bytes=config.journal_max_bytes, compact_after_bytes=config.compact_after_bytes
        )
        self._router_config = router_config
        self._engine_urls = engine_urls
        self._parts = AsyncExitStack()
        """Releases what ``start`` has taken, latest first."""
        self._started = False

    async def start(self) -> None:
        """Open the journal, start watching engines, take over open sessions. Idempotent; all or nothing.

        Raises ``ConfigError`` (journal) and, when configured to wait for engines, ``NoEngine``.
        """
        if self._started:
            return
        self._started = True
        async with AsyncExitStack() as parts:
            parts.push_async_callback(self.journal.aclose)
            await self.journal.open()
            name = f"{socket.gethostname()}:{self.config.journal.absolute()}"[-200:]
            self.router = await parts.enter_async_context(
                Router(self._router_config, server_name=name, service=self._service())
            )
            if not self._engine_urls and not (self.crew.places_url or self._router_config.placement_url):
                logger.warning("no engine given: turns are refused until one is added: tollway engines add URL")
            for url in self._engine_urls:
                if self.router.lease is None or self.crew.alone:
                    self.router.add_engine(url)
                else:
                    self.router.lease.announce(url)
            await parts.enter_async_context(self.siblings)
            self.fanout = Fanout(self.siblings, self.router)
            self.store = SessionStore(self.config, self.journal, self.router, worker=self.crew.index)
            parts.push_async_callback(self.store.stop)
            await self.store.start()
            await self.router.restored()
            turns = Turns(self.config, self.family, self.router, self.journal, boot=self.store.boot)
            self.api = TurnApi(self.config, self.family, turns, self.journal)
            sweeper = asyncio.get_running_loop().create_task(self.store.sweep(), name="session sweep")
            parts.push_async_callback(_end, sweeper)
            if self.config.engine_wait_s > 0:
                await self.router.wait_ready(self.config.engine_wait_s)
            self._parts = parts.pop_all()

    def _service(self) -> Service | None:
        """Where the workers of one server have their engines and places; ``None``: as configured."""
        crew, configured = self.crew, self._router_config.placement_url
        if crew.places_url:
            return Service(url=crew.places_url, key=crew.places_key, same_ids=True, part=(crew.index, crew.size))
        return Service(url=configured, same_ids=True) if configured and not crew.alone else None

    async def stop(self) -> None:
        """Abort what runs, commit what is done, close everything. Idempotent."""
        if not self._started:
            return
        self._started = False
        await self._parts.aclose()

    async def session_of_token(self, token: str | None) -> Session:
        """The session that a token names and opens. Raises ``Unauthorized``, the same for every reason."""
        named = auth.session_of(token) if token is not None else None
        if token is None or named is None:
            raise auth.refused()
        # Without loading a session for a stranger.
        if not auth.token_matches(token, await self.store.token_hash(named)):
            raise auth.refused()
        session = await self.store.get(named)
        if session is None:
            raise auth.refused()
        return session

    async def session_by_id(self, session_id: str, token: str | None) -> Session:
        """Session ``session_id`` for the holder of its token. A token as path segment opens it, too."""
        if auth.session_of(session_id) is not None:
            return await self.session_of_token(session_id)
        session = await self.session_of_token(token)
        if session.session_id != session_id:
            raise auth.refused()
        return session

    def model_named(self, name: str) -> str:
        """The model of the fleet that a new session names; "" for the policy. ``BadRequest`` for an unknown one."""
        if name in ("", self.config.model_name):
            return ""
        known = {engine.model for engine in self.router.fleet.engines.values()} - {""}
        if name not in known:
            others = ", ".join([self.config.model_name, *sorted(known)])
            raise BadRequest(
                f"no engine serves model {name!r}; the fleet has {others} (engines are added with POST /engines)",
                param="model",
            )
        return name

    async def parent_named(self, session_id: str) -> str:
        """The session that a new one names as its parent. ``BadRequest`` when this server has none of that id."""
        if session_id and await self.store.token_hash(session_id) is None:
            raise BadRequest(f"parent_id {session_id[:80]!r} is no session of this server", param="parent_id")
        return session_id

    def is_admin(self, token: str | None) -> bool:
        """Whether this is the admin key."""
        return auth.is_admin(token, self.admin_key)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
