"""One model call, from parsed request to committed node.

The order is the product: attach, render only what is new, call the engine, parse, commit, and only then let
the caller send the end of the reply. A turn that fails before its commit leaves nothing; one that is
cancelled during its commit is recorded. Depends on ``forest``, a family, the router and the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import orjson

from tollway.errors import BadRequest, CapacityExceeded, ContextLengthExceeded, TollwayError, UpstreamError
from tollway.messages import Message, ToolCall
from tollway.records import Ids, Sampling, TurnRecord
from tollway.router.engines import GenerateCall, GenerateDelta
from tollway.router.service import Lineage, Routed, Router
from tollway.session_server import metrics
from tollway.session_server.config import ServerConfig
from tollway.session_server.families.base import Family, ParsedReply, PathTail, StreamDelta
from tollway.session_server.forest import Attachment, Node, common_prefix, path_ids
from tollway.session_server.journal import Journal
from tollway.session_server.names import fresh
from tollway.session_server.request import TurnDelta, TurnOutcome, TurnRequest
from tollway.session_server.rows import node_insert
from tollway.session_server.session import Session

__all__ = ["Turns"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_TAIL = 64
"""Last prompt ids that a family sees: enough for any template's opening of a reply."""
_OFF_LOOP_CHARS = 16_384
"""Rendering more text than this takes over a millisecond and leaves the event loop."""
_OFF_LOOP_IDS = 4_096
_BREAKS = ("edited", "tools_changed", "rerendered")
"""Reasons of roots that replace a conversation: what they share with it could still be cached."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a turn hangs and what it sends."""

    attachment: Attachment
    parent: Node | None
    reason: str
    new_messages: Sequence[Message]
    suffix: Ids
    """[added] ids after the parent's last one."""
    prompt: Ids
    """[path + added]"""


