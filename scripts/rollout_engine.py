"""The embedded engine with SGLang's request log, for benchmarks that hold an export against what engines saw.

Everything is the engine's own; around its HTTP application stands a log of ``/generate`` in the form of
``sglang serve --log-requests --log-requests-level 3 --log-requests-format json``: one line per finished request
with the ids that came in and the reply that went out, on standard output. It is off until ``POST
/configure_logging {"log_requests": true}``, as there, and calls are then not even looked at.

    rollout_engine.py SETTINGS.json HOST PORT      SETTINGS: the [engine] section as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import orjson

from tollway import telemetry
from tollway.config import load
from tollway.engine import server
from tollway.engine.config import EngineConfig
from tollway.engine.http import Application, Message, Receive, Send


class LoggedApplication(Application):
    """An ``Application`` that writes down what it is asked and what it answers."""

    _logs = False

    async def __call__(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http" or scope["path"] not in ("/generate", "/configure_logging"):
            await super().__call__(scope, receive, send)
        elif scope["path"] == "/configure_logging":
            body = orjson.loads(await _whole(receive))
            self._logs = bool(body.get("log_requests", self._logs))
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        elif self._logs:
            await self._written_down(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _written_down(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        request, reply, status = bytearray(), bytearray(), 0

        async def hear() -> Message:
            message = await receive()
            request.extend(message.get("body", b""))  # type: ignore[arg-type]  # ASGI: bytes
            return message

        async def say(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(str(message["status"]))
            reply.extend(message.get("body", b""))  # type: ignore[arg-type]  # ASGI: bytes
            if message["type"] == "http.response.body" and not message.get("more_body") and status == 200:
                _log(orjson.loads(request), last_object(bytes(reply)))
            await send(message)

        await super().__call__(scope, hear, say)


def last_object(reply: bytes) -> object:
    """The reply of a call: a body of JSON, or the last event of a cumulative stream."""
    if not reply.startswith(b"data:"):
        return orjson.loads(reply)
    events = [event for event in reply.split(b"\n\n") if event.startswith(b"data: {")]
    return orjson.loads(events[-1][6:])


def _log(asked: dict[str, object], out: object) -> None:
    line = {"event": "request.finished", "rid": asked.get("rid"), "obj": asked, "out": out}
    now = datetime.now()
    text = json.dumps({"timestamp": now.isoformat(), **line}, ensure_ascii=False)
    sys.stdout.write(f"[{now:%Y-%m-%d %H:%M:%S}] {text}\n")
    sys.stdout.flush()


async def _whole(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body.extend(message.get("body", b""))  # type: ignore[arg-type]  # ASGI: bytes
        if not message.get("more_body"):
            return bytes(body) or b"{}"


def main() -> None:
    """Serve until told to stop."""
    settings, host, port = sys.argv[1:]
    tree = json.loads(Path(settings).read_text(encoding="utf-8")) | {"host": host, "port": int(port)}
    telemetry.configure("WARNING", component="engine")
    server.Application = LoggedApplication  # type: ignore[misc]  # the one place that builds it
    server.run(load(EngineConfig, tree, source=settings))


if __name__ == "__main__":
    main()
