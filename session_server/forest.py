"""The conversations of one session: a forest whose nodes are model calls.

Owns attachment (which node does a request continue, and if none, why) and the prompt of every path. A node
keeps what the next call needs: digests, sizes, and its ids as the JSON text in which they travel to the
engine. The arrays are in the journal. Nothing here is awaited and nothing is ever edited: edits,
compactions and repeated questions open branches. Depends on ``matching`` and the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import orjson

from tollway.messages import Message, ToolSpec
from tollway.records import FinishReason, Ids, VersionSpan
from tollway.router.calls import Attempt
from tollway.router.causes import CallFacts
from tollway.router.wire import Prompt
from tollway.session_server.matching import EMPTY, Digest, chain, message_key, reply_keys, tools_digest

__all__ = ["Attachment", "Forest", "Node", "Place", "common_prefix", "path_prompt"]


_WAYS = 64
"""Most conversations that are kept apart while a harness that drops reasoning does not say which it means."""
Way = tuple[Digest, Digest | None]
"""``at`` and ``end`` of a conversation."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a conversation has been matched: everything that attaching its next message needs."""

    at: Digest
    """Of all messages so far, with the tools before them."""
    root: Digest
    """Of the first message without the tools: names what a new root changed."""
    tools: Digest
    lead: Digest
    """Of the messages that the dialect carries apart."""
    messages: int = 0
    """Kernel messages so far."""
    end: Digest | None = None
    """Digest at the deepest reply of ours; its nodes are what a request continues."""
    used: int = 0
    """Kernel messages up to and with that reply."""
    edited: bool = False
    """An answer to a question of ours is not the one that was given."""
    others: tuple[Way, ...] = ()
    """What else the conversation may be: several of our replies look alike without their reasoning."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """Every conversation that this may be, the likeliest first."""
        return ((self.at, self.end), *self.others)


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One committed model call."""

    number: int
    parent: Node | None
    reason: str
    """``root``, ``continuation``, ``sibling``, ``retry``, ``fork``, ``edited``, ``tools_changed``, ..."""
    chunk: bytes
    """Ids that the call added, suffix then sampled, as decimal numbers joined by commas."""
    suffix_size: int
    sampled_size: int
    length: int
    """Ids from the root through the last sampled id."""
    finish_reason: FinishReason
    request_digest: Digest
    """Digest of the whole conversation that was asked."""
    end_digest: Digest
    """Digest of that conversation plus the reply: what a continuation starts with."""
    bare_digest: Digest
    """The same for a harness that drops reasoning."""
    root_digest: Digest
    lead_digest: Digest
    tools: Digest
    engine_id: str
    versions: tuple[VersionSpan, ...]
    cached_tokens: int | None
    reply_id: str = ""
    attempts: tuple[Attempt, ...] = ()
    """Requests to engines, when it took more than one."""
    facts: CallFacts | None = None
    """What the router knew of the call; ``None`` when nothing was kept of it."""
    children: int = 0
    delivered: bool = True
    """False once it is known that the client went before the reply reached it."""
    superseded: bool = False
    """A later answer to the same question replaced this one, which no client saw."""
    overflowed: bool = False
    """A request that continued it did not fit the context."""
    fresh: tuple[Ids, Ids] | None = None
    """``own_ids`` as they were made, while nothing continues the call: the next one asks for them."""

    def path(self) -> list[Node]:
        """Nodes from the root to this one."""
        out = [self]
        while (parent := out[-1].parent) is not None:
            out.append(parent)
        out.reverse()
        return out

    def own_ids(self) -> tuple[Ids, Ids]:
        """([suffix], [sampled]) ids that the call added."""
        if self.fresh is not None:
            return self.fresh
        ids = np.array(orjson.loads(b"[" + self.chunk + b"]"), np.int32)
        return ids[: self.suffix_size], ids[self.suffix_size :]


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a request belongs."""

    parent: Node | None
    """Node that the request continues; ``None`` opens a root."""
    reason: str
    place: Place
    supersedes: tuple[Node, ...] = ()
    """Answers to the same question that no client saw."""

    @property
    def used(self) -> int:
        """Kernel messages that the parent's path holds already."""
        return self.place.used if self.parent is not None else 0


