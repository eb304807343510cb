"""The radix tree against a naive model: sets of cached prefixes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.engine.radix import PrefixCache
from tollway.engine.rows import Segment

words = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def segment(ids, start, end):
    """Keys and values that say which token at which position they are of."""
    marks = torch.tensor([[ids[i], i] for i in range(start, end)], dtype=torch.float32)
    return Segment(marks.reshape(1, 1, 1, -1, 2).clone(), None)


def insert(cache, ids, namespace="", room=10**9):
    array = np.array(ids, np.int32)
    return cache.insert(namespace, array, lambda a, b: segment(ids, a, b), lambda n: min(n, room))


def match(cache, ids, namespace="", limit=None):
    found = cache.match(namespace, np.array(ids, np.int32), len(ids) if limit is None else limit)
    return torch.cat([s.kv[0, 0, 0, :n] for s, n in found]) if found else torch.zeros(0, 2)


@settings(deadline=None)
@given(st.lists(words, max_size=15), st.lists(words, min_size=1, max_size=5))
def test_a_match_is_the_longest_inserted_prefix_with_its_own_values(inserted, queries):
    cache = PrefixCache()
    known = {()}
    for ids in inserted:
        added = insert(cache, ids)
        prefixes = {tuple(ids[:n]) for n in range(len(ids) + 1)}
        assert added == len(prefixes - known)
        known |= prefixes
    assert cache.tokens == len(known) - 1
    for query in queries + inserted:
        longest = max(n for n in range(len(query) + 1) if tuple(query[:n]) in known)
        assert match(cache, query).tolist() == [[float(t), float(i)] for i, t in enumerate(query[:longest])]


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=15), st.integers(1, 40))
def test_eviction_keeps_the_count_and_only_whole_prefixes(inserted, wanted):
    cache = PrefixCache()
    for ids in inserted:
        insert(cache, ids)
    before = cache.tokens
    gone = cache.evict(wanted)
    assert gone >= min(wanted, before)
    assert cache.tokens == before - gone == before - cache.evicted_tokens
    for ids in inserted:
        kept = match(cache, ids)
        assert kept.tolist() == [[float(t), float(i)] for i, t in enumerate(ids[: len(kept)])]
    cache.evict(10**9)
    assert (cache.tokens, cache.nbytes) == (0, 0)


def test_the_least_recently_matched_leaf_goes_first():
    cache = PrefixCache()
    for ids in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
        insert(cache, ids)
    match(cache, [1, 1, 1])
    cache.evict(1)
    assert [len(match(cache, [t] * 3)) for t in (1, 2, 3)] == [3, 0, 3]


def test_an_insertion_never_evicts_its_own_path():
    cache = PrefixCache()
    insert(cache, [1, 2, 3])
    added = cache.insert("", np.array([1, 2, 9], np.int32), lambda a, b: segment([1, 2, 9], a, b), cache.evict)
    assert added == 1
    assert len(match(cache, [1, 2, 9])) == 3


def test_a_match_stops_at_the_limit():
    cache = PrefixCache()
    insert(cache, [1, 2, 3, 4])
    assert len(match(cache, [1, 2, 3, 4], limit=3)) == 3


def test_a_flush_and_a_foreign_namespace_find_nothing():
    cache = PrefixCache()
    insert(cache, [1, 2, 3], "a")
    assert len(match(cache, [1, 2, 3], "b")) == 0
    assert cache.flush() > 0
    assert len(match(cache, [1, 2, 3], "a")) == 0
    assert cache.tokens == 0


def test_a_full_budget_inserts_what_fits():
    cache = PrefixCache()
    assert insert(cache, [1, 2, 3, 4], room=2) == 2
    assert len(match(cache, [1, 2, 3, 4])) == 2
