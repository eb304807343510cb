"""Sessions and turns as journal rows, and back. Depends on ``journal``'s row types, numpy, orjson, safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors.numpy import load, save

from tollway.messages import Message, ToolCall
from tollway.records import (
    FinishReason,
    IndexerTopk,
    RoutedExperts,
    Sampling,
    SamplingMask,
    TopLogprobs,
    TurnRecord,
    VersionSpan,
)
from tollway.router.calls import Attempt
from tollway.router.causes import CallFacts
from tollway.router.wire import ids_json
from tollway.session_server.forest import Forest, Node
from tollway.session_server.journal import Row, Statement
from tollway.session_server.session import Card, Outcome, Session, SessionState, Settings

__all__ = [
    "CARD_COLUMNS",
    "EXACT_OPEN",
    "NODE_COLUMNS",
    "SESSION_COLUMNS",
    "TURN_COLUMNS",
    "KeptTurn",
    "TurnInsert",
    "card_from_row",
    "messages_from_json",
    "messages_json",
    "node_from_row",
    "outcome_update",
    "session_from_row",
    "session_insert",
    "settings_from_row",
    "turn_from_row",
    "turn_insert",
]

SESSION_COLUMNS = "id, token_hash, state, task_id, group_id, created_at, expires_at, settings, outcome"
CARD_COLUMNS = "id, token_hash, expires_at"
EXACT_OPEN = (
    "SELECT id, settings FROM sessions WHERE state='open' AND json_extract(CAST(settings AS TEXT), '$.exact_version') "
    "IS NOT NULL"
)
"""Open sessions that are fixed to one weight version."""
_BLOBS = "suffix, sampled, logprobs, meta, messages, routes, extras"
_SIZES = "+".join(f"coalesce(length({name}),0)" for name in _BLOBS.split(", "))
NODE_COLUMNS = f"number, parent, reason, digests, suffix, sampled, meta, reply_id, superseded, overflowed, {_SIZES}"
TURN_COLUMNS = (
    "number, parent, reason, digests, suffix, sampled, logprobs, meta, routes, extras, superseded, overflowed"
)
_INSERT_TURN = (
    "INSERT INTO turns (session_id, number, parent, reason, digests, suffix, sampled, logprobs, meta, messages, "
    "routes, extras, idempotency_key, reply_id, reply) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
_INSERT_SESSION = f"INSERT INTO sessions ({SESSION_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)"  # noqa: S608 - constants
_DIGEST = 16
_DIGESTS = ("request_digest", "end_digest", "bare_digest", "root_digest", "lead_digest", "tools")
_EMPTY = bytes(_DIGEST)


# -- sessions ---------------------------------------------------------------------------------------


def session_insert(session: Session) -> Statement:
    """Row of a new session."""
    return (
        _INSERT_SESSION,
        (
            session.session_id,
            session.token_hash,
            session.state,
            session.task_id,
            session.group_id,
            session.created_at,
            session.expires_at,
            orjson.dumps(asdict(session.settings)),
            None,
        ),
    )


def outcome_update(session_id: str, outcome: Outcome) -> Statement:
    """Record the verdict."""
    return "UPDATE sessions SET outcome=? WHERE id=?", (orjson.dumps(asdict(outcome)), session_id)


def session_from_row(row: Row, *, call_ids: bool) -> Session:
    """A session without its nodes."""
    session_id, token_hash, state, task_id, group_id, created_at, expires_at, settings, outcome = row
    return Session(
        session_id=cast(str, session_id),
        token_hash=cast(bytes, token_hash),
        task_id=cast(str, task_id),
        group_id=cast(str, group_id),
        created_at=cast(float, created_at),
        expires_at=cast(float, expires_at),
        settings=Settings(**orjson.loads(cast(bytes, settings))),
        forest=Forest(call_ids=call_ids),
        state=cast(SessionState, state),
        outcome=Outcome(**orjson.loads(cast(bytes, outcome))) if outcome is not None else None,
    )


def settings_from_row(row: Row) -> tuple[str, Settings]:
    """(session id, settings) of a row of ``EXACT_OPEN``."""
    session_id, settings = row
    return cast(str, session_id), Settings(**orjson.loads(cast(bytes, settings)))


def card_from_row(row: Row, *, used_at: float) -> tuple[str, Card]:
    """(session id, card) of an open session."""
    session_id, token_hash, expires_at = row
    return cast(str, session_id), Card(cast(bytes, token_hash), cast(float, expires_at), used_at)


# -- turns ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnInsert:
    """What is written for one call beside its node and record."""

    messages: bytes
    """JSON of what the call added and of the reply: for people, and to render a conversation anew."""
    boot: str
    """Names this run of the server: what the router knows of an engine's cache is of one run."""
    key: str | None = None
    reply: bytes | None = None
    """Kept for a retry with ``key``."""


