"""The prefix cache: a radix tree over token ids whose nodes own keys and values.

Token-exact, least recently used leaves go first, one tree per namespace (``extra_key``, ``cache_salt``).
Running requests copy what they match and copy back what they computed, so nothing that the tree evicts can
hurt a request in flight; only the path of an insertion is locked, against its own evictions. Used by the
scheduler's thread alone. Depends on ``rows`` for ``Segment``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tollway.engine.rows import Segment

__all__ = ["PrefixCache"]

_Ids = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Node:
    key: _Ids
    segment: Segment | None
    """``None`` in a root only."""
    parent: _Node | None
    used: int = 0
    locks: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixCache:
    """Radix trees of all namespaces under one token budget."""

    def __init__(self) -> None:
        self.tokens = 0
        """Positions held."""
        self.nbytes = 0
        self.evicted_tokens = 0
        """Positions evicted since start; a flush does not count."""
        self._roots: dict[str, _Node] = {}
        self._clock = 0
        self._order: list[tuple[int, int, _Node]] = []
        """Heap of (used, tie, leaf); entries whose node was used since, or is no leaf any more, are stale."""
        self._tie = 0
        self._compact_at = 1024

    def match(self, namespace: str, ids: _Ids, limit: int) -> list[tuple[Segment, int]]:
        """Stretches covering the longest cached prefix of ``ids[:limit]``: (segment, positions used of it)."""
        root = self._roots.get(namespace)
        if root is None:
            return []
        found: list[tuple[Segment, int]] = []
        node, at = root, 0
        while at < limit and (child := node.children.get(int(ids[at]))) is not None:
            shared = _common(child.key, ids[at:limit])
            self._touch(child)
            if child.segment is not None:
                found.append((child.segment, shared))
            at += shared
            if shared < len(child.key):
                break
            node = child
        return found

    def insert(
        self, namespace: str, ids: _Ids, copy: Callable[[int, int], Segment], reserve: Callable[[int], int]
    ) -> int:
        """Add ``ids``; positions that are new come from ``copy(start, end)``. Returns how many were added.

        ``reserve(n)`` makes room and answers how many positions may be added now.
        """
        node, at = self._roots.setdefault(namespace, _Node(np.zeros(0, np.int32), None, None)), 0
        path: list[_Node] = []
        try:
            while at < len(ids) and (child := node.children.get(int(ids[at]))) is not None:
                shared = _common(child.key, ids[at:])
                node = child if shared == len(child.key) else self._split(child, shared)
                self._touch(node)
                node.locks += 1
                path.append(node)
                at += shared
                if at == len(ids):
                    return 0
            count = min(reserve(len(ids) - at), len(ids) - at)
            if count <= 0:
                return 0
            leaf = _Node(ids[at : at + count].copy(), copy(at, at + count), node)
            node.children[int(ids[at])] = leaf
            self._account(leaf, 1)
            self._touch(leaf)
            return count
        finally:
            for locked in path:
                locked.locks -= 1
                if not locked.locks and not locked.children:
                    self._push(locked)

    def evict(self, tokens: int) -> int:
        """Drop least recently used leaves until at least ``tokens`` positions went; returns how many did."""
        gone = 0
        while gone < tokens and self._order:
            used, _, node = heapq.heappop(self._order)
            if used != node.used or node.children or node.locks or node.parent is None:
                continue
            gone += len(node.key)
            self._account(node, -1)
            parent, node.parent = node.parent, None
            del parent.children[int(node.key[0])]
            if not parent.children and parent.parent is not None:
                self._push(parent)
        self.evicted_tokens += gone
        return gone

    def flush(self) -> int:
        """Forget everything; returns the bytes freed."""
        freed = self.nbytes
        self._roots.clear()
        self._order.clear()
        self.tokens = self.nbytes = 0
        return freed

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two; returns the upper part, which takes its place below the parent."""
        parent, segment = node.parent, node.segment
        if parent is None or segment is None:
            raise RuntimeError("a root of the prefix cache cannot be split")
        self._account(node, -1)
        upper = _Node(node.key[:at].copy(), segment.cut(0, at), parent, used=node.used, locks=node.locks)
        parent.children[int(node.key[0])] = upper
        node.segment = segment.cut(at, len(node.key))
        node.key = node.key[at:].copy()
        node.parent = upper
        upper.children[int(node.key[0])] = node
        self._account(node, 1)
        self._account(upper, 1)
        return upper

    def _account(self, node: _Node, sign: int) -> None:
        self.tokens += sign * len(node.key)
        self.nbytes += sign * (node.segment.nbytes if node.segment is not None else 0)

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.used = self._clock
        if not node.children:
            self._push(node)

    def _push(self, node: _Node) -> None:
        self._tie += 1
        heapq.heappush(self._order, (node.used, self._tie, node))
        if len(self._order) > self._compact_at:
            fresh = [e for e in self._order if e[0] == e[2].used and not e[2].children and e[2].parent is not None]
            heapq.heapify(fresh)
            self._order, self._compact_at = fresh, max(1024, 2 * len(fresh))


def _common(a: _Ids, b: _Ids) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
