"""Continuous batching: who runs, who waits, what is cached, and how requests end.

Owns the waiting queue, the running batch, the token budget and the prefix cache; prefills go before decode
steps. Runs on the scheduler's thread only and never blocks. What leaves it are (callback, value) pairs in
``outbox``. Depends on ``forward``, ``sampler``, ``radix`` and ``request``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from tollway.engine.batch import Batch, Needs
from tollway.engine.forward import PREFILL_TOKENS, Forward
from tollway.engine.model import Decoder
from tollway.engine.radix import PrefixCache
from tollway.engine.request import Finish, Progress, Request, Result, TopRow
from tollway.engine.results import finished, progress, top_rows, unstarted
from tollway.engine.rows import Rows, Segment
from tollway.engine.sampler import Drawn, draw
from tollway.engine.stats import Stats

__all__ = ["Generation", "PauseMode"]

PauseMode = Literal["abort", "retract", "in_place"]
_SIBLING = 16
"""Waiting requests that share this many uncached tokens with one being prefilled wait for its cache entry."""

_HEADROOM_STEPS = 16


@dataclass(slots=True)
class _Admission:
    request: Request
    matched: list[tuple[Segment, int]]
    start: int
    """Positions taken from the prefix cache."""


class Generation:
    """All requests of one engine."""

    def __init__(
        self, decoder: Decoder, *, max_running: int, max_tokens: int, prefix_cache: bool, version: str
    ) -> None:
        self.decoder, self.version = decoder, version
        self.max_running, self.max_tokens = max_running, max_tokens
        self.batch = Batch(max_running, decoder.spec.vocab_size)
        self.rows = Rows(decoder.spec, decoder.dtype, max_rows=max_running, max_length=decoder.context_length)
        self.cache = PrefixCache() if prefix_cache else None
        self.waiting: deque[Request] = deque()
        self.outbox: list[tuple[Callable[[Progress], None] | Callable[[Result], None], Progress]] = []
        self.stats = Stats()
        self.paused = False
        self.released: set[str] = set()
        """Memory tags given back; nothing runs while there are any."""
        self._forward = Forward(decoder, self.rows, self.batch)

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def step(self) -> bool:
        """Prefill one group or decode one token of everything running; False when there is nothing to do."""
        if self.paused or self.released:
            return False
        if group := self._take_group():
            self._prefill(group)
        elif self.batch.n:
            self._decode()
        else:
            return False
        return True

    def abort(self, rid: str | None, message: str = "Aborted", status: int | None = None) -> int:
        """End the request ``rid`` (``None``: all) with what it has; returns how many ended."""
        finish = Finish("abort", message=message, status=status)
        gone = [r for r in self.waiting if r.answers_to(rid)]
        for request in gone:
            self.waiting.remove(request)
            self._post(request, unstarted(request, finish, self.version))
        running = [i for i, r in enumerate(self.batch.requests) if r.answers_to(rid)]
        for i in reversed(running):
            self._finish(i, finish)
        self.stats.aborted_requests += len(gone) + len(running)
        return len(gone) + len(running)

    def retract(self, count: int | None = None) -> None:
        """Send the ``count`` youngest running requests (``None``: all) back to the front of the queue.

        They keep what they generated and are prefilled again later.
        """
        order = sorted(range(self.batch.n), key=lambda i: self.batch.requests[i].arrived)
        chosen = order if count is None else order[len(order) - count :]
        youngest_first = [self.batch.requests[i] for i in reversed(chosen)]
        for i in sorted(chosen, reverse=True):
            request, length = self.batch.requests[i], int(self.batch.lengths[i])
            total, prompt = len(request.prompt) + int(self.batch.counts[i]), len(request.prompt)
            request.generated = self.rows.ids[i, prompt:total].copy()
            request.logprobs = self.rows.logprobs[i, prompt:total].copy()
            if request.return_routes and self.rows.routes is not None:
                request.routes = self._routes(i, request, length).copy()
            request.retractions += 1
            self.stats.retracted_requests += 1
            self.stats.retracted_input_tokens += prompt
            self.stats.retracted_output_tokens += total - prompt
            self._drop(i)
        self.waiting.extendleft(youngest_first)

    def set_version(self, version: str) -> None:
        """Stamp the weights; tokens sampled from now on carry ``version``."""
        self.version = version
        for request, count in zip(self.batch.requests, self.batch.counts.tolist(), strict=False):
            request.mark_version(version, count)

    def flush(self) -> bool:
        """Forget the prefix cache. False when requests hold keys and values, or wait and are not paused."""
        if self.batch.n or (self.waiting and not self.paused):
            return False
        if self.cache is not None:
            self.cache.flush()
        return True

    @property
    def row_tokens(self) -> int:
        """Positions held by running requests."""
        return int(self.batch.lengths[: self.batch.n].sum())

    @property
    def cached_tokens(self) -> int:
        """Positions held by the prefix cache."""
        return 0 if self.cache is None else self.cache.tokens

    # -- admission and prefill ----------------------------------------------------------------------

    def _take_group(self) -> list[_Admission]:
        """The next requests to prefill together, in order of arrival as far as widths and budget allow."""
        room = self.max_running - self.batch.n
        group: list[_Admission] = []
        prefixes: set[tuple[str, bytes]] = set()
        # Beside others, a request needs room for some steps of all, or it would be retracted at once.
        steps = _HEADROOM_STEPS if self.batch.n else 0
        widest, planned = 0, self.row_tokens + steps * self.batch.n
        for request in islice(self.waiting, 4 * self.max_running) if room and self.waiting else ():
            known = request.known
            matched = [] if self.cache is None else self.cache.match(request.namespace, known, request.cache_limit)
            start = sum(count for _, count in matched)
            fresh = len(known) - start
            wide = max(widest, fresh)
            alone = fresh > PREFILL_TOKENS or _prefill_only(request) or _scores_prompt(request)
            if group and (alone or wide * (len(group) + 1) > PREFILL_TOKENS or wide > 2 * min(fresh, widest) + 64):
                continue
            prefix = (request.namespace, known[start : start + _SIBLING].tobytes())
            if self.cache is not None and fresh > _SIBLING and prefix in prefixes:
                continue
            need = len(known) + 1 + (steps or _HEADROOM_STEPS * bool(group))
            if not self._make_room(planned + need):
                break
            group.append(_Admission(request, matched, start))
            prefixes.add(prefix)
            widest, planned = wide, planned + need
            if alone or len(group) == room or widest * (len(group) + 1) > PREFILL_TOKENS:
                break
        for admission in group:
            self.waiting.remove(admission.request)
        return group

    def _make_room(self, row_tokens: int) -> bool:
        """Evict until ``row_tokens`` fit beside the prefix cache."""
        if row_tokens > self.max_tokens:
            return False
        excess = row_tokens + self.cached_tokens - self.max_tokens
        return excess <= 0 or (self.cache is not None and self.cache.evict(excess) >= excess)

    def _prefill(self, group: list[_Admission]) -> None:
        first, end = self.batch.n, self.batch.n + len(group)
        self.rows.ensure(end, max(len(a.request.known) for a in group) + 1)
        for admission in group:
            self._place(admission)
        head = group[0].request
        if len(group) == 1 and (_prefill_only(head) or _scores_prompt(head) or len(head.known) > PREFILL_TOKENS):
            score_from = head.logprob_start if _scores_prompt(head) else None
            logits, scored = self._forward.prefill_long(first, head.known, group[0].start, score_from)
            if score_from is not None:
                head.score_prompt(scored)
        else:
            starts = np.array([a.start for a in group], np.int64)
            logits = self._forward.prefill(first, [a.request.known for a in group], starts)
        for row in range(first, end):
            self._remember(row)
        if _prefill_only(head):
            self._finish(first, Finish("length"))
        else:
            self._commit(first, end, draw(logits, self.batch, first, end))

    def _place(self, admission: _Admission) -> None:
        """Give a request its row: known ids, log-probabilities so far, and what the prefix cache has."""
        request = admission.request
        row, known, prompt = self.batch.add(request), request.known, len(request.prompt)
        self.rows.ids[row, : len(known)] = known
        self.rows.logprobs[row, prompt : len(known)] = request.logprobs
        at = 0
        for segment, count in admission.matched:
            self.rows.load(row, at, segment, count)
            at += count
        if request.cached_tokens is None:
            request.cached_tokens = at
            self.stats.prefilled(prompt, at)
        request.mark_version(self.version, len(request.generated))
        self.stats.computed_tokens += len(known) - at
        self.stats.reused_tokens += at

    def _remember(self, row: int) -> None:
        """Put the stored positions of a row into the prefix cache."""
        if self.cache is None:
            return
        request, ids = self.batch.requests[row], self.rows.ids[row, : self.batch.lengths[row]]
        self.cache.insert(request.namespace, ids, lambda a, b: self.rows.copy(row, a, b), self._reserve)

    def _reserve(self, tokens: int) -> int:
        room = self.max_tokens - self.row_tokens - self.cached_tokens
        if room < tokens and self.cache is not None:
            room += self.cache.evict(tokens - room)
        return room

    # -- decode -------------------------------------------------------------------------------------

    def _decode(self) -> None:
        while not self._make_room(self.row_tokens + self.batch.n) and self.batch.n > 1:
            self.retract(1)
        logits = self._forward.decode()
        n = self.batch.n
        self._commit(0, n, draw(logits, self.batch, 0, n))
        self.stats.decoded_tokens += n

    def _commit(self, first: int, end: int, drawn: Drawn) -> None:
        """Append one token to rows [first, end); end requests that are done, report to those that stream."""
        batch, places = self.batch, np.arange(first, end)
        positions = batch.lengths[first:end]
        self.rows.ids[places, positions] = drawn.tokens
        self.rows.logprobs[places, positions] = drawn.logprobs
        batch.tokens[first:end] = drawn.tokens
        batch.counts[first:end] += 1
        needs = batch.needs_in(first, end)
        if needs & (Needs.TOPS | Needs.EDIT):
            self._record(first, end, drawn)
        stopped = (batch.stops[first:end] == drawn.tokens[:, None]).any(1)
        finite = np.isfinite(drawn.logprobs)
        done = stopped | (batch.counts[first:end] >= batch.limits[first:end]) | ~finite
        ends = {i + first: self._reason(i + first, bool(finite[i])) for i in np.flatnonzero(done).tolist()}
        if needs & Needs.WATCH:
            self._watch(first, end, ends)
        if needs & Needs.STREAM:
            for i in (np.flatnonzero(batch.needs[first:end] & Needs.STREAM) + first).tolist():
                if i not in ends:
                    request = batch.requests[i]
                    self.outbox.append(
                        (request.on_progress, progress(request, self.rows, i, self._count(i), self.version))
                    )
        for i in sorted(ends, reverse=True):
            self._finish(i, ends[i])

    def _reason(self, i: int, finite: bool) -> Finish:
        if not finite:
            return Finish(
                "abort", message="the model produced a non-finite log-probability; reload its weights", status=500
            )
        if self.batch.counts[i] >= self.batch.limits[i]:
            return Finish("length")
        return Finish("stop", matched=int(self.batch.tokens[i]))

    def _watch(self, first: int, end: int, ends: dict[int, Finish]) -> None:
        for i in range(first, end):
            request = self.batch.requests[i]
            if request.watch is None or i in ends:
                continue
            ids = self.rows.ids[i, len(request.prompt) : len(request.prompt) + self._count(i)]
            if (found := request.watch.matched(ids[-request.watch.tail :].tolist())) is not None:
                ends[i] = Finish("stop", matched=found)

    def _record(self, first: int, end: int, drawn: Drawn) -> None:
        """Keep top log-probabilities and counts for penalties."""
        batch = self.batch
        if batch.seen is not None:
            edited = np.flatnonzero(batch.needs[first:end] & Needs.EDIT)
            batch.seen[edited + first, drawn.tokens[edited]] += 1
        asking = np.flatnonzero(batch.needs[first:end] & Needs.TOPS).tolist()
        if asking:
            widths = [batch.requests[i + first].top_logprobs for i in asking]
            rows: list[TopRow] = top_rows(drawn.distribution[asking], widths)
            for i, row in zip(asking, rows, strict=True):
                batch.requests[i + first].tops.append(row)

    def _count(self, i: int) -> int:
        return int(self.batch.counts[i])

    # -- ends ---------------------------------------------------------------------------------------

    def _finish(self, i: int, finish: Finish) -> None:
        request, count = self.batch.requests[i], self._count(i)
        length = int(self.batch.lengths[i])
        routes = self._routes(i, request, length) if request.return_routes and self.rows.routes is not None else None
        result = finished(request, self.rows, i, count, finish, self.version, routes)
        self.stats.finished(len(request.prompt), count, request.cached_tokens or 0, time.monotonic() - request.arrived)
        if finish.status is None:
            self._remember(i)
        self._post(request, result)
        self._drop(i)

    def _routes(self, i: int, request: Request, length: int) -> np.ndarray:
        """Expert choices of stored positions from the requested start, as they were when tokens were sampled."""
        if self.rows.routes is None:
            raise RuntimeError("a dense model records no expert choices")
        routes = self.rows.routes[i, request.routes_start : length].copy()
        if request.routes is not None:
            routes[: len(request.routes)] = request.routes
        return routes

    def _drop(self, i: int) -> None:
        moved = self.batch.remove(i)
        if moved != i:
            self.rows.move(moved, i, int(self.batch.lengths[i]))

    def _post(self, request: Request, result: Result) -> None:
        self.outbox.append((request.on_result, result))


def _prefill_only(request: Request) -> bool:
    return request.limit == 0


def _scores_prompt(request: Request) -> bool:
    return request.return_logprob and request.logprob_start >= 0 and request.input_logprobs is None