def turn_insert(session_id: str, node: Node, record: TurnRecord, insert: TurnInsert) -> tuple[Statement, int]:
    """(row of a turn, bytes that it takes)."""
    routes = record.routed_experts
    sampling = record.sampling
    meta = {
        "versions": [[span.version, span.start, span.end, span.kind, span.precision] for span in record.versions],
        "finish_reason": record.finish_reason,
        "matched": record.matched,
        "sampling": {name: getattr(sampling, name) for name in sampling.__slots__},
        "engine_id": record.engine_id,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "routes": [routes.start, *routes.ids.shape, routes.ids.dtype.itemsize] if routes is not None else None,
        "attempts": [[each.rid, each.engine_name, each.why] for each in node.attempts] or None,
        "facts": node.facts,
        "boot": insert.boot,
    }
    values = (
        session_id,
        node.number,
        node.parent.number if node.parent is not None else None,
        node.reason,
        b"".join(getattr(node, name) for name in _DIGESTS),
        record.suffix_ids.tobytes(),
        record.sampled_ids.tobytes(),
        record.logprobs.tobytes(),
        orjson.dumps(meta),
        insert.messages,
        # A buffer, not a copy: rows of expert choices are most of what a turn writes.
        np.ascontiguousarray(routes.ids).reshape(-1).view(np.uint8).data if routes is not None else None,
        _extras(record),
        insert.key,
        node.reply_id,
        insert.reply,
    )
    size = sum(len(value) for value in values[4:12] if isinstance(value, (bytes, memoryview)))
    return (_INSERT_TURN, cast(Row, values)), size


