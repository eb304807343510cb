"""The conversations of one session: a forest whose nodes are model calls.

Owns attachment (which node does a request continue, and if none, why) and the exact ids of every path.
A node stores only what its call added. Nothing here is awaited and nothing is ever edited: edits,
compactions and repeated questions open branches. Depends on ``matching`` and the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tollway.messages import Message, ToolSpec
from tollway.records import Ids, TurnRecord
from tollway.router.cache_ledger import CallFacts
from tollway.session_server.matching import Digest, chain, message_key, tools_digest

__all__ = ["Attachment", "Forest", "Node", "common_prefix", "path_ids"]


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One committed model call."""

    number: int
    parent: Node | None
    record: TurnRecord
    reason: str
    """``root``, ``continuation``, ``sibling``, ``retry``, ``fork``, ``edited``, ``tools_changed``, ..."""
    request_digest: Digest
    """Digest of the whole conversation that was asked."""
    end_digest: Digest
    """Digest of that conversation plus the reply: what a continuation starts with."""
    bare_digest: Digest
    """The same for a harness that drops reasoning."""
    root_digest: Digest
    """Digest of the first message without the tools, to name what a new root changed."""
    tools: Digest
    length: int
    """Ids from the root through the last sampled id."""
    facts: CallFacts | None = None
    """``None`` after a restart."""
    children: int = 0
    delivered: bool = True
    """False once it is known that the client went before the reply reached it."""
    superseded: bool = False
    """A later answer to the same question replaced this one, which no client saw."""

    def path(self) -> list[Node]:
        """Nodes from the root to this one."""
        out = [self]
        while (parent := out[-1].parent) is not None:
            out.append(parent)
        out.reverse()
        return out


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a request belongs."""

    parent: Node | None
    """Node that the request continues; ``None`` opens a root."""
    new_messages: Sequence[Message]
    """Messages after the parent's reply; the whole request for a root."""
    reason: str
    request_digest: Digest
    root_digest: Digest
    tools: Digest
    supersedes: Node | None = None
    """Undelivered answer to the same question."""


class Forest:
    """Nodes of one session by number and by digest."""

    def __init__(self, *, call_ids: bool = True) -> None:
        self.nodes: dict[int, Node] = {}
        self.last: Node | None = None
        """Most recently committed node."""
        self._call_ids = call_ids
        self._by_end: dict[Digest, list[Node]] = {}
        self._by_request: dict[Digest, list[Node]] = {}
        self._bare: dict[Digest, Digest] = {}
        """Digest of a reply without reasoning -> its full digest."""
        self._roots: dict[Digest, Digest] = {}
        """Root digest -> digest of the tools it was last used with."""

    def __len__(self) -> int:
        return len(self.nodes)

    def attach(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Attachment:
        """Find the deepest node whose path is a prefix of the request."""
        tools_key = tools_digest(tools)
        at, parent, used = tools_key, None, 0
        edited = False
        first = chain(b"", message_key(messages[0], call_ids=self._call_ids))
        for index, message in enumerate(messages):
            asked = message.role == "assistant" and at in self._by_request
            at = chain(at, message_key(message, call_ids=self._call_ids))
            at = self._bare.get(at, at)
            found = self._by_end.get(at) if message.role == "assistant" else None
            if found:
                parent, used, edited = _best(found), index + 1, False
            elif asked:
                edited = True
        new_messages = messages[used:]
        again = self._by_request.get(at)
        lost = next((node for node in reversed(again or ()) if not node.delivered and not node.superseded), None)
        reason = self._reason(parent, first, tools_key, edited=edited, again=bool(again), lost=lost is not None)
        return Attachment(parent, new_messages, reason, at, first, tools_key, lost)

    def end_digests(self, request_digest: Digest, reply: Message) -> tuple[Digest, Digest]:
        """(full, bare) digests of a conversation after ``reply``."""
        full = chain(request_digest, message_key(reply, call_ids=self._call_ids))
        if reply.reasoning is None:
            return full, full
        return full, chain(request_digest, message_key(reply, call_ids=self._call_ids, reasoning=False))

    def add(self, node: Node) -> None:
        """Take in a committed node."""
        self.nodes[node.number] = node
        self.last = node
        if node.parent is not None:
            node.parent.children += 1
        self._by_end.setdefault(node.end_digest, []).append(node)
        self._by_request.setdefault(node.request_digest, []).append(node)
        if node.bare_digest != node.end_digest:
            self._bare[node.bare_digest] = node.end_digest
        self._roots[node.root_digest] = node.tools

    def leaves(self) -> Iterator[Node]:
        """Nodes without children, oldest first."""
        return (node for _, node in sorted(self.nodes.items()) if node.children == 0)

    def _reason(
        self, parent: Node | None, first: Digest, tools_key: Digest, *, edited: bool, again: bool, lost: bool
    ) -> str:
        if not self.nodes:
            return "root"
        if lost:
            return "retry"
        if again:
            return "sibling"
        if edited:
            return "edited"
        if parent is not None:
            return "fork" if parent.children else "continuation"
        known = self._roots.get(first)
        if known is not None and known != tools_key:
            return "tools_changed"
        if known is None and tools_key in self._roots.values():
            return "new_root"
        return "new_conversation"


def _best(nodes: list[Node]) -> Node:
    """Which of several identical replies a request continues: a fresh one, the latest."""
    return next((node for node in reversed(nodes) if not node.children and not node.superseded), nodes[-1])


def path_ids(node: Node | None, suffix: Ids) -> Ids:
    """[path + suffix] the whole prompt of a call that adds ``suffix`` to ``node``'s path."""
    if node is None:
        return suffix
    parts = [suffix]
    at: Node | None = node
    while at is not None:
        parts += (at.record.sampled_ids, at.record.suffix_ids)
        at = at.parent
    parts.reverse()
    return np.concatenate(parts)


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix of two id sequences."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else int(size)
