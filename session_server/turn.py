"""One model call, from matched request to committed nodes.

The order is the product: attach, render only what is new, call the engine, parse, commit, and only then let
the caller send the end of the reply. A turn that fails before its commit leaves nothing; one that is
cancelled during its commit is recorded. Depends on ``forest``, a family, the router and the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from tollway.errors import (
    BadRequest,
    CapacityExceeded,
    ContextLengthExceeded,
    JournalError,
    TollwayError,
    UpstreamError,
)
from tollway.messages import Message, ToolCall
from tollway.records import Ids, Sampling, TurnRecord
from tollway.router.engines import GenerateCall, GenerateDelta
from tollway.router.seats import TermFields
from tollway.router.service import Lineage, Routed, Router
from tollway.router.targets import ANY, Wanted
from tollway.router.wire import Prompt, ids_json
from tollway.session_server import metrics
from tollway.session_server.config import ServerConfig
from tollway.session_server.families.base import Family, ParsedReply, PathTail, StreamDelta
from tollway.session_server.forest import Attachment, Node, Place, common_prefix, path_prompt
from tollway.session_server.journal import Journal, Statement
from tollway.session_server.names import fresh
from tollway.session_server.request import TurnDelta, TurnOutcome, Wish
from tollway.session_server.rows import TurnInsert, messages_json, turn_insert
from tollway.session_server.sampling import sampling_of
from tollway.session_server.session import Session

__all__ = ["Asked", "Turns"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_TAIL = 64
"""Last prompt ids that a family sees: enough for any template's opening of a reply."""
_OFF_LOOP_CHARS = 16_384
"""Rendering more text than this takes over a millisecond and leaves the event loop."""
_OFF_LOOP_IDS = 4_096
_PADDING = 16
_FIRST = ("root", "continuation", "fork", "new_root", "new_conversation")
"""Reasons that say of a question that it was new."""
_BREAKS = ("edited", "tools_changed", "rerendered")
"""Reasons of roots that replace a conversation: what they share with it could still be cached."""
Outcomes = tuple[TurnOutcome, ...]
Keep = Callable[[Outcomes], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request with its conversation, as far as it had to be read."""

    wish: Wish
    place: Place
    """Of the whole conversation in the forest."""
    messages: Sequence[Message]
    """The last kernel messages of the conversation: from ``first`` on."""
    first: int
    """How many kernel messages come before ``messages``."""
    whole: Callable[[], Awaitable[Sequence[Message]]]
    """All kernel messages, for the rare turn that has to render them anew."""
    named: Node | None = None
    """Node whose reply the request names as the one that it continues."""
    reply_id: str = ""
    call_prefix: str = "call_"
    key: str | None = None
    """Idempotency key."""
    want: Wanted = ANY
    """Weight versions that the session and the request accept."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a turn hangs and what it sends."""

    attachment: Attachment
    parent: Node | None
    reason: str
    new_messages: Sequence[Message]
    suffix: Ids
    """[added] ids after the parent's last one."""
    chunk: bytes
    """The same as text."""
    prompt: Prompt
    """The path's ids and the added ones."""

    @property
    def prompt_end(self) -> Ids:
        """[up to 64] last ids of the prompt."""
        return self.suffix[-_TAIL:]


@dataclass(slots=True)
class _Choice:
    """One of the replies that a turn asks for."""

    index: int
    sampling: Sampling
    call_ids: list[str]
    """Ids that streamed tool calls were given already."""
    routed: Routed | None = None
    parsed: ParsedReply | None = None


class Turns:
    """Runs turns of any session."""

    def __init__(self, config: ServerConfig, family: Family, router: Router, journal: Journal, *, boot: str) -> None:
        self._config = config
        self._family = family
        self._router = router
        self._journal = journal
        self._boot = boot

    async def run(
        self, session: Session, asked: Asked, *, keep: Keep | None = None
    ) -> AsyncGenerator[TurnDelta | Outcomes]:
        """Yield deltas (when streaming) and, once every choice is on disk, the outcomes.

        ``keep`` renders the reply that the journal keeps for retries with an idempotency key. Raises
        ``BadRequest``, ``ContextLengthExceeded``, ``CapacityExceeded``, the router's errors, ``JournalError``.
        """
        wish = asked.wish
        plan: _Plan | None = None
        try:
            _check_limits(session, wish.choices, self._config)
            self._router.require_engine(session.session_id, session.settings.model)
            plan = await self._plan(session, asked)
            sampling = sampling_of(
                session, wish, plan.prompt.size, config=self._config, family=self._family, router=self._router,
                prompt_end=plan.prompt_end,
            )  # fmt: skip
            choices = [_Choice(at, _reseeded(sampling, at), []) for at in range(wish.choices)]
            if wish.choices == 1:
                async with aclosing(self._generate(session, asked, plan, choices[0])) as deltas:
                    async for delta in deltas:
                        yield delta
            else:
                async with aclosing(self._together(session, asked, plan, choices)) as deltas:
                    async for delta in deltas:
                        yield delta
            outcomes = await self._commit(session, asked, plan, choices, keep)
        except TollwayError as error:
            metrics.TURNS.labels(error.code).inc()
            if isinstance(error, ContextLengthExceeded) and plan is not None and plan.parent is not None:
                await self._overflow(session, plan.parent)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            metrics.TURNS.labels("cancelled").inc()
            raise
        metrics.TURNS.labels("ok").inc(len(outcomes))
        if plan.reason != "continuation":
            metrics.BRANCHES.labels(plan.reason).inc()
        metrics.LEFT_OUT.inc(len(wish.left_out))
        metrics.SAMPLED.inc(sum(int(outcome.record.sampled_ids.size) for outcome in outcomes))
        yield outcomes

    async def count(self, session: Session, asked: Asked) -> int:
        """Ids of the prompt that this request would send. Calls no engine."""
        return (await self._plan(session, asked)).prompt.size

    # -- before the engine -------------------------------------------------------------------------

    async def _plan(self, session: Session, asked: Asked) -> _Plan:
        attachment = session.forest.attach(asked.place, named=asked.named)
        parent = attachment.parent
        wish = asked.wish
        if parent is not None:
            added = await self._extension(asked, attachment, parent)
            if added is not None:
                suffix, messages = added
                chunk = ids_json(suffix)
                prompt = path_prompt(parent).extended(chunk, int(suffix.size))
                return _Plan(attachment, parent, attachment.reason, messages, suffix, chunk, prompt)
        messages = await asked.whole()
        suffix = await _maybe_off_loop(
            _chars(messages) > _OFF_LOOP_CHARS,
            lambda: self._family.render_prompt(messages, wish.tools, wish.options),
        )
        # The family could not append without changing earlier ids: a new root, never a silent rewrite.
        reason = "rerendered" if parent is not None else attachment.reason
        return _Plan(attachment, None, reason, messages, suffix, ids_json(suffix), Prompt.of(suffix))

    async def _extension(
        self, asked: Asked, attachment: Attachment, parent: Node
    ) -> tuple[Ids, Sequence[Message]] | None:
        """([added] ids, new messages) behind ``parent``; ``None`` when the family cannot append."""
        family, wish = self._family, asked.wish
        # Places count from the conversation's beginning, or from the reply that the request names.
        behind = attachment.used - asked.first
        messages = asked.messages[behind:] if behind >= 0 else (await asked.whole())[attachment.used :]
        history = (await asked.whole())[: -len(messages) or None] if family.needs_history else ()
        prompt_end, sampled = parent.own_ids()
        tail = PathTail(prompt_end[-_TAIL:], sampled, parent.finish_reason)
        added = await _maybe_off_loop(
            _chars(messages) > _OFF_LOOP_CHARS or family.needs_history,
            lambda: family.extend(tail, messages, wish.tools, wish.options, history=history),
        )
        return None if added is None else (added, messages)

    # -- the engine --------------------------------------------------------------------------------

    async def _generate(
        self, session: Session, asked: Asked, plan: _Plan, choice: _Choice
    ) -> AsyncGenerator[TurnDelta]:
        """Run one choice to its parsed end; yields deltas when streaming."""
        wish = asked.wish
        call = self._call(session, asked, plan, choice)
        lineage = _lineage(session, plan)
        tools = wish.tools if wish.tool_choice.mode != "none" else ()
        key, terms = session.session_id, _terms(session, asked)
        parser = (
            self._family.stream(tools, prompt_end=plan.prompt_end, stop=choice.sampling.stop) if wish.stream else None
        )
        routed: Routed | None = None
        if parser is None:
            routed = await self._router.generate(key, call, lineage=lineage, **terms)
        else:
            async with aclosing(self._router.stream(key, call, lineage=lineage, **terms)) as items:
                async for item in items:
                    if isinstance(item, GenerateDelta):
                        for delta in parser.feed(item.output_ids.tolist()):
                            yield _named(delta, choice, asked.call_prefix)
                    else:
                        routed = item
        if routed is None or not routed.reply.output_ids.size:
            raise UpstreamError("the engine ended without a token")
        _check_ids(routed.reply.output_ids, self._family)
        choice.routed = routed
        choice.parsed = await self._parse(routed, wish, plan.prompt_end)
        if parser is not None:
            for delta in parser.finish(choice.parsed):
                yield _named(delta, choice, asked.call_prefix)

    async def _together(
        self, session: Session, asked: Asked, plan: _Plan, choices: Sequence[_Choice]
    ) -> AsyncGenerator[TurnDelta]:
        """Run several choices side by side. The first that fails ends them all."""
        deltas: asyncio.Queue[TurnDelta | None] = asyncio.Queue()

        async def one(choice: _Choice) -> None:
            async with aclosing(self._generate(session, asked, plan, choice)) as pieces:
                async for piece in pieces:
                    deltas.put_nowait(piece)

        async def everyone() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for choice in choices:
                        group.create_task(one(choice))
            except* TollwayError as errors:
                raise _first(errors) from None
            finally:
                deltas.put_nowait(None)

        running = asyncio.get_running_loop().create_task(everyone())
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _call(self, session: Session, asked: Asked, plan: _Plan, choice: _Choice) -> GenerateCall:
        config = self._config
        start = plan.parent.length - 1 if plan.parent is not None else 0
        return GenerateCall(
            rid=f"{session.session_id[:12]}-{fresh()}",
            prompt=plan.prompt,
            sampling=choice.sampling,
            routing_key=session.session_id,
            stream=asked.wish.stream,
            top_logprobs=max(asked.wish.top_logprobs, config.top_logprobs),
            return_routed_experts=config.routed_experts,
            # The parent's last id has no row yet.
            routed_experts_start=start if config.routed_experts else 0,
            return_sampling_mask=config.sampling_masks,
            return_indexer_topk=config.indexer_topk,
            indexer_topk_start=start if config.indexer_topk else 0,
        )

    async def _parse(self, routed: Routed, wish: Wish, prompt_end: Ids) -> ParsedReply:
        reply = routed.reply
        stop = reply.matched if isinstance(reply.matched, str) else None
        tools = wish.tools if wish.tool_choice.mode != "none" else ()
        return await _maybe_off_loop(
            reply.output_ids.size > _OFF_LOOP_IDS,
            lambda: self._family.parse(reply.output_ids, tools, prompt_end=prompt_end, stop=stop),
        )

    # -- after the engine --------------------------------------------------------------------------

    async def _commit(
        self, session: Session, asked: Asked, plan: _Plan, choices: Sequence[_Choice], keep: Keep | None
    ) -> Outcomes:
        made = [self._made(session, asked, plan, choice) for choice in choices]
        outcomes = tuple(outcome for _, outcome in made)
        statements: list[Statement] = []
        sizes = []
        for at, (node, outcome) in enumerate(made):
            insert = TurnInsert(
                messages=messages_json((*plan.new_messages, outcome.message)),
                boot=self._boot,
                key=asked.key if at == 0 else None,
                reply=keep(outcomes) if keep is not None and asked.key is not None and at == 0 else None,
            )
            statement, size = turn_insert(session.session_id, node, outcome.record, insert)
            statements.append(statement)
            sizes.append(size)
        lost = plan.attachment.supersedes
        for old in lost:
            statements.append(
                ("UPDATE turns SET superseded=1 WHERE session_id=? AND number=?", (session.session_id, old.number))
            )
        written = self._journal.submit(*statements)
        question = plan.attachment.place.at
        session.committing[question] += 1

        def take_in(done: asyncio.Future[None]) -> None:
            session.committing[question] -= 1
            if not session.committing[question]:
                del session.committing[question]
            if not done.cancelled() and done.exception() is None:
                for (node, _), size in zip(made, sizes, strict=True):
                    session.take_in(node, size)
                for old in lost:
                    old.superseded = True

        # Registered before the wait: a client that goes during the sync cannot split file and memory.
        written.add_done_callback(take_in)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            for node, _ in made:
                node.delivered = False
            raise
        return outcomes

    async def _overflow(self, session: Session, node: Node) -> None:
        """Note that the context ended the conversation at ``node``: its export says that it was cut."""
        if node.overflowed:
            return
        try:
            await self._journal.write(
                ("UPDATE turns SET overflowed=1 WHERE session_id=? AND number=?", (session.session_id, node.number))
            )
            node.overflowed = True
        except JournalError as error:
            # The client has to hear that its prompt is too long; the next such request tries again.
            logger.error(
                "session %s: the overflow of turn %d is not noted: %s", session.session_id[:8], node.number, error
            )

    def _made(self, session: Session, asked: Asked, plan: _Plan, choice: _Choice) -> tuple[Node, TurnOutcome]:
        """The node and the outcome of one choice."""
        routed, parsed = choice.routed, choice.parsed
        if routed is None or parsed is None:
            raise UpstreamError(f"choice {choice.index} ended without a reply")
        message = _message(parsed, choice, asked.call_prefix)
        record = _record(plan, choice, routed)
        attachment = plan.attachment
        place = attachment.place
        end, bare = session.forest.end_digests(place.at, message)
        # The same question may have been answered while this answer was made.
        late = plan.reason in _FIRST and session.answered(place.at)
        sampled = int(record.sampled_ids.size)
        node = Node(
            number=session.take_number(),
            parent=plan.parent,
            reason="choice" if choice.index else "sibling" if late else plan.reason,
            chunk=plan.chunk + (b"," if plan.chunk else b"") + ids_json(record.sampled_ids),
            suffix_size=int(plan.suffix.size),
            sampled_size=sampled,
            length=plan.prompt.size + sampled,
            finish_reason=record.finish_reason,
            request_digest=place.at,
            end_digest=end,
            bare_digest=bare,
            root_digest=place.root,
            lead_digest=place.lead,
            tools=place.tools,
            engine_id=record.engine_id,
            versions=record.versions,
            cached_tokens=record.cached_tokens,
            reply_id=asked.reply_id if asked.wish.store and choice.index == 0 else "",
            attempts=routed.attempts if len(routed.attempts) > 1 else (),
            facts=routed.facts,
            fresh=(plan.suffix, record.sampled_ids),
        )
        if plan.parent is not None:
            plan.parent.fresh = None
        finish = "length" if record.finish_reason == "length" else "tool_calls" if message.tool_calls else "stop"
        return node, TurnOutcome(number=node.number, message=message, finish_reason=finish, record=record)


def _check_limits(session: Session, choices: int, config: ServerConfig) -> None:
    if session.state != "open":
        raise BadRequest("this session is closed; open a new one")
    if session.next_number + choices > config.max_nodes:
        raise BadRequest(
            f"this session has made {session.next_number} model calls; {choices} more pass server.max_nodes, "
            f"which is {config.max_nodes}"
        )
    if config.max_session_tokens is not None and session.tokens >= config.max_session_tokens:
        raise BadRequest(f"this session keeps {session.tokens} tokens; server.max_session_tokens allows no more")
    if config.max_session_bytes is not None and session.stored_bytes >= config.max_session_bytes:
        raise BadRequest(f"this session takes {session.stored_bytes} bytes; server.max_session_bytes is reached")
    most = config.max_concurrent_turns
    if choices > most:
        raise BadRequest(f"n is {choices}; server.max_concurrent_turns allows {most} calls at once", param="n")
    if (running := session.calls.running - 1 + choices) > most:
        raise CapacityExceeded(f"{running} calls of this session would run, {most} may", retry_after_s=1.0)


def _check_ids(ids: Ids, family: Family) -> None:
    # Models pad their vocabulary to round sizes, the largest known by 0.2 %, and may sample such an id.
    limit = family.vocab_size + max(_PADDING, family.vocab_size // 100)
    if (largest := int(ids.max())) >= limit:
        raise UpstreamError(
            f"engine sampled id {largest}, family {family.name} has {family.vocab_size}; "
            "server.family and server.tokenizer must be those of the engine's model"
        )


def _record(plan: _Plan, choice: _Choice, routed: Routed) -> TurnRecord:
    """The reply as it is kept."""
    reply = routed.reply
    return TurnRecord(
        suffix_ids=plan.suffix,
        sampled_ids=reply.output_ids,
        logprobs=reply.logprobs,
        versions=reply.versions,
        finish_reason=reply.finish_reason,
        sampling=choice.sampling,
        engine_id=routed.engine_name,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        started_at=routed.started_at,
        ended_at=routed.ended_at,
        matched=reply.matched,
        routed_experts=reply.routed_experts,
        top_logprobs=reply.top_logprobs,
        sampling_mask=reply.sampling_mask,
        indexer_topk=reply.indexer_topk,
    )


def _message(parsed: ParsedReply, choice: _Choice, prefix: str) -> Message:
    """The reply as the harness gets it."""
    while len(choice.call_ids) < len(parsed.calls):
        choice.call_ids.append(prefix + fresh())
    calls = tuple(
        ToolCall(call_id, call.name, call.arguments)
        for call_id, call in zip(choice.call_ids, parsed.calls, strict=False)
    )
    return Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls)


def _named(delta: StreamDelta, choice: _Choice, prefix: str) -> TurnDelta:
    if delta.call is None:
        return TurnDelta(content=delta.content, reasoning=delta.reasoning, choice=choice.index)
    choice.call_ids.append(prefix + fresh())
    call = ToolCall(choice.call_ids[-1], delta.call.name, delta.call.arguments)
    return TurnDelta(call=call, choice=choice.index)


def _terms(session: Session, asked: Asked) -> TermFields:
    """What the call asks of its place."""
    settings = session.settings
    return {
        "group": session.group_id,
        "model": settings.model,
        "parent": settings.parent_id,
        "want": asked.want,
        "priority": settings.priority,
    }


def _lineage(session: Session, plan: _Plan) -> Lineage:
    """What the cache ledger has to know about the call before."""
    parent, broken = plan.parent, session.forest.last
    if parent is not None:
        lost = 0
        if plan.reason == "edited" and broken is not None and broken is not parent and parent in broken.path():
            lost = broken.length - common_prefix(plan.prompt, path_prompt(broken))
        return Lineage(parent.facts, parent.length, lost)
    if broken is None or plan.reason not in _BREAKS:
        return Lineage()
    return Lineage(broken.facts, common_prefix(plan.prompt, path_prompt(broken)))


def _reseeded(sampling: Sampling, index: int) -> Sampling:
    """Choices of one request must differ although they share its seed."""
    return sampling if sampling.seed is None or index == 0 else replace(sampling, seed=sampling.seed + index)


def _first(errors: BaseExceptionGroup[TollwayError]) -> TollwayError:
    first = errors.exceptions[0]
    return first if isinstance(first, TollwayError) else _first(first)


def _chars(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)


async def _maybe_off_loop(heavy: bool, work: Callable[[], _T]) -> _T:
    return await asyncio.to_thread(work) if heavy else work()
