"""Weight buckets on their way to an engine: the JSON that arrives, and what the sender holds meanwhile."""

from __future__ import annotations

import asyncio
import base64
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tollway.errors import EngineLost
from tollway.router.buckets import _STEP_BYTES, BucketBody
from tollway.router.engines import EngineClient, Timeouts
from tollway.router.fake import FakeEngine

LENGTHS = [0, 1, 2, 3, 4, _STEP_BYTES - 1, _STEP_BYTES, _STEP_BYTES + 1, 2 * _STEP_BYTES + 2]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def payload(length: int) -> bytes:
    return bytes(range(251)) * (length // 251) + bytes(range(length % 251))


@asynccontextmanager
async def bare_server(talk: Talk) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("length", LENGTHS)
async def test_an_engine_reads_the_bucket_that_was_sent(length: int, ranks: int) -> None:
    sent = payload(length)
    async with FakeEngine() as engine, aiohttp.ClientSession() as http:
        client = EngineClient(engine.url, http, timeouts=Timeouts(connect_s=5, control_s=10, probe_s=5))
        await client.update_weights_from_tensor(sent, tp_size=ranks)
        await client.set_weight_version(7)  # nothing of the body is left on the connection
        got = dict(engine.control)
    items = got["/update_weights_from_tensor"].pop("serialized_named_tensors")
    assert [base64.b64decode(item, validate=True) for item in items] == [sent] * ranks
    assert got["/update_weights_from_tensor"] == {"load_format": "flattened_bucket", "flush_cache": False}
    assert got["/update_weight_version"]["new_version"] == "7"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_its_size_is_known_before_it_is_made(length: int, ranks: int) -> None:
    body = BucketBody(payload(length), load_format=None, ranks=ranks)
    text = body.decode()
    assert body.size == len(text)
    assert json.loads(text)["load_format"] is None
    assert len(json.loads(text)["serialized_named_tensors"]) == ranks


async def test_a_large_bucket_is_never_held_a_second_time() -> None:
    """An encoded copy, or what a slow engine has not read yet, would be larger than the bucket itself."""
    sent = payload(24 << 20)
    expected = BucketBody(sent, load_format="flattened_bucket", ranks=1).size
    read = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal read
        await reader.readuntil(b"\r\n\r\n")
        while read < (expected or 0):
            read += len(await reader.read(1 << 16))
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{"success":true}')
        await writer.drain()

    async with bare_server(talk) as url, aiohttp.ClientSession() as http:
        client = EngineClient(url, http)
        tracemalloc.start()
        try:
            await client.update_weights_from_tensor(sent)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert read == expected
    assert peak < len(sent) / 4


async def test_an_engine_that_dies_in_the_middle_of_a_bucket_is_lost() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1 << 16)
        writer.transport.abort()

    async with bare_server(talk) as url, aiohttp.ClientSession() as http:
        with pytest.raises(EngineLost):
            await EngineClient(url, http).update_weights_from_tensor(payload(24 << 20))
