"""The ASGI application: plain dispatch for model calls, FastAPI for everything else.

Model calls are nearly all traffic, and a plain callable costs a fraction of a framework's route. Depends on
``gateway``, ``routes``, the dialects and FastAPI.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import tollway
from tollway.errors import BadRequest, NotFound, TollwayError
from tollway.router.config import RouterConfig
from tollway.session_server import auth
from tollway.session_server.config import ServerConfig
from tollway.session_server.dialects.base import Dialect
from tollway.session_server.dialects.chat import CHAT
from tollway.session_server.dialects.messages import MESSAGES
from tollway.session_server.dialects.responses import RESPONSES
from tollway.session_server.gateway import Gateway
from tollway.session_server.http import Receive, Scope, Send, error_body, error_headers, found, send_reply
from tollway.session_server.openapi import dialect_components, dialect_paths
from tollway.session_server.routes import router

__all__ = ["TollwayApp", "create_app"]

logger = logging.getLogger(__name__)
_SESSIONS = "/sessions/"
_COUNT = "/v1/messages/count_tokens"
_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    _COUNT: MESSAGES,
}


class _Rest(FastAPI):
    """Routes of FastAPI, described together with those that it does not know."""

    def openapi(self) -> dict[str, object]:
        """The whole surface as OpenAPI 3.1."""
        if self.openapi_schema is None:
            schema = super().openapi()
            for path, item in dialect_paths().items():
                schema["paths"].setdefault(path, {}).update(item)
            components = schema.setdefault("components", {})
            for kind, named in dialect_components().items():
                components.setdefault(kind, {}).update(named)
        return cast("dict[str, object]", self.openapi_schema)


class TollwayApp:
    """The application of one ``Gateway``; its lifespan starts and stops it."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        # A redirect would be built from the request's own Host header.
        self._rest = _Rest(
            title="Tollway session server",
            version=tollway.__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        self._rest.state.gateway = gateway
        self._rest.include_router(router)
        self._rest.add_exception_handler(TollwayError, _render_error)
        self._rest.add_exception_handler(HTTPException, _render_http_error)
        self._rest.add_exception_handler(RequestValidationError, _render_validation_error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        path = cast(str, scope.get("path", ""))
        if scope["type"] == "http" and scope["method"] == "POST":
            name = path[at:] if (at := path.find("/v1/")) >= 0 else ""
            if name in _DIALECTS:
                await self._turn(path[:at], name, scope, receive, send)
                return
        await self._rest(scope, receive, send)

    async def _turn(self, base: str, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        dialect = _DIALECTS[name]
        headers = cast("Iterable[tuple[bytes, bytes]]", scope["headers"])
        gateway = self.gateway
        try:
            token = auth.credential(headers)
            if base:
                session_id = base.removeprefix(_SESSIONS)
                if not base.startswith(_SESSIONS) or "/" in session_id:
                    raise NotFound(f"no route {base}{name}")
                session = await gateway.session_by_id(session_id, token)
            else:
                session = await gateway.session_of_token(token)
            async with gateway.store.visit(session):
                if name == _COUNT:
                    await gateway.api.count(session, dialect, receive, send)
                else:
                    await gateway.api.handle(session, dialect, headers, receive, send)
        except TollwayError as error:
            await send_reply(send, error.status, dialect.error(error), error_headers(error))

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.gateway.start()
                except TollwayError as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.gateway.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return


def create_app(
    config: ServerConfig, router_config: RouterConfig, *, admin_key: str, engine_urls: list[str]
) -> TollwayApp:
    """The session server as an ASGI application.

    >>> app = create_app(ServerConfig(), RouterConfig(), admin_key="secret", engine_urls=[])
    """
    return TollwayApp(Gateway(config, router_config, admin_key=admin_key, engine_urls=engine_urls))


async def _render_error(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, TollwayError) else TollwayError(str(error))
    headers = {name.decode(): value.decode() for name, value in error_headers(known)}
    return Response(error_body(known), status_code=known.status, headers=headers)


async def _render_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    known = NotFound(f"no route {request.method} {path}; {_hint(path)}")
    known.status = status
    return Response(error_body(known), status_code=status, media_type="application/json")


def _hint(path: str) -> str:
    """What a caller of a path that does not exist most likely wanted."""
    if "/v1/v1/" in path:
        return "take one /v1 out of the base URL: Anthropic clients want it without (anthropic_base_url)"
    if path.endswith(("/chat/completions", "/responses")) and "/v1/" not in path:
        return "add /v1 to the base URL: OpenAI clients want it with (openai_base_url)"
    return f"model calls go to {', '.join(_DIALECTS)}"


async def _render_validation_error(request: Request, error: Exception) -> Response:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    words = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}{found(each)}" for each in problems)
    return await _render_error(request, BadRequest(words or "the request is not valid"))