@dataclass(slots=True)
class _Root:
    tools: Digest
    """That a root message was last used with."""


@dataclass(slots=True)
class Forest:
    """Nodes of one session by number and by digest."""

    call_ids: bool = True
    """Whether a replayed tool call must carry the id that it was given."""
    nodes: dict[int, Node] = field(default_factory=dict)
    last: Node | None = None
    """Most recently committed node."""
    _by_end: dict[Digest, list[Node]] = field(default_factory=dict)
    _by_request: dict[Digest, list[Node]] = field(default_factory=dict)
    _bare: dict[Digest, list[Digest]] = field(default_factory=dict)
    """Digest of a reply without reasoning -> the full digests that it may stand for, oldest first."""
    _roots: dict[Digest, _Root] = field(default_factory=dict)
    _by_reply: dict[str, Node] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.nodes)

    def start(self, lead: Sequence[Message], tools: Sequence[ToolSpec]) -> Place:
        """The place before the first message of a conversation."""
        key = tools_digest(tools)
        digest = EMPTY
        for message in lead:
            digest = chain(digest, message_key(message, call_ids=self.call_ids))
        return self.advance(Place(at=key, root=EMPTY, tools=key, lead=digest), lead)

    def after(self, node: Node) -> Place:
        """The place behind a reply, for a request that names it."""
        return Place(
            at=node.end_digest,
            root=node.root_digest,
            tools=node.tools,
            lead=node.lead_digest,
            end=node.end_digest,
        )

    def advance(self, place: Place, messages: Sequence[Message]) -> Place:
        """Match further messages of a conversation."""
        ways, root, used, edited = place.ways, place.root, place.used, place.edited
        count = place.messages
        for message in messages:
            key = message_key(message, call_ids=self.call_ids)
            if root is EMPTY:
                root = chain(b"", key)
            count += 1
            before, ways = ways, tuple((chain(at, key), end) for at, end in ways)
            if message.role != "assistant":
                continue
            if replies := self._replies(ways):
                ways, used, edited = replies, count, False
            elif any(at in self._by_request for at, _ in before):
                edited = True
        at, end = ways[0]
        return Place(at, root, place.tools, place.lead, count, end, used, edited, ways[1:])

    def _replies(self, ways: Sequence[Way]) -> tuple[Way, ...]:
        """Those of ``ways`` that end with a reply of ours, whose reasoning the harness may have dropped."""
        if len(ways) == 1 and (at := ways[0][0]) not in self._bare:  # nearly always
            return ((at, at),) if at in self._by_end else ()
        known = (
            each for at, _ in ways for each in (*reversed(self._bare.get(at, ())[-_WAYS:]), at) if each in self._by_end
        )
        return tuple((each, each) for each in dict.fromkeys(known))[:_WAYS]

    def attach(self, place: Place, *, named: Node | None = None) -> Attachment:
        """Find the deepest node whose path is a prefix of the conversation, or say why there is none.

        ``named``: the node that the request names itself, whatever else was answered alike.
        """
        if place.others:
            at, end = max(place.ways, key=self._likelihood)
            place = replace(place, at=at, end=end, others=())
        found = self._by_end.get(place.end) if place.end is not None else None
        parent = named if named is not None else _best(found) if found else None
        again = self._by_request.get(place.at)
        lost = tuple(node for node in again or () if not node.delivered and not node.superseded)
        return Attachment(parent, self._reason(place, parent, again=bool(again), lost=bool(lost)), place, lost)

    def _likelihood(self, way: Way) -> tuple[bool, bool, int]:
        """Of conversations that look alike: one whose answer got lost, then one that nobody went on with yet."""
        at, end = way
        lost = any(not node.delivered and not node.superseded for node in self._by_request.get(at, ()))
        nodes = self._by_end.get(end) if end is not None else None
        if not nodes:
            return lost, False, -1
        best = _best(nodes)
        return lost, not best.children and not best.superseded, best.number

    def end_digests(self, request_digest: Digest, reply: Message) -> tuple[Digest, Digest]:
        """(full, bare) digests of a conversation after ``reply``."""
        key, bare = reply_keys(reply, call_ids=self.call_ids)
        full = chain(request_digest, key)
        return full, full if bare is key else chain(request_digest, bare)

    def add(self, node: Node) -> None:
        """Take in a committed node."""
        self.nodes[node.number] = node
        self.last = node
        if node.parent is not None:
            node.parent.children += 1
        self._by_end.setdefault(node.end_digest, []).append(node)
        self._by_request.setdefault(node.request_digest, []).append(node)
        if node.bare_digest != node.end_digest:
            alike = self._bare.setdefault(node.bare_digest, [])
            if node.end_digest not in alike[-_WAYS:]:
                alike.append(node.end_digest)
        self._roots[node.root_digest] = _Root(node.tools)
        if node.reply_id:
            self._by_reply[node.reply_id] = node

    def asked(self, request_digest: Digest) -> bool:
        """Whether this very conversation was answered already."""
        return request_digest in self._by_request

    def by_reply(self, reply_id: str) -> Node | None:
        """The node whose reply had this id; of several choices the first."""
        return self._by_reply.get(reply_id)

    def choices(self, number: int) -> list[Node]:
        """The node and what its request got besides: several choices have consecutive numbers."""
        found: list[Node] = []
        node = self.nodes.get(number)
        while node is not None and (not found or node.reason == "choice"):
            found.append(node)
            node = self.nodes.get(node.number + 1)
        return found

    def leaves(self) -> Iterator[Node]:
        """Nodes without children, oldest first."""
        return (node for _, node in sorted(self.nodes.items()) if node.children == 0)

    def _reason(self, place: Place, parent: Node | None, *, again: bool, lost: bool) -> str:
        if not self.nodes:
            return "root"
        if lost:
            return "retry"
        if again:
            return "sibling"
        if place.edited:
            return "edited"
        if parent is not None:
            return "fork" if parent.children else "continuation"
        known = self._roots.get(place.root)
        if known is not None and known.tools != place.tools:
            return "tools_changed"
        if known is None and any(root.tools == place.tools for root in self._roots.values()):
            return "new_root"
        return "new_conversation"


def _best(nodes: list[Node]) -> Node:
    """Which of several identical replies a request continues: a fresh one, the latest."""
    return next((node for node in reversed(nodes) if not node.children and not node.superseded), nodes[-1])


def path_prompt(node: Node | None) -> Prompt:
    """The ids of ``node``'s whole path, as they travel; empty for no node."""
    if node is None:
        return Prompt((), 0)
    return Prompt(tuple(each.chunk for each in node.path()), node.length)


def common_prefix(a: Prompt, b: Prompt) -> int:
    """Number of ids that two prompts have in common from their beginning.

    >>> common_prefix(Prompt((b"1,23",), 2), Prompt((b"1,2",), 2))
    1
    """
    one, two = a.json(), b.json()
    size = min(len(one), len(two))
    different = np.flatnonzero(np.frombuffer(one, np.uint8, size) != np.frombuffer(two, np.uint8, size))
    until = int(different[0]) if different.size else size
    whole = one.count(b",", 0, until)
    # The number before the difference counts only when it ends there in both.
    ends = (text[until : until + 1] in (b"", b",") for text in (one, two))
    return whole + int(until > 0 and one[until - 1 : until] != b"," and all(ends))
