"""Which calls a session remembers."""

from __future__ import annotations

import asyncio

import pytest
from server_helpers import until

from tollway.session_server.calls import Call, CallBook


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_long_call_does_not_keep_the_replies_of_all_that_ended_meanwhile(keyed: bool) -> None:
    book = CallBook()
    long, release = Call(b"long", "long" if keyed else None, False), asyncio.Event()

    async def run(call: Call) -> None:
        if call is long:
            await release.wait()
        call.finish()

    book.start(long, run(long))
    for number in range(40):
        call = Call(b"%d" % number, str(number) if keyed else None, False)
        book.start(call, run(call))
        await until(lambda call=call: call.finished and book.running == 1, what="the call ends")

    def known(name: bytes) -> bool:
        return book.find(name, key=name.decode() if keyed else None, retry=True) is not None

    assert [number for number in range(40) if known(b"%d" % number)] == list(range(36, 40))
    assert known(b"long")
    release.set()
    await asyncio.gather(*book.tasks)
