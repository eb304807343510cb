"""One OpenEnv episode's WebSocket: frames out, frames in, every failure typed.

A server that is full says so in an error frame or, depending on its version, only closes the socket before its
first frame; both are capacity. Depends on aiohttp and the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from tollway.envs.openenv.config import OpenEnvConfig
from tollway.errors import CapacityExceeded, EpisodeFailed

__all__ = ["FrameError", "Link", "Observation", "open_link"]

_FULL = "CAPACITY_REACHED"


class FrameError(EpisodeFailed):
    """The server answered with an error frame."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the environment's server says {code}: {message}")
        self.frame_code, self.frame_message = code, message


class _Full(Exception):
    """This connection got no place."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation frame."""

    content: Mapping[str, object]
    reward: float | None
    """``None``: the environment said nothing about this step."""
    done: bool


class Link:
    """An open socket; one request at a time."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, config: OpenEnvConfig) -> None:
        self._socket, self._config = socket, config
        self._heard = False

    async def observe(self, kind: str, data: Mapping[str, object]) -> Observation:
        """``reset`` or ``step``. Raises ``FrameError`` or ``EpisodeFailed``."""
        return _observation(await self._ask(kind, data, "observation"))

    async def rpc(self, method: str) -> Mapping[str, object] | None:
        """Result of one MCP request; ``None`` when the environment has no MCP side."""
        try:
            data = await self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": {}}, "mcp")
        except FrameError:
            return None
        result = data.get("result")
        return result if isinstance(result, dict) else None

    async def aclose(self) -> None:
        """Say that it is over and close the socket, which frees the server's place."""
        with contextlib.suppress(Exception):  # the socket may be gone in any way; there is nothing left to say
            async with asyncio.timeout(5.0):
                if not self._socket.closed:
                    await self._socket.send_str('{"type": "close"}')
                await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, object], wanted: str) -> Mapping[str, object]:
        limit = self._config.step_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await self._socket.receive()
        except TimeoutError:
            raise EpisodeFailed(f"the environment took longer than env.openenv.step_timeout_s = {limit}") from None
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            raise self._lost(str(error)) from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self._lost(f"closed with code {self._socket.close_code}, {message.type.name}")
        self._heard = True
        frame = _object(message.data, "frame")
        content = _object(frame.get("data"), f"{frame.get('type')} frame")
        if frame.get("type") == "error":
            if content.get("code") == _FULL:
                raise _Full(str(content.get("message")))
            raise FrameError(str(content.get("code")), _complaint(content))
        if frame.get("type") != wanted:
            raise EpisodeFailed(f"the environment answered {kind} with a {frame.get('type')!r} frame, want {wanted!r}")
        return content

    def _lost(self, what: str) -> Exception:
        if not self._heard:
            return _Full(f"closed before its first frame ({what})")
        return EpisodeFailed(f"the environment's socket is gone: {what}")


async def open_link(
    http: aiohttp.ClientSession, url: str, config: OpenEnvConfig, reset: Mapping[str, object]
) -> tuple[Link, Observation]:
    """A socket with a place in the server and the first observation.

    Tries again while the server is full, then raises ``CapacityExceeded``; ``EpisodeFailed`` for anything else.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + config.capacity_timeout_s, 0.1
    while True:
        link = await _connect(http, url, config)
        try:
            return link, await link.observe("reset", reset)
        except _Full as full:
            await link.aclose()
            # Spread, or those that were refused together come back together.
            delay = pause * random.uniform(0.5, 1.5)
            if loop.time() + delay > deadline:
                raise CapacityExceeded(
                    f"the OpenEnv server at {url} had no place within {config.capacity_timeout_s} s ({full}); "
                    "lower env.max_episodes or start it with more concurrent environments"
                ) from None
            await asyncio.sleep(delay)
            pause = min(5.0, pause * 2)
        except BaseException:
            await link.aclose()
            raise


async def _connect(http: aiohttp.ClientSession, url: str, config: OpenEnvConfig) -> Link:
    address = url.replace("http", "ws", 1) + "/ws"
    try:
        async with asyncio.timeout(config.connect_timeout_s):
            socket = await http.ws_connect(
                address, heartbeat=config.ping_interval_s, max_msg_size=int(config.max_frame_mb * (1 << 20))
            )
    except TimeoutError:
        raise EpisodeFailed(f"no connection to {address} within {config.connect_timeout_s} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise EpisodeFailed(f"cannot connect to {address}: {error}") from error
    return Link(socket, config)


def _object(raw: object, what: str) -> dict[str, object]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise EpisodeFailed(f"the environment sent a {what} that is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise EpisodeFailed(f"the environment sent a {what} of {type(raw).__name__}, want an object")
    return raw


def _complaint(content: Mapping[str, object]) -> str:
    """The message, and for an action that does not fit, which field and why."""
    parts = [str(content.get("message"))]
    problems = content.get("errors")
    for each in problems[:5] if isinstance(problems, list) else []:
        if isinstance(each, dict) and isinstance(each.get("loc"), list):
            parts.append(f"{'.'.join(map(str, each['loc'])) or 'action'}: {each.get('msg')}")
    return "; ".join(parts)


def _observation(data: Mapping[str, object]) -> Observation:
    reward, done = data.get("reward"), data.get("done")
    if isinstance(reward, bool):
        reward = float(reward)
    if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
        raise EpisodeFailed(f"the environment gave a reward of {reward!r}, want a finite number or null")
    if not isinstance(done, bool):
        raise EpisodeFailed(f"the environment said done = {done!r}, want true or false")
    content = data.get("observation")
    if not isinstance(content, dict):
        content = {"observation": content}
    return Observation(content, None if reward is None else float(reward), done)