class Turns:
    """Runs turns of any session."""

    def __init__(self, config: ServerConfig, family: Family, router: Router, journal: Journal) -> None:
        self._config = config
        self._family = family
        self._router = router
        self._journal = journal

    async def run(
        self, session: Session, request: TurnRequest, *, keep: Callable[[TurnOutcome], bytes] | None = None
    ) -> AsyncGenerator[TurnDelta | TurnOutcome]:
        """Yield deltas (when streaming) and, once the turn is on disk, its outcome.

        ``keep`` renders the reply that the journal keeps for retries with an idempotency key. Raises
        ``BadRequest``, ``ContextLengthExceeded``, ``CapacityExceeded``, the router's errors, ``JournalError``.
        """
        try:
            self._admit(session)
            plan = await self._plan(session, request)
            sampling = self._sampling(session, request, int(plan.prompt.size))
            call = self._call(session, request, plan, sampling)
            lineage = _lineage(session, plan)
            ids: list[str] = []
            tools = request.tools if request.calls_allowed else ()
            routed: Routed | None = None
            prompt_end = plan.suffix[-_TAIL:]
            parser = self._family.stream(tools, prompt_end=prompt_end, stop=sampling.stop) if request.stream else None
            if parser is None:
                routed = await self._router.generate(session.session_id, call, lineage=lineage, group=session.group_id)
            else:
                stream = self._router.stream(session.session_id, call, lineage=lineage, group=session.group_id)
                async with aclosing(stream) as items:
                    async for item in items:
                        if isinstance(item, GenerateDelta):
                            for delta in parser.feed(item.output_ids.tolist()):
                                yield _with_id(delta, ids)
                        else:
                            routed = item
            if routed is None or not routed.reply.output_ids.size:
                raise UpstreamError("the engine ended without a token")
            parsed = await self._parse(routed, request, prompt_end)
            if parser is not None:
                for delta in parser.finish(parsed):
                    yield _with_id(delta, ids)
            outcome = await self._commit(session, request, plan, _Result(routed, sampling, parsed, ids), keep)
        except TollwayError as error:
            metrics.TURNS.labels(error.code).inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            metrics.TURNS.labels("cancelled").inc()
            raise
        metrics.TURNS.labels("ok").inc()
        metrics.SAMPLED.inc(int(outcome.record.sampled_ids.size))
        yield outcome

    # -- before the engine -------------------------------------------------------------------------

    def _admit(self, session: Session) -> None:
        if session.state != "open":
            raise BadRequest("this session is closed; open a new one")
        if session.next_number >= self._config.max_nodes:
            raise BadRequest(f"this session has made {session.next_number} model calls, which is server.max_nodes")
        if session.calls.running > self._config.max_concurrent_turns:
            raise CapacityExceeded(f"{session.calls.running} calls of this session are running", retry_after_s=1.0)
        self._router.require_engine()
        self._router.check_version(session.session_id, session.settings.min_version, session.settings.exact_version)

    async def _plan(self, session: Session, request: TurnRequest) -> _Plan:
        attachment = session.forest.attach(request.messages, request.tools)
        parent = attachment.parent
        chars = sum(len(message.content) for message in attachment.new_messages)
        if parent is not None:
            tail = PathTail(parent.record.suffix_ids[-_TAIL:], parent.record.sampled_ids, parent.record.finish_reason)
            added = await _maybe_off_loop(
                chars > _OFF_LOOP_CHARS,
                lambda: self._family.extend(tail, attachment.new_messages, request.tools, request.options),
            )
            if added is not None:
                prompt = path_ids(parent, added)
                return _Plan(attachment, parent, attachment.reason, attachment.new_messages, added, prompt)
        chars = sum(len(message.content) for message in request.messages)
        prompt = await _maybe_off_loop(
            chars > _OFF_LOOP_CHARS,
            lambda: self._family.render_prompt(request.messages, request.tools, request.options),
        )
        # The family could not append without changing earlier ids: a new root, never a silent rewrite.
        reason = "rerendered" if parent is not None else attachment.reason
        return _Plan(attachment, None, reason, request.messages, prompt, prompt)

    def _sampling(self, session: Session, request: TurnRequest, prompt_tokens: int) -> Sampling:
        own = session.settings.sampling
        base = session.sampling()
        asked = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        used: dict[str, float | int] = {}
        for name, value in asked.items():
            fixed = getattr(base, name)
            if value is None or name in own:
                used[name] = fixed
                session.sampling_overridden += int(value is not None and value != fixed)
            else:
                used[name] = value
        limit = self._config.context_length or self._router.context_length()
        room = limit - prompt_tokens if limit is not None else None
        if limit is not None and room is not None and room < 1:
            raise ContextLengthExceeded(prompt_tokens, limit)
        wishes = (request.max_new_tokens, base.max_new_tokens, self._config.max_new_tokens, room)
        known = [wish for wish in wishes if wish is not None]
        if not known:
            raise BadRequest("the engine does not say how long its context is; send max_tokens", param="max_tokens")
        return Sampling(
            temperature=used["temperature"],
            top_p=used["top_p"],
            top_k=int(used["top_k"]),
            max_new_tokens=min(known),
            seed=request.seed if request.seed is not None else base.seed,
            stop=(*base.stop, *request.stop),
            stop_token_ids=tuple(dict.fromkeys((*self._family.stop_ids, *base.stop_token_ids))),
        )

    def _call(self, session: Session, request: TurnRequest, plan: _Plan, sampling: Sampling) -> GenerateCall:
        routes = self._config.routed_experts
        return GenerateCall(
            rid=f"{session.session_id[:12]}-{fresh()}",
            input_ids=plan.prompt,
            sampling=sampling,
            routing_key=session.session_id,
            stream=request.stream,
            top_logprobs=max(request.top_logprobs, self._config.top_logprobs),
            return_routed_experts=routes,
            # The parent's last id has no row yet.
            routed_experts_start=plan.parent.length - 1 if routes and plan.parent is not None else 0,
        )

    # -- after the engine --------------------------------------------------------------------------

    async def _parse(self, routed: Routed, request: TurnRequest, prompt_end: Ids) -> ParsedReply:
        reply = routed.reply
        stop = reply.matched if isinstance(reply.matched, str) else None
        tools = request.tools if request.calls_allowed else ()
        return await _maybe_off_loop(
            reply.output_ids.size > _OFF_LOOP_IDS,
            lambda: self._family.parse(reply.output_ids, tools, prompt_end=prompt_end, stop=stop),
        )

    async def _commit(
        self,
        session: Session,
        request: TurnRequest,
        plan: _Plan,
        result: _Result,
        keep: Callable[[TurnOutcome], bytes] | None,
    ) -> TurnOutcome:
        message = result.message()
        record = result.record(plan)
        node = self._node(session, plan, record, message, result.routed)
        finish = "length" if record.finish_reason == "length" else "tool_calls" if message.tool_calls else "stop"
        outcome = TurnOutcome(number=node.number, message=message, finish_reason=finish, record=record)
        statements = [
            node_insert(
                session.session_id,
                node,
                messages=_messages_json(plan, message),
                key=request.idempotency_key,
                reply=keep(outcome) if keep is not None and request.idempotency_key is not None else None,
            )
        ]
        old = plan.attachment.supersedes
        if old is not None:
            statements.append(
                (
                    "UPDATE turns SET superseded=1 WHERE session_id=? AND number=?",
                    (session.session_id, old.number),
                )
            )
        written = self._journal.submit(*statements)

        def take_in(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is None:
                session.forest.add(node)
                if old is not None:
                    old.superseded = True

        # Registered before the wait: a client that goes during the sync cannot split file and memory.
        written.add_done_callback(take_in)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            node.delivered = False
            raise
        return outcome

    def _node(self, session: Session, plan: _Plan, record: TurnRecord, message: Message, routed: Routed) -> Node:
        attachment = plan.attachment
        end, bare = session.forest.end_digests(attachment.request_digest, message)
        return Node(
            number=session.take_number(),
            parent=plan.parent,
            record=record,
            reason=plan.reason,
            request_digest=attachment.request_digest,
            end_digest=end,
            bare_digest=bare,
            root_digest=attachment.root_digest,
            tools=attachment.tools,
            length=int(plan.prompt.size + record.sampled_ids.size),
            facts=routed.facts,
        )


@dataclass(frozen=True, slots=True)
class _Result:
    """What came back from the engine, read."""

    routed: Routed
    sampling: Sampling
    parsed: ParsedReply
    call_ids: list[str]
    """Ids that streamed tool calls were given already."""

    def message(self) -> Message:
        """The reply as the harness gets it."""
        parsed = self.parsed
        while len(self.call_ids) < len(parsed.calls):
            self.call_ids.append(_call_id())
        calls = tuple(
            ToolCall(call_id, call.name, call.arguments)
            for call_id, call in zip(self.call_ids, parsed.calls, strict=False)
        )
        return Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls)

    def record(self, plan: _Plan) -> TurnRecord:
        """The reply as it is kept."""
        reply = self.routed.reply
        return TurnRecord(
            suffix_ids=plan.suffix,
            sampled_ids=reply.output_ids,
            logprobs=reply.logprobs,
            versions=reply.versions,
            finish_reason=reply.finish_reason,
            sampling=self.sampling,
            engine_id=self.routed.engine_name,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            started_at=self.routed.started_at,
            ended_at=self.routed.ended_at,
            matched=reply.matched,
            routed_experts=reply.routed_experts,
            top_logprobs=reply.top_logprobs,
        )


def _lineage(session: Session, plan: _Plan) -> Lineage:
    """What the cache ledger has to know about the call before."""
    parent = plan.parent
    if parent is not None:
        return Lineage(parent.facts, parent.length)
    broken = session.forest.last
    if broken is None or plan.reason not in _BREAKS:
        return Lineage()
    empty = np.zeros(0, np.int32)
    return Lineage(broken.facts, common_prefix(plan.prompt, path_ids(broken, empty)))


def _with_id(delta: StreamDelta, ids: list[str]) -> TurnDelta:
    if delta.call is None:
        return TurnDelta(content=delta.content, reasoning=delta.reasoning)
    ids.append(_call_id())
    return TurnDelta(call=ToolCall(ids[-1], delta.call.name, delta.call.arguments))


def _call_id() -> str:
    return f"call_{fresh()}"


def _messages_json(plan: _Plan, reply: Message) -> bytes:
    """New messages and the reply, for people who read the journal."""
    return orjson.dumps([_plain(message) for message in (*plan.new_messages, reply)])


def _plain(message: Message) -> dict[str, object]:
    out: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    return out


async def _maybe_off_loop(heavy: bool, work: Callable[[], _T]) -> _T:
    return await asyncio.to_thread(work) if heavy else work()
