"""A reply of OpenAI Responses as events: items and parts strictly bracketed, numbers that only rise.

Depends on orjson and the items of ``responses_output``.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from tollway.errors import TollwayError
from tollway.messages import ToolCall
from tollway.session_server.dialects.base import ReplyNames, StreamWriter
from tollway.session_server.dialects.events import named_event
from tollway.session_server.dialects.logprobs import logprob_entries
from tollway.session_server.dialects.responses_output import (
    call_item,
    compaction_item,
    extras_of,
    item_id,
    message_item,
    reasoning_item,
    response_object,
)
from tollway.session_server.families.base import Family
from tollway.session_server.request import TurnDelta, TurnOutcome, Wish

__all__ = ["ResponsesStream"]

Item = dict[str, object]


class ResponsesStream(StreamWriter):
    """Writes one reply. At most one item is open, and only text and reasoning stay open between deltas."""

    def __init__(self, wish: Wish, names: ReplyNames, family: Family) -> None:
        self._wish = wish
        self._names = names
        self._family = family
        self._extras = extras_of(wish)
        self._number = 0
        self._items: list[Item] = []
        """Items that are done."""
        self._open: _TextItem | None = None

    def start(self) -> bytes:
        """The response before it has anything."""
        value = response_object(self._wish, self._names, status="in_progress")
        return self.event("response.created", response=value) + self.event("response.in_progress", response=value)

    def delta(self, delta: TurnDelta) -> bytes:
        """One piece; nothing when the reply is a compaction, which leaves whole."""
        if self._extras.compaction:
            return b""
        if delta.call is not None:
            return self._close() + self._call(delta.call)
        kind = "reasoning" if delta.reasoning else "message"
        before = b""
        item = self._open
        if item is None or item.kind != kind:
            before = self._close()
            item = _TextItem(self, kind, len(self._items))
            self._open = item
            before += item.opening()
        return before + item.delta(delta.reasoning or delta.content)

    def end(self, outcomes: Sequence[TurnOutcome]) -> bytes:
        """Close what is open and complete the response."""
        outcome = outcomes[0]
        status = "incomplete" if outcome.finish_reason == "length" else "completed"
        logprobs: Sequence[object] = ()
        if self._extras.logprobs:
            logprobs = logprob_entries(outcome.record, self._wish.top_logprobs, self._family)
        if self._extras.compaction:
            out = self._whole(compaction_item(outcome.message, self._names))
        else:
            out = b""
            if self._open is None and not self._items:
                self._open = _TextItem(self, "message", 0)
                out = self._open.opening()
            out += self._close(status, logprobs)
            self._items[-1]["status"] = status
            self._keep_logprobs(logprobs)
        value = response_object(
            self._wish, self._names, status=status, output=self._items, outcome=outcome, family=self._family
        )
        return out + self.event(f"response.{status}", response=value)

    def error(self, error: TollwayError) -> bytes:
        """``response.failed`` for harnesses that read it, and the error event that SDKs raise."""
        told = {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": str(error)}
        value = response_object(self._wish, self._names, status="failed", output=self._items, error=told)
        said = {"type": "server_error", "code": error.code, "message": str(error), "param": None}
        return self.event("response.failed", response=value) + self.event(
            "error", code=error.code, message=str(error), param=None, error=said
        )

    def event(self, kind: str, **fields: object) -> bytes:
        """One event with the next number."""
        number, self._number = self._number, self._number + 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    def numbered(self, head: bytes, text: str) -> bytes:
        """A delta event whose bytes up to the text are ready: the path of every token."""
        number, self._number = self._number, self._number + 1
        return head + orjson.dumps(text) + b',"sequence_number":%d}\n\n' % number

    @property
    def names(self) -> ReplyNames:
        """Of the reply."""
        return self._names

    def finished(self, name: str, kind: str, text: str, status: str, logprobs: Sequence[object]) -> Item:
        """A text item as it stands in the end."""
        if kind == "reasoning":
            return reasoning_item(name, text, self._extras, status)
        return message_item(name, text, status, logprobs)

    @property
    def summarised(self) -> bool:
        """Whether reasoning goes out as a summary."""
        return self._extras.summary is not None

    def _close(self, status: str = "completed", logprobs: Sequence[object] = ()) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        events, value = item.closing(status, logprobs)
        self._items.append(value)
        return events

    def _call(self, call: ToolCall) -> bytes:
        at = len(self._items)
        done = call_item(call, self._extras, self._names, at)
        field = "input" if done["type"] == "custom_tool_call" else "arguments"
        event = "response.custom_tool_call_input" if field == "input" else "response.function_call_arguments"
        place = {"item_id": done["id"], "output_index": at}
        text = done[field]
        whole = {field: text} if field == "input" else {"name": done["name"], field: text}
        self._items.append(done)
        return b"".join(
            (
                self.event(
                    "response.output_item.added", output_index=at, item={**done, "status": "in_progress", field: ""}
                ),
                self.event(f"{event}.delta", **place, delta=text),
                self.event(f"{event}.done", **place, **whole),
                self.event("response.output_item.done", output_index=at, item=done),
            )
        )

    def _whole(self, item: Item) -> bytes:
        self._items.append(item)
        return self.event("response.output_item.added", output_index=0, item=item) + self.event(
            "response.output_item.done", output_index=0, item=item
        )

    def _keep_logprobs(self, logprobs: Sequence[object]) -> None:
        """A text that calls followed was closed before its log-probabilities were known."""
        if not logprobs:
            return
        for at, item in enumerate(self._items):
            if item["type"] == "message":
                part = item["content"][0]  # type: ignore[index]  # made by message_item
                self._items[at] = {**item, "content": [{**part, "logprobs": logprobs}]}
                return


class _TextItem:
    """A message or a reasoning item while its text arrives."""

    def __init__(self, stream: ResponsesStream, kind: str, at: int) -> None:
        self.kind = kind
        self._stream = stream
        self._at = at
        self._name = item_id("rs" if kind == "reasoning" else "msg", stream.names, at)
        self._texts: list[str] = []
        summary = kind == "reasoning" and stream.summarised
        self._event = "output_text"
        self._empty: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if kind == "reasoning":
            self._event = "reasoning_summary_text" if summary else "reasoning_text"
            self._empty = {"type": "summary_text" if summary else "reasoning_text", "text": ""}
        self._part = "reasoning_summary_part" if summary else "content_part"
        index = "summary_index" if summary else "content_index"
        self._place = {"item_id": self._name, "output_index": at, index: 0}
        self._extra: Item = {"logprobs": []} if kind == "message" else {}
        kind_of_delta = f"response.{self._event}.delta"
        fields = orjson.dumps({"type": kind_of_delta, **self._place, **self._extra})
        self._head = f"event: {kind_of_delta}\ndata: ".encode() + fields[:-1] + b',"delta":'

    def opening(self) -> bytes:
        """The item and its one part."""
        item: Item = {"id": self._name, "type": self.kind, "status": "in_progress"}
        if self.kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": []}
        return self._stream.event("response.output_item.added", output_index=self._at, item=item) + self._stream.event(
            f"response.{self._part}.added", **self._place, part=self._empty
        )

    def delta(self, text: str) -> bytes:
        """More of its text."""
        self._texts.append(text)
        return self._stream.numbered(self._head, text)

    def closing(self, status: str, logprobs: Sequence[object]) -> tuple[bytes, Item]:
        """(events, the item that is done)."""
        text = "".join(self._texts)
        if self.kind != "message":
            logprobs = ()
        item = self._stream.finished(self._name, self.kind, text, status, logprobs)
        part = {**self._empty, "text": text}
        if self.kind == "message":
            part["logprobs"] = logprobs
            self._extra = {"logprobs": logprobs}
        events = (
            self._stream.event(f"response.{self._event}.done", **self._place, text=text, **self._extra)
            + self._stream.event(f"response.{self._part}.done", **self._place, part=part)
            + self._stream.event("response.output_item.done", output_index=self._at, item=item)
        )
        return events, item
