"""Calls that may be sent twice."""

from __future__ import annotations

import asyncio

import pytest

from tollway.errors import BadRequest, CapacityExceeded
from tollway.session_server.repeats import Repeats


async def answer() -> bytes:
    return b"made"


async def test_a_failure_that_nobody_waited_for_is_not_kept() -> None:
    repeats, gate = Repeats(), asyncio.Event()

    async def fail() -> bytes:
        await gate.wait()
        raise CapacityExceeded("full")

    first = asyncio.create_task(repeats.once("k", b"body", fail))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.set()
    await asyncio.sleep(0.01)
    assert await repeats.once("k", b"body", answer) == b"made"


async def test_a_key_belongs_to_its_body() -> None:
    repeats = Repeats()
    assert await repeats.once("k", b"body", answer) == await repeats.once("k", b"body", answer)
    with pytest.raises(BadRequest, match="different body"):
        await repeats.once("k", b"other", answer)
