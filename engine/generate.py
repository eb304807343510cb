"""``/generate``: whole replies and streams.

A stream's events are cumulative by default, as on a stock server: each carries all text, ids and
log-probabilities so far; with ``incremental_streaming`` ids and log-probabilities are only the new ones.
Events that a slow reader has not taken yet are merged. A client that disconnects aborts its requests.
Depends on ``service``, ``protocol`` and ``replies``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import orjson

from tollway.engine.http import Call, Reply
from tollway.engine.protocol import GenerateBody
from tollway.engine.replies import Json, reply
from tollway.engine.request import Progress, Request, Result
from tollway.engine.service import EngineService
from tollway.errors import BadRequest, TollwayError

__all__ = ["generate"]


async def generate(service: EngineService, call: Call) -> Reply | None:
    """Handle one call of ``/generate``."""
    body, requests, as_list = service.intake.parse(call.json())
    with service.claimed([request.rid for request in requests]):
        if body.stream:
            await _stream(service, call, body, requests)
            return None
        results = await _run(service, call, requests)
    if results is None:
        return None
    for result in results:
        _raise_for(result)
    replies = [reply(body, r, result, service.codec) for r, result in zip(requests, results, strict=True)]
    return Reply.json(replies if as_list else replies[0])


async def _run(service: EngineService, call: Call, requests: list[Request]) -> list[Result] | None:
    """Results in order; ``None`` when the client went away first."""
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[Result]] = []
    for request in requests:
        future: asyncio.Future[Result] = loop.create_future()
        request.on_result = _Fulfil(future)
        futures.append(future)
        service.submit(request)
    finished: asyncio.Future[Result] | asyncio.Future[list[Result]]
    finished = futures[0] if len(futures) == 1 else asyncio.gather(*futures)
    gone = asyncio.ensure_future(call.disconnected())
    try:
        await asyncio.wait((finished, gone), return_when=asyncio.FIRST_COMPLETED)
        return [future.result() for future in futures] if finished.done() else None
    finally:
        gone.cancel()
        if not finished.done():
            finished.cancel()
            for request in requests:
                await service.abort(request.rid, "client disconnected")


async def _stream(service: EngineService, call: Call, body: GenerateBody, requests: list[Request]) -> None:
    feed = _Feed(len(requests))
    for index, request in enumerate(requests):
        request.on_progress = request.on_result = _Put(feed, index)
        service.submit(request)
    gone = asyncio.ensure_future(call.disconnected())
    sent = [0] * len(requests)
    started = False
    try:
        while not feed.over and not gone.done():
            await _wait(feed.changed, gone)
            for index, state in feed.take():
                due = len(state.ids) - sent[index] >= service.config.stream_interval or sent[index] == 0
                if not (due or isinstance(state, Result)):
                    continue
                if not started:
                    if isinstance(state, Result):
                        _raise_for(state)
                    await call.start("text/event-stream; charset=utf-8")
                    started = True
                new_from = sent[index] if service.config.incremental_streaming else 0
                event = reply(body, requests[index], state, service.codec, new_from=new_from)
                if len(requests) > 1:
                    event["index"] = index
                await call.write(_event(event))
                sent[index] = len(state.ids)
        if feed.over:
            await call.write(b"data: [DONE]\n\n", more=False)
    finally:
        gone.cancel()
        if not feed.over:
            for request in requests:
                await service.abort(request.rid, "client disconnected")


@dataclass(slots=True)
class _Feed:
    """Latest state of each request of a stream."""

    size: int
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _latest: dict[int, Progress] = field(default_factory=dict)
    _ended: int = 0

    @property
    def over(self) -> bool:
        """All requests ended and their last states were taken."""
        return self._ended == self.size and not self._latest

    def put(self, index: int, state: Progress) -> None:
        self._latest[index] = state
        self._ended += isinstance(state, Result)
        self.changed.set()

    def take(self) -> list[tuple[int, Progress]]:
        latest, self._latest = self._latest, {}
        self.changed.clear()
        return list(latest.items())


@dataclass(frozen=True, slots=True)
class _Put:
    feed: _Feed
    index: int

    def __call__(self, state: Progress) -> None:
        self.feed.put(self.index, state)


async def _wait(changed: asyncio.Event, gone: asyncio.Future[None]) -> None:
    if changed.is_set():
        return
    waiter = asyncio.ensure_future(changed.wait())
    await asyncio.wait((waiter, gone), return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


@dataclass(frozen=True, slots=True)
class _Fulfil:
    future: asyncio.Future[Result]

    def __call__(self, result: Result) -> None:
        if not self.future.done():
            self.future.set_result(result)


def _raise_for(result: Result) -> None:
    """Aborts with a status are errors; plain aborts are replies with partial tokens."""
    if result.finish.status is None:
        return
    if result.finish.status == 400:
        raise BadRequest(result.finish.message)
    error = TollwayError(result.finish.message)
    error.status = result.finish.status
    raise error


def _event(event: Json) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
