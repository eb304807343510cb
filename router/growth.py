"""How large sessions become: learned from those that ended and from those that go on.

A session is admitted with a few thousand tokens and leaves with many times that, so its growth has to be
reserved for. The estimate is a survival curve over sizes (Kaplan-Meier: sessions that go on are censored, so
the short ones, which end first, do not pass for typical), and the reservation is the peak of a session's
expected footprint, ``max over x of x * P(it gets to x)``. Pure state, no clock. Depends on nothing.
"""

from __future__ import annotations

from math import log2

__all__ = ["Growth"]

_PER_OCTAVE = 8
_BUCKETS = 26 * _PER_OCTAVE
"""Sizes from 1 to 2**26 tokens, each bucket 9 % wider than the one before."""
_EDGES = tuple(2.0 ** (bucket / _PER_OCTAVE) for bucket in range(_BUCKETS + 1))
_FORGET = 1.0 - 1.0 / 512
"""One more ended session leaves this share of the older ones: lengths drift as the policy learns."""
_UNKNOWN = (2, 4, 8, 16)
"""Beyond all that was seen a session is as likely to end at each of these multiples of a first prompt; each counts
as one ended session, so a few dozen real ones outweigh them."""
_HEAVY = 1e9
_NOBODY = 1e-6
_EVENTS = 64
"""Starts and size changes after which the curve is computed again, once it is no longer new; an end counts 8."""


class Growth:
    """Sizes at which sessions of one model ended, sizes of those that go on, and the curve made of them.

    A session counts only for sizes that it went through: one that began with 9,000 tokens says nothing about how many
    get from 1,000 to 2,000.
    """

    def __init__(self) -> None:
        self._ended = [0.0] * _BUCKETS
        self._ended_from = [0.0] * _BUCKETS
        """The same sessions by the size of their first prompt."""
        self._weight = 1.0
        """Of the next session that ends; it grows, so that older ones count less."""
        self._live = [0] * _BUCKETS
        self._live_from = [0] * _BUCKETS
        self._first = (0.0, 0.0)
        """Decayed sums of (first prompts, their tokens)."""
        self._median = 0.0
        """Size of the middle one of those that ended; 0 while none has."""
        self._peaks: list[float] = []
        self._variances: list[int] = []
        self._events, self._patience = 0, 1

    def started(self, tokens: int) -> None:
        """A session began with a prompt of ``tokens``."""
        count, total = self._first
        self._first = (count * _FORGET + 1, total * _FORGET + tokens)
        self.restored(tokens)

    def restored(self, tokens: int) -> None:
        """A session from before a restart goes on with ``tokens``: what it was before is not known."""
        bucket = _bucket(tokens)
        self._live[bucket] += 1
        self._live_from[bucket] += 1
        self._changed(1)

    def grew(self, before: int, now: int) -> None:
        """A session that goes on has ``now`` tokens."""
        old, new = _bucket(before), _bucket(now)
        if old != new:
            self._live[old] -= 1
            self._live[new] += 1
            self._changed(1)

    def ended(self, first: int, tokens: int) -> None:
        """A session that began with ``first`` tokens was released with ``tokens``."""
        self.abandoned(first, tokens)
        self._weight /= _FORGET
        if self._weight > _HEAVY:
            self._ended = [each / self._weight for each in self._ended]
            self._ended_from = [each / self._weight for each in self._ended_from]
            self._weight = 1.0
        self._ended[_bucket(tokens)] += self._weight
        self._ended_from[_bucket(first)] += self._weight
        self._changed(8)

    def abandoned(self, first: int, tokens: int) -> None:
        """A session that never ran is forgotten: it says nothing about sizes."""
        self._live[_bucket(tokens)] -= 1
        self._live_from[_bucket(first)] -= 1

    def reserve(self, tokens: int) -> int:
        """Tokens to set aside for a session that has ``tokens`` now; never fewer than these.

        >>> growth = Growth()
        >>> growth.reserve(1000)  # nothing is known
        1000
        >>> for _ in range(100):
        ...     growth.started(1000), growth.grew(1000, 8000), growth.ended(1000, 8000)  # doctest: +ELLIPSIS
        (None, None, None)
        ...
        >>> 6000 < growth.reserve(1000) < 9000
        True
        """
        peaks = self._peaks
        if not peaks:
            return tokens
        peak = peaks[_bucket(tokens)]
        return tokens if peak <= tokens else int(peak)

    def variance(self, tokens: int) -> int:
        """Variance of what such a session has at its end, in tokens squared."""
        return self._variances[_bucket(tokens)] if self._variances else 0

    def doublings(self, tokens: int) -> int:
        """How often a session with ``tokens`` has doubled the median of those that ended: 0 for most, 1 or more in the
        long tail, which decides when a run ends."""
        return int(log2(tokens / self._median)) if 0.0 < self._median < tokens else 0

    def _changed(self, weight: int) -> None:
        self._events += weight
        if self._events >= self._patience:
            self._events, self._patience = 0, min(_EVENTS, 2 * self._patience)
            self._compute()

    def _compute(self) -> None:
        """Peak of the expected footprint and variance of the end, by present size. About 80 us."""
        ended = [each / self._weight for each in self._ended]
        self._median = _median(ended)
        began = [old / self._weight + new for old, new in zip(self._ended_from, self._live_from, strict=True)]
        count, total = self._first
        if count:
            for multiple in _UNKNOWN:
                ended[_bucket(int(multiple * total / count))] += 1.0
            began[_bucket(int(total / count))] += len(_UNKNOWN)
        # Backwards: v(b) = max(size(b), (1 - hazard(b)) * v(b + 1)) is the peak, given that b was reached.
        at_risk = following = mean = square = 0.0
        peaks, variances = [0.0] * _BUCKETS, [0] * _BUCKETS
        for bucket in range(_BUCKETS - 1, -1, -1):
            at_risk += ended[bucket] + self._live[bucket]
            size = _EDGES[bucket]
            # Those that are in this bucket now may yet end in it: half of them count. Where nobody has been, what
            # is above says nothing.
            hazard = 1.0
            if at_risk > _NOBODY:
                hazard = min(1.0, ended[bucket] / max(at_risk - self._live[bucket] / 2, ended[bucket], _NOBODY))
            following = max(size, (1.0 - hazard) * following) if at_risk > _NOBODY else 0.0
            if not mean:
                mean, square = size, size * size
            mean = hazard * size + (1.0 - hazard) * mean
            square = hazard * size * size + (1.0 - hazard) * square
            peaks[bucket], variances[bucket] = following, max(0, int(square - mean * mean))
            at_risk -= began[bucket]
        self._peaks, self._variances = peaks, variances


def _median(ended: list[float]) -> float:
    half, so_far = sum(ended) / 2, 0.0
    if half <= 0.0:
        return 0.0
    for bucket, count in enumerate(ended):
        so_far += count
        if so_far >= half:
            return float(_EDGES[bucket])
    return 0.0


def _bucket(tokens: int) -> int:
    return min(_BUCKETS - 1, int(log2(tokens) * _PER_OCTAVE)) if tokens > 1 else 0
