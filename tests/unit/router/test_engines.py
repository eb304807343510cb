"""What an engine says beside its replies: whatever it is, it ends no probe and breaks no answer."""

from __future__ import annotations

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web

from tollway.errors import ContextLengthExceeded, UpstreamError
from tollway.records import Sampling
from tollway.router.engines import EngineClient, GenerateCall
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.wire import Prompt
from tollway.session_server.http import error_body

CALL = GenerateCall(
    rid="r", prompt=Prompt.of(np.array([1, 2], np.int32)), sampling=Sampling(max_new_tokens=1), routing_key="k"
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("evicted 12\n", [12.0]), ('evicted{a="b"} 1.5e+03\nevicted{a="c"} 1\n', [1500.0, 1.0]), ("evicted 1.2.3\n", [])],
)
async def test_a_series_that_is_no_number_is_no_series(text: str, value: list[float]) -> None:
    async with FakeEngine() as engine, aiohttp.ClientSession() as http:
        engine.metrics_text = text
        read = await EngineClient(engine.url, http).metrics("evicted", "other")
        assert read == {"evicted": value, "other": []}


async def test_an_absurd_context_length_in_an_error_is_not_believed() -> None:
    async with FakeEngine() as engine, aiohttp.ClientSession() as http:
        engine.script = lambda _: FakeReply([1], status=400, error="longer than the context length 99" + "9" * 50)
        with pytest.raises(ContextLengthExceeded) as caught:
            await EngineClient(engine.url, http).generate(CALL)
        assert orjson.loads(error_body(caught.value))["error"]["limit"] == 0


async def test_no_answer_sends_a_call_to_another_address() -> None:
    """An engine's address is checked when it is added; a redirect could name one that is refused there."""

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"{engine.url}{request.path}")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", elsewhere)
    runner = web.AppRunner(app)
    async with FakeEngine() as engine, aiohttp.ClientSession() as http:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", http)
        for ask in (client.model_info(), client.server_info(), client.metrics("evicted"), client.flush_cache()):
            with pytest.raises(UpstreamError, match="answered 307"):
                await ask
        assert await client.health_generate() is False
        with pytest.raises(UpstreamError, match="answered 307"):
            await client.generate(CALL)
        await client.aclose()
        await runner.cleanup()
        assert (engine.model_info_calls, engine.health_calls, engine.control, engine.requests) == (0, 0, [], [])
