"""What a failed connection is called: plain words, and no class of the HTTP library."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from live_engines import talking

from tollway.errors import EngineLost
from tollway.router.engines import EngineClient, Timeouts
from tollway.router.losses import lost_words, nobody_listens

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def _half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")


async def _reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.transport.abort()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"+OK POP3 ready\r\n")
    await reader.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (_close, "it closed the connection without an answer"),
        (_half, "it broke off in the middle of its answer"),
        (_reset, "the connection broke: connection reset by peer"),
        (_silent, "no answer in time"),
        (_banner, "its answer is not HTTP"),
    ],
)
async def test_a_lost_engine_is_told_in_plain_words(handler: Handler, words: str) -> None:
    async with talking(handler) as url, aiohttp.ClientSession() as http:
        with pytest.raises(EngineLost) as error:
            await EngineClient(url, http, timeouts=Timeouts(probe_s=0.3)).model_info()
    said = str(error.value)
    assert said == f"engine {url}: {words}" or (handler is _reset and "closed the connection" in said)
    assert error.value.timed_out is (handler is _silent)
    assert not error.value.refused


async def test_only_an_address_that_refuses_is_a_dead_process() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineLost, match="nobody listens there") as error:
            await EngineClient("http://127.0.0.1:9", http).model_info()
        assert error.value.refused
    assert not nobody_listens(OSError(errno.EMFILE, "too many open files")), "our own limit is not its death"
    assert lost_words(OSError(errno.EMFILE, "x")) == "the connection broke: too many open files"
    assert lost_words(TimeoutError("no token for 5 s")) == "no token for 5 s"
    assert lost_words(aiohttp.ClientError()) == "the connection broke"
