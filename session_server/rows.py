"""Sessions and nodes as journal rows, and back. Depends on ``journal``'s row type, numpy and orjson."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import orjson

from tollway.records import FinishReason, RoutedExperts, Sampling, TopLogprobs, TurnRecord, VersionSpan
from tollway.session_server.forest import Forest, Node
from tollway.session_server.journal import Row, Statement
from tollway.session_server.session import Outcome, Session, SessionState, Settings

__all__ = ["NODE_COLUMNS", "SESSION_COLUMNS", "node_from_row", "node_insert", "session_from_row", "session_insert"]

SESSION_COLUMNS = "id, token_hash, state, task_id, group_id, created_at, expires_at, settings, outcome"
NODE_COLUMNS = (
    "number, parent, reason, digests, suffix, sampled, logprobs, meta, routes, top_ids, top_logprobs, superseded"
)
_INSERT_NODE = (
    "INSERT INTO turns (session_id, number, parent, reason, digests, suffix, sampled, logprobs, meta, messages, "
    "routes, top_ids, top_logprobs, idempotency_key, reply) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
_INSERT_SESSION = f"INSERT INTO sessions ({SESSION_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)"  # noqa: S608 - constants
_DIGEST = 16


def session_insert(session: Session) -> Statement:
    """Row of a new session."""
    s = session.settings
    settings = {
        "model": s.model,
        "sampling": s.sampling,
        "min_version": s.min_version,
        "exact_version": s.exact_version,
        "metadata": s.metadata,
    }
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
            orjson.dumps(settings),
            None,
        ),
    )


def outcome_update(session_id: str, outcome: Outcome) -> Statement:
    """Record the verdict."""
    value = {"reward": outcome.reward, "error": outcome.error, "details": outcome.details}
    return "UPDATE sessions SET outcome=? WHERE id=?", (orjson.dumps(value), session_id)


def session_from_row(row: Row, *, call_ids: bool) -> Session:
    """A session without its nodes."""
    session_id, token_hash, state, task_id, group_id, created_at, expires_at, settings, outcome = row
    known = orjson.loads(cast(bytes, settings))
    verdict = orjson.loads(cast(bytes, outcome)) if outcome is not None else None
    return Session(
        session_id=cast(str, session_id),
        token_hash=cast(bytes, token_hash),
        task_id=cast(str, task_id),
        group_id=cast(str, group_id),
        created_at=cast(float, created_at),
        expires_at=cast(float, expires_at),
        settings=Settings(**known),
        forest=Forest(call_ids=call_ids),
        state=cast(SessionState, state),
        outcome=Outcome(**verdict) if verdict is not None else None,
    )


def node_insert(session_id: str, node: Node, *, messages: bytes, key: str | None, reply: bytes | None) -> Statement:
    """Row of a turn. ``messages``: JSON of what the call added and of the reply, for people."""
    record = node.record
    sampling = record.sampling
    routes, top = record.routed_experts, record.top_logprobs
    meta = {
        "versions": [[span.version, span.start, span.end] for span in record.versions],
        "finish_reason": record.finish_reason,
        "matched": record.matched,
        "sampling": [
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.max_new_tokens,
            sampling.seed,
            sampling.stop,
            sampling.stop_token_ids,
        ],
        "engine_id": record.engine_id,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "routes": [routes.start, *routes.ids.shape, routes.ids.dtype.itemsize] if routes is not None else None,
        "top": list(top.ids.shape) if top is not None else None,
    }
    digests = (node.request_digest, node.end_digest, node.bare_digest, node.root_digest, node.tools)
    return (
        _INSERT_NODE,
        (
            session_id,
            node.number,
            node.parent.number if node.parent is not None else None,
            node.reason,
            b"".join(digests),
            record.suffix_ids.tobytes(),
            record.sampled_ids.tobytes(),
            record.logprobs.tobytes(),
            orjson.dumps(meta),
            messages,
            routes.ids.tobytes() if routes is not None else None,
            top.ids.tobytes() if top is not None else None,
            top.logprobs.tobytes() if top is not None else None,
            key,
            reply,
        ),
    )


def node_from_row(row: Row, nodes: Mapping[int, Node]) -> Node:
    """A node; its parent must be in ``nodes`` already."""
    number, parent, reason, digests, suffix, sampled, logprobs, meta, routes, top_ids, top_logprobs, superseded = row
    facts = orjson.loads(cast(bytes, meta))
    t, p, k, limit, seed, stop, stop_ids = facts["sampling"]
    suffix_ids = np.frombuffer(cast(bytes, suffix), np.int32)
    sampled_ids = np.frombuffer(cast(bytes, sampled), np.int32)
    route_rows = top = None
    if routes is not None:
        start, *shape, width = facts["routes"]
        raw = cast(bytes, routes)
        ids = (np.frombuffer(raw, np.uint8) if width == 1 else np.frombuffer(raw, np.uint16)).reshape(shape)
        route_rows = RoutedExperts(start=start, ids=ids)
    if top_ids is not None:
        top = TopLogprobs(
            ids=np.frombuffer(cast(bytes, top_ids), np.int32).reshape(facts["top"]),
            logprobs=np.frombuffer(cast(bytes, top_logprobs), np.float32).reshape(facts["top"]),
        )
    record = TurnRecord(
        suffix_ids=suffix_ids,
        sampled_ids=sampled_ids,
        logprobs=np.frombuffer(cast(bytes, logprobs), np.float32),
        versions=tuple(VersionSpan(*span) for span in facts["versions"]),
        finish_reason=cast(FinishReason, facts["finish_reason"]),
        sampling=Sampling(
            temperature=t,
            top_p=p,
            top_k=k,
            max_new_tokens=limit,
            seed=seed,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_ids),
        ),
        engine_id=facts["engine_id"],
        prompt_tokens=facts["prompt_tokens"],
        cached_tokens=facts["cached_tokens"],
        started_at=facts["started_at"],
        ended_at=facts["ended_at"],
        matched=facts["matched"],
        routed_experts=route_rows,
        top_logprobs=top,
    )
    packed = cast(bytes, digests)
    request, end, bare, root, tools = (packed[at : at + _DIGEST] for at in range(0, 5 * _DIGEST, _DIGEST))
    above = nodes[cast(int, parent)] if parent is not None else None
    return Node(
        number=cast(int, number),
        parent=above,
        record=record,
        reason=cast(str, reason),
        request_digest=request,
        end_digest=end,
        bare_digest=bare,
        root_digest=root,
        tools=tools,
        length=(above.length if above is not None else 0) + int(suffix_ids.size + sampled_ids.size),
        superseded=bool(superseded),
    )
