"""Where a session goes: pure functions over the loads of targets. Must not do I/O or keep state.

A new session goes to the target with the fewest resident tokens among those that have room; ties go to fewer
sessions, then to the target that was chosen longest ago, so list order never decides. Only targets that take
new sessions and hold the wanted weights are looked at: dead and draining ones influence nothing. How much of a
prefix a target's cache holds does not count either, since a new session has none: the emptiest load wins, never
the smallest cache. Depends on ``targets``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tollway.router.targets import ANY, Target, Wanted

__all__ = ["by_room", "choose", "fits", "has_place", "most_room", "reprefill_s", "takes", "wait_s", "worth_moving"]

NO_TARGETS: frozenset[Target] = frozenset()


def takes(target: Target, want: Wanted) -> bool:
    """Whether a session that wants ``want`` may be placed on ``target`` at all."""
    return target.admits and want.holds(target.version)


def fits(target: Target, need: int) -> bool:
    """Whether ``need`` more tokens fit beside what is reserved; larger than the whole budget fits an empty target."""
    budget = target.budget_tokens
    reserved = target.reserved_tokens
    return budget is None or reserved + target.spread_tokens + need <= budget or reserved == 0


def has_place(target: Target) -> bool:
    """Whether one more call would run at once."""
    return target.max_in_flight is None or target.in_flight + target.waiting < target.max_in_flight


def choose(
    targets: Iterable[Target],
    *,
    need: int,
    want: Wanted = ANY,
    home: Target | None = None,
    avoid: Collection[Target] = NO_TARGETS,
) -> Target | None:
    """Target for a session that will need ``need`` tokens; ``None`` when none that takes it has room.

    ``home`` is where its relatives are: taken whenever it has room. ``avoid`` are targets that others have claimed.

    >>> a, b = Target("a", resident_tokens=10), Target("b", resident_tokens=5)
    >>> choose([a, b], need=1) is b
    True
    """
    if home is not None and home not in avoid and takes(home, want) and fits(home, need):
        return home
    picky = want is not ANY
    best: Target | None = None
    for target in targets:
        if not target.admits or (picky and not want.holds(target.version)):
            continue
        resident = target.resident_tokens
        if best is not None:
            least = best.resident_tokens
            if resident > least or (
                resident == least and (target.sessions, target.last_chosen) >= (best.sessions, best.last_chosen)
            ):
                continue
        budget = target.budget_tokens
        reserved = target.reserved_tokens
        if budget is not None and reserved + target.spread_tokens + need > budget and reserved:
            continue
        if avoid and target in avoid:
            continue
        best = target
    return best


def by_room(targets: Iterable[Target]) -> list[Target]:
    """The targets that take sessions, from the one with the most room to the one that is most over its budget."""
    return sorted((each for each in targets if each.admits), key=_over)


def most_room(
    targets: Iterable[Target], *, want: Wanted = ANY, avoid: Collection[Target] = NO_TARGETS
) -> Target | None:
    """The target that takes the session and is least over or nearest under its budget; ``None`` when none takes it."""
    return min((each for each in targets if takes(each, want) and each not in avoid), key=_over, default=None)


def _over(target: Target) -> tuple[float, int, int]:
    budget = target.budget_tokens
    over = float("-inf") if budget is None else target.reserved_tokens + target.spread_tokens - budget
    return over, target.resident_tokens, target.last_chosen


def reprefill_s(target: Target, tokens: int) -> float | None:
    """Seconds that ``target`` takes to compute a prefix of ``tokens`` anew; ``None`` while its speed is unknown."""
    speed = target.pace.prefill_tokens_per_s
    return tokens / speed if speed else None


def wait_s(target: Target) -> float:
    """Estimated seconds until a call that comes now would run; 0 where there is no limit or no measurement."""
    limit, call_s = target.max_in_flight, target.pace.call_s
    if limit is None or call_s is None or target.in_flight + target.waiting < limit:
        return 0.0
    return (target.waiting + 1) * call_s / limit


def worth_moving(*, wait_s: float, reprefill_s: float, factor: float) -> bool:
    """Whether a session should leave: the wait that it escapes exceeds ``factor`` times its own re-prefill."""
    return wait_s > factor * reprefill_s
