"""Streams of ``/generate``: cut the bytes into events, read what is new in each, keep the whole.

An event brings either the tokens since the last one or, as SGLang does by default, all tokens so far. Of the
second kind only what is new is parsed, and when several have arrived only the last one is read. Depends on
aiohttp, numpy, orjson, ``replies`` and ``blobs``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

import aiohttp
import numpy as np
import orjson

from tollway.errors import UpstreamError
from tollway.router.blobs import load_reply
from tollway.router.replies import blob_names, cached_of, ids_of, int_of, logprobs_of, meta_of
from tollway.router.wire import GenerateCall, GenerateDelta, Json

__all__ = ["Assembly", "event_batches", "parse_object", "whole_body"]

_DONE = b"[DONE]"
_FEW = 8
_MAX_EVENT = 1 << 28
"""Longest stream event: cumulative log-probabilities of a long reply are one line."""


def parse_object(body: bytes, names: Sequence[str] = ()) -> Json:
    """A JSON object, with the values of ``names`` as ``load_reply`` leaves them. Raises ``UpstreamError``."""
    try:
        value = load_reply(body, names)
    except orjson.JSONDecodeError as error:
        raise UpstreamError(f"engine answered {len(body)} bytes that are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UpstreamError(f"engine answered a JSON {type(value).__name__}, want an object")
    return cast(Json, value)


async def whole_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or its first ``most`` bytes and a bit."""
    length, content = response.content_length, response.content
    if content.is_eof():  # it has arrived, or there is none
        return content.read_nowait()
    # What fits into the buffer is waited for as a whole, with one wake-up instead of one for every piece. More than
    # that would never come: reading stops when the buffer is full.
    fits = length is not None and length <= min(most, content.get_read_buffer_limits()[1])
    if fits and "content-encoding" not in response.headers:
        if content.exception() is None:
            await content.wait_eof()
        return content.read_nowait()
    parts: list[bytes] = []
    size = 0
    while size < most and (part := await content.readany()):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


