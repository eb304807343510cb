"""The model server of NeMo Gym's agent servers: one address for all episodes, each call sent on to its session.

An agent server knows one address of its model, so its calls say which episode they belong to by a mark in the
request's ``metadata``, which agents pass through; the mark is a secret of the episode's. Depends on aiohttp and the
record types of ``session_server.client``.
"""

from __future__ import annotations

import json
import logging

import aiohttp
from aiohttp import web

from tollway.errors import ConfigError
from tollway.session_server.client import Session

__all__ = ["MARK", "ModelRelay"]

logger = logging.getLogger(__name__)
MARK = "tollway_episode"
_BODY_BYTES = 64 << 20
_LISTEN = "127.0.0.1"


class ModelRelay:
    """Listens on the loopback address from ``start`` to ``aclose``."""

    def __init__(self, http: aiohttp.ClientSession, *, timeout_s: float) -> None:
        self._http, self._timeout = http, aiohttp.ClientTimeout(total=timeout_s)
        self._runner: web.AppRunner | None = None
        self.sessions: dict[str, Session] = {}
        """Of running episodes, by their marks."""
        self.answered: dict[str, int] = {}
        """Model calls that were answered, by mark."""

    async def start(self, port: int) -> int:
        """Listen on ``port``, 0 for any free one. Returns it. Raises ``ConfigError`` when it is taken."""
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_get("/", self._alive)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, _LISTEN, port).start()
        except OSError as error:
            raise ConfigError(f"env.nemo_gym.model_port: cannot listen on port {port}: {error}") from error
        return int(self._runner.addresses[0][1])

    async def aclose(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _alive(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _responses(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            metadata = dict(body["metadata"])
            mark = metadata.pop(MARK)
            session = self.sessions[mark]
        except (ValueError, KeyError, TypeError):
            return _refused(401, "the request belongs to no running episode")
        body = {key: value for key, value in body.items() if value is not None and key != "metadata"}
        if metadata:
            body["metadata"] = metadata
        headers = {"authorization": f"Bearer {session.token}"}
        url = f"{session.openai_base_url}/responses"
        try:
            async with self._http.post(url, json=body, headers=headers, timeout=self._timeout) as response:
                data, status = await response.read(), response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.warning("a model call of an agent server: %s", error)
            return _refused(503, "the session server did not answer")
        if status == 200:
            self.answered[mark] = self.answered.get(mark, 0) + 1
        return web.Response(status=status, body=data, content_type="application/json")


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