def node_from_row(row: Row, nodes: Mapping[int, Node], *, boot: str) -> tuple[Node, int]:
    """(node, bytes that its row takes); its parent must be in ``nodes`` already."""
    number, parent, reason, digests, suffix, sampled, meta, reply_id, superseded, overflowed, size = row
    facts = orjson.loads(cast(bytes, meta))
    suffix_ids, sampled_ids = (
        np.frombuffer(cast(bytes, suffix), np.int32),
        np.frombuffer(cast(bytes, sampled), np.int32),
    )
    above = nodes[cast(int, parent)] if parent is not None else None
    known = facts["facts"]
    named = _digests(digests)
    node = Node(
        number=cast(int, number),
        parent=above,
        reason=cast(str, reason),
        chunk=ids_json(np.concatenate([suffix_ids, sampled_ids])),
        suffix_size=int(suffix_ids.size),
        sampled_size=int(sampled_ids.size),
        length=(above.length if above is not None else 0) + int(suffix_ids.size + sampled_ids.size),
        finish_reason=cast(FinishReason, facts["finish_reason"]),
        engine_id=facts["engine_id"],
        versions=tuple(VersionSpan(*span) for span in facts["versions"]),
        cached_tokens=facts["cached_tokens"],
        reply_id=cast(str, reply_id),
        attempts=tuple(Attempt(*each) for each in facts.get("attempts") or ()),
        facts=CallFacts(**{**known, "earlier_run": facts["boot"] != boot}) if known is not None else None,
        superseded=bool(superseded),
        overflowed=bool(overflowed),
        request_digest=named["request_digest"],
        end_digest=named["end_digest"],
        bare_digest=named["bare_digest"],
        root_digest=named["root_digest"],
        lead_digest=named["lead_digest"],
        tools=named["tools"],
    )
    return node, cast(int, size)


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn as the journal has it, for the export."""

    number: int
    parent: int | None
    reason: str
    with_tools: bool
    superseded: bool
    overflowed: bool
    record: TurnRecord


def turn_from_row(row: Row) -> KeptTurn:
    """A whole turn, arrays included."""
    number, parent, reason, digests, suffix, sampled, logprobs, meta, routes, extras, superseded, overflowed = row
    facts = orjson.loads(cast(bytes, meta))
    route_rows = None
    if routes is not None:
        start, *shape, width = facts["routes"]
        ids = np.frombuffer(cast(bytes, routes), np.uint8 if width == 1 else np.uint16).reshape(shape)
        route_rows = RoutedExperts(start=start, ids=cast("NDArray[np.uint8] | NDArray[np.uint16]", ids))
    known = facts["sampling"]
    for name in ("stop", "stop_token_ids"):
        known[name] = tuple(known[name])
    for name in ("logit_bias", "constraint"):
        known[name] = tuple(tuple(pair) for pair in known[name])
    more = _from_extras(extras)
    record = TurnRecord(
        suffix_ids=np.frombuffer(cast(bytes, suffix), np.int32),
        sampled_ids=np.frombuffer(cast(bytes, sampled), np.int32),
        logprobs=np.frombuffer(cast(bytes, logprobs), np.float32),
        versions=tuple(VersionSpan(*span) for span in facts["versions"]),
        finish_reason=cast(FinishReason, facts["finish_reason"]),
        sampling=Sampling(**known),
        engine_id=facts["engine_id"],
        prompt_tokens=facts["prompt_tokens"],
        cached_tokens=facts["cached_tokens"],
        started_at=facts["started_at"],
        ended_at=facts["ended_at"],
        matched=facts["matched"],
        routed_experts=route_rows,
        top_logprobs=more.top_logprobs,
        sampling_mask=more.sampling_mask,
        indexer_topk=more.indexer_topk,
    )
    return KeptTurn(
        cast(int, number),
        cast("int | None", parent),
        cast(str, reason),
        _digests(digests)["tools"] != _EMPTY,
        bool(superseded),
        bool(overflowed),
        record,
    )


def _extras(record: TurnRecord) -> bytes | None:
    """Arrays that few turns have, in one blob."""
    arrays: dict[str, NDArray[np.generic]] = {}
    top, mask, indexer = record.top_logprobs, record.sampling_mask, record.indexer_topk
    if top is not None:
        arrays |= {"top_ids": top.ids, "top_logprobs": top.logprobs}
    if mask is not None:
        arrays |= {"mask_offsets": mask.offsets, "mask_ids": mask.ids, "mask_logprobs": mask.logprobs}
    if indexer is not None:
        arrays |= {"indexer_start": np.array([indexer.start], np.int64), "indexer_ids": indexer.ids}
    return save(arrays) if arrays else None


@dataclass(frozen=True, slots=True)
class _Extras:
    top_logprobs: TopLogprobs | None = None
    sampling_mask: SamplingMask | None = None
    indexer_topk: IndexerTopk | None = None


def _from_extras(blob: object) -> _Extras:
    if blob is None:
        return _Extras()
    arrays = load(cast(bytes, blob))
    top = mask = indexer = None
    if "top_ids" in arrays:
        top = TopLogprobs(ids=arrays["top_ids"], logprobs=arrays["top_logprobs"])
    if "mask_ids" in arrays:
        mask = SamplingMask(offsets=arrays["mask_offsets"], ids=arrays["mask_ids"], logprobs=arrays["mask_logprobs"])
    if "indexer_ids" in arrays:
        indexer = IndexerTopk(start=int(arrays["indexer_start"][0]), ids=arrays["indexer_ids"])
    return _Extras(top, mask, indexer)


def _digests(packed: object) -> dict[str, bytes]:
    data = cast(bytes, packed)
    return {name: data[at * _DIGEST : (at + 1) * _DIGEST] for at, name in enumerate(_DIGESTS)}


# -- messages ---------------------------------------------------------------------------------------


def messages_json(messages: Sequence[Message]) -> bytes:
    """Messages as JSON."""
    return orjson.dumps([_plain(message) for message in messages])


def messages_from_json(data: bytes) -> list[Message]:
    """Back from ``messages_json``."""
    out = []
    for raw in orjson.loads(data):
        raw["tool_calls"] = tuple(ToolCall(*call) for call in raw.get("tool_calls", ()))
        out.append(Message(**raw))
    return out


def _plain(message: Message) -> dict[str, object]:
    out: dict[str, object] = {"role": message.role, "content": message.content}
    for name in ("reasoning", "tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    return out