async def event_batches(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """Payloads of the ``data:`` lines of each piece that arrives, often none. Lines may exceed any fixed buffer."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        end = part.rfind(b"\n")
        size += len(part)
        if size > _MAX_EVENT:
            raise UpstreamError(f"engine stream has an event of more than {_MAX_EVENT} bytes")
        if end < 0:
            parts.append(part)
            yield []
            continue
        parts.append(part[:end])
        lines = b"".join(parts).split(b"\n")
        rest = part[end + 1 :]
        parts, size = [rest], len(rest)
        yield [line[5:].strip() for line in lines if line.startswith(b"data:")]


class _Column:
    """One list of a stream that has an entry per token."""

    __slots__ = ("_end", "_key", "_raw", "fixed", "items", "name")

    def __init__(self, name: str, end: bytes, *, fixed: bool = False) -> None:
        self.name = name
        self.fixed = fixed
        """Its entries were given on and cannot change."""
        self.items: list[object] = []
        self._key = b'"%b":[' % name.encode()
        self._end = end
        """What ends the list: its own bracket, after that of the last entry when entries are lists."""
        self._raw = b""
        """The text of the entries in the last event, when events repeat them."""

    def take(self, new: object, total: int) -> bool:
        """Add the entries of an event that brings the count to ``total``; whether it repeated the earlier ones."""
        given = new if isinstance(new, list) else []
        have = len(self.items)
        if len(given) == total and have:
            if self.fixed and given[:have] != self.items:
                raise UpstreamError(f"engine changed {self.name} that it had streamed before, at {total} tokens")
            self.items = given
            return True
        if have + len(given) == total:
            self.items.extend(given)
        elif total != have or given != self.items[have - len(given) :]:
            # A request that is aborted in the queue repeats some of what is known, and nothing is new.
            raise UpstreamError(f"stream event brings {len(given)} {self.name} after {have}, engine counts {total}")
        return False

    def known(self, data: bytes, at: int) -> tuple[int, int, int] | None:
        """(start, end of what the last event had too, end of the list), searched from ``at``; ``None``: not there.

        A list that holds strings is never cut: in one without, its first end is its end.
        """
        start = data.find(self._key, at)
        if start < 0:
            return None
        start += len(self._key)
        same = start + len(self._raw)
        if not data.startswith(self._raw, start) or (self._raw and data[same : same + 1] not in (b",", b"]")):
            same = start
        end = data.find(self._end, same)
        if same > start and data[same : same + 1] == b"]":
            end = same
        elif end < 0 or data.find(b'"', same, end) >= 0:
            self._raw = b""
            return None
        else:
            end += len(self._end) - 1
        self._raw = data[start:end]
        if same > start and data[same : same + 1] == b",":
            same += 1
        return start, same, end


def _delta(tokens: list[object], entries: list[object], cached: int | None) -> GenerateDelta:
    """New tokens, checked as those of a whole reply are; numpy's cost per call counts when there are few."""
    if len(tokens) <= _FEW and all(map(_sound, tokens, entries)):
        values = [cast("list[float]", entry)[0] for entry in entries]
        return GenerateDelta(np.array(tokens, np.int32), np.array(values, np.float32), cached)
    ids = ids_of({"output_ids": tokens})
    return GenerateDelta(ids, logprobs_of({"output_token_logprobs": entries}, ids), cached)


def _sound(token: object, entry: object) -> bool:
    """Whether the token and its [log-probability, id, text] need no second look."""
    return (
        type(token) is int
        and 0 <= token < 2**31
        and type(entry) is list
        and len(entry) > 1
        and type(entry[0]) is float
        and -3e38 < entry[0] <= 0.0
        and type(entry[1]) is int
        and entry[1] == token
    )


class Assembly:
    """Joins the events of one stream."""

    def __init__(self, call: GenerateCall) -> None:
        self.last: Json | None = None
        """The last event."""
        self._cumulative = False
        self._prompt = call.prompt.size
        self._most = call.sampling.max_new_tokens
        self._blobs = blob_names(call)
        self._ids = _Column("output_ids", b"]", fixed=True)
        self._logprobs = _Column("output_token_logprobs", b"]]")
        self._more: list[_Column] = []
        if call.top_logprobs:
            self._more.append(_Column("output_top_logprobs", b"]]]"))
        if call.return_sampling_mask:
            self._more.append(_Column("output_token_sampling_mask", b"]]"))
            self._more.append(_Column("output_token_sampling_logprobs", b"]"))

    def worth_reading(self, events: list[bytes]) -> list[bytes]:
        """Those of ``events`` that arrived together which tell something that a later one does not repeat."""
        events = [event for event in events if event != _DONE]
        return events[-1:] if self._cumulative else events

    def read(self, data: bytes) -> Json:
        """Parse one event. Of lists that repeat what is known, only the new entries are left in it."""
        if self._cumulative:
            parts, at = [], 0
            for column in (self._ids, self._logprobs, *self._more):
                if (cut := column.known(data, at)) is not None:
                    start, same, end = cut
                    parts.append(data[at:start])
                    parts.append(data[same:end])
                    at = end
            data = b"".join((*parts, data[at:]))
        return parse_object(data, self._blobs)

    def add(self, event: Json) -> GenerateDelta | None:
        """Take one parsed event; return its new tokens, ``None`` when it brought none."""
        meta = meta_of(event)
        total = int_of(meta, "completion_tokens")
        if self._most is not None and total > self._most:  # it may never stop
            raise UpstreamError(f"engine sent {total} output ids, {self._most} were asked for")
        before = len(self._ids.items)
        if self._ids.take(event.get("output_ids"), total):
            self._cumulative = True
        for column in (self._logprobs, *self._more):
            column.take(meta.get(column.name), total)
        self.last = event
        if total == before:
            return None
        return _delta(self._ids.items[before:], self._logprobs.items[before:], cached_of(meta, self._prompt))

    def whole(self) -> Json:
        """The reply as a call without a stream would have got it, less its text."""
        meta = dict(meta_of(self.last or {}))
        for column in (self._logprobs, *self._more):
            meta[column.name] = column.items
        return {"output_ids": self._ids.items, "meta_info": meta}
