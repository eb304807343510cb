"""The outer gateway itself: one that this process starts and keeps, or one that runs already.

Both have passed their check before a session depends on them. The own one is told which engines take calls, and is
started again within a budget when it ends; a foreign one has its engines from whoever runs it. Chooses nothing.
Depends on ``smg`` and ``canary``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import aiohttp

from tollway.errors import ComponentLost, ConfigError, NoEngine, TollwayError
from tollway.router.canary import require_fields, require_verbatim
from tollway.router.smg import Smg, Workers
from tollway.router.supervisor import RestartBudget

__all__ = ["ForeignGateway", "GatewayEnd", "OwnGateway"]

logger = logging.getLogger(__name__)
_MODEL = "policy"
"""What smg shall call the model of all engines, whatever their directories are called."""
_RESTARTS, _RESTART_WINDOW_S = 3, 600.0
_RETRY_S = 1.0
_SETTLE_S = 2.0
"""How long a session waits for smg to hear of a change of the fleet, before it asks all the same."""


class GatewayEnd(ABC):
    """A gateway as its user sees it."""

    def __init__(self, *, probe_s: float) -> None:
        self._probe_s = probe_s
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())

    @property
    @abstractmethod
    def url(self) -> str:
        """Where calls go. Raises ``NoEngine`` while there is no gateway."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it passed its check and runs, as far as is known."""

    @property
    def http(self) -> aiohttp.ClientSession:
        """For questions to the gateway."""
        return self._http

    @abstractmethod
    async def start(self) -> None:
        """Make it usable. Raises ``ConfigError`` for one that changes calls, ``ComponentLost`` for one that fails."""

    @abstractmethod
    async def checked(self) -> None:
        """Return once it may be used and knows the fleet. Raises ``NoEngine`` with the reason when it may not."""

    @abstractmethod
    def takes(self, url: str, takes: bool) -> None:
        """Whether the engine at ``url`` takes calls."""

    async def aclose(self) -> None:
        """End what is ours. Idempotent."""
        await self._http.close()


class ForeignGateway(GatewayEnd):
    """A gateway that others run. ``headers`` are its key's."""

    def __init__(self, url: str, *, key: str, probe_s: float) -> None:
        super().__init__(probe_s=probe_s)
        self._url, self._key = url, key
        self._passed = False
        self._checking = asyncio.Lock()

    @property
    def url(self) -> str:
        """Where calls go."""
        return self._url

    @property
    def ready(self) -> bool:
        """Whether it passed its check."""
        return self._passed

    async def start(self) -> None:
        """Check it now, or before the first session when it does not answer yet. Raises ``ConfigError``."""
        try:
            await self._check()
        except ComponentLost as error:
            logger.warning("%s; it is checked again before the first session", error)

    async def checked(self) -> None:
        """Check it unless that is done. Raises ``NoEngine``."""
        if not self._passed:
            try:
                await self._check()
            except (ComponentLost, ConfigError) as error:
                raise NoEngine(str(error)) from error

    def takes(self, url: str, takes: bool) -> None:
        """Nothing: it is told by whoever runs it."""

    async def _check(self) -> None:
        async with self._checking:
            if self._passed:
                return
            keys = {"authorization": f"Bearer {self._key}"} if self._key else {}
            await require_fields(self._url, self._http, keys, timeout_s=self._probe_s)
            try:
                rows = await Workers(self._url, self._http, key=self._key, timeout_s=self._probe_s).listed()
            except ComponentLost as error:
                logger.warning("%s; which models it has is not checked", error)
                rows = []
            models = sorted({str(row.get("model_id")) for row in rows})
            if len(models) > 1:
                raise ConfigError(
                    f"gateway {self._url} has several models ({', '.join(models)}); it then holds every body and "
                    "sends a call twice when a connection breaks: use one gateway for each model"
                )
            self._passed = True


class OwnGateway(GatewayEnd):
    """An ``smg`` of this process. ``on_start`` is called for each start: a new one knows no session."""

    def __init__(self, *, probe_s: float, on_start: Callable[[], None]) -> None:
        super().__init__(probe_s=probe_s)
        self._on_start = on_start
        self._smg: Smg | None = None
        self._wanted: dict[str, bool] = {}
        """URL -> whether smg shall have it as a worker."""
        self._known: set[str] = set()
        """URLs that the running smg was told of."""
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Where calls go. Raises ``NoEngine`` while it is down."""
        if self._smg is None:
            raise NoEngine("the outer gateway (smg) is down; the log has its last words")
        return self._smg.url

    @property
    def ready(self) -> bool:
        """Whether it runs; every start of it is checked."""
        return self._smg is not None

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` while it is down."""
        return self._smg.process.pid if self._smg is not None else None

    async def start(self) -> None:
        """Start and check it. Raises ``ConfigError``, ``ComponentLost``."""
        smg = await self._launch()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._keep(smg), name="gateway"),
            loop.create_task(self._keep_telling(), name="gateway workers"),
        ]

    async def checked(self) -> None:
        """Wait for a moment until it knows the fleet. Raises ``NoEngine`` while it is down."""
        if not self._settled.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await self._settled.wait()
        if self._smg is None:
            raise NoEngine("the outer gateway (smg) is down; the log has its last words")

    def takes(self, url: str, takes: bool) -> None:
        """Tell it, in the background, who takes calls."""
        if self._wanted.get(url, False) != takes:
            self._wanted[url] = takes
            self._tell()

    async def aclose(self) -> None:
        """End it. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._smg is not None:
            await self._smg.stop()
            self._smg = None
        await super().aclose()

    async def _launch(self) -> Smg:
        smg = await Smg.launch(self._http)
        try:
            await require_verbatim(smg.workers, self._http, timeout_s=self._probe_s)
        except BaseException:
            await smg.stop()
            raise
        logger.info("gateway %s passes calls on as they are", smg.url)
        self._smg = smg
        self._known.clear()
        self._on_start()
        self._tell()
        return smg

    async def _keep(self, smg: Smg) -> None:
        """Start it again when it ends, within a budget."""
        budget = RestartBudget(_RESTARTS, _RESTART_WINDOW_S)
        while True:
            await smg.process.wait()
            self._smg = None
            logger.error("%s", smg.process.lost())
            await smg.stop()
            if not budget.spend(time.monotonic()):
                logger.error("smg ended %d times within %g s and is not started again", _RESTARTS, _RESTART_WINDOW_S)
                return
            await asyncio.sleep(budget.pause_s)
            try:
                smg = await self._launch()
            except (TollwayError, OSError) as error:
                logger.error("smg is not started again: %s", error)
                return

    def _tell(self) -> None:
        self._settled.clear()
        self._changed.set()

    async def _keep_telling(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            smg = self._smg
            todo = [url for url, wanted in self._wanted.items() if wanted != (url in self._known)]
            if smg is not None and todo:
                done = await asyncio.gather(*(self._tell_one(smg, url) for url in todo))
                if not all(done):
                    await asyncio.sleep(_RETRY_S)
                self._changed.set()
            else:
                self._settled.set()

    async def _tell_one(self, smg: Smg, url: str) -> bool:
        wanted = self._wanted[url]
        try:
            if wanted:
                await smg.workers.add(url, model=_MODEL)
                self._known.add(url)
            else:
                await smg.workers.remove(url)
                self._known.discard(url)
        except ComponentLost as error:
            logger.warning("%s", error)
            return smg is not self._smg  # another one is told afresh
        return True
