"""Reads only what is new of a request body.

Harnesses send the whole conversation with every call. A ``Memo`` remembers, for one earlier body, digests of
its beginning up to the ends of its last list items and what had been matched there; a body that begins with
the same bytes is read from there on. Nothing is guessed: bytes that were valid JSON up to the end of a list
item and are found again are valid JSON up to there again; everything else is parsed. Pure functions;
depends on orjson, msgspec (for the offsets of list items) and xxhash.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import orjson
import xxhash

from tollway.errors import BadRequest
from tollway.messages import Message
from tollway.session_server.dialects.base import Dialect
from tollway.session_server.forest import Forest, Place
from tollway.session_server.request import Wish

__all__ = ["Body", "Matched", "Memo", "Reading", "Wishes", "match", "read", "remember"]

_WHITE = b" \t\r\n"
_PROBE = 48
_DEEPEST = 240
"""Levels of nesting that a body may have: JSON writers stop at 254, and some of it is echoed inside a reply."""
_WRITTEN = 254
_MARKS = 6
"""Ends of list items that are remembered: harnesses rewrite their last messages (cache marks move), not old ones."""


class _Messages(msgspec.Struct):
    messages: list[msgspec.Raw]


class _Input(msgspec.Struct):
    input: list[msgspec.Raw]


_MESSAGES, _INPUT = msgspec.json.Decoder(_Messages), msgspec.json.Decoder(_Input)
_LISTS: dict[str, Callable[[bytes], list[msgspec.Raw]]] = {
    "messages": lambda body: _MESSAGES.decode(body).messages,
    "input": lambda body: _INPUT.decode(body).input,
}
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class Body:
    """A request body in the pieces in which it came; joined only when all of it has to be read.

    >>> Body([b"ab", b"cd"]).between(1, 3)
    b'bc'
    """

    __slots__ = ("_ends", "_hashed", "_hasher", "_parts", "_states", "size")

    def __init__(self, parts: Iterable[bytes] = ()) -> None:
        self._parts: list[bytes] = []
        self._ends: list[int] = []
        self.size = 0
        self._hasher = xxhash.xxh3_128()
        self._hashed = 0
        self._states: dict[int, xxhash.xxh3_128] = {}
        """Offset -> state of the hasher there, so that a body is hashed once whatever is asked of it."""
        for part in parts:
            self.add(part)

    def add(self, part: bytes, stops: Sequence[int] = ()) -> None:
        """The next piece, hashed while it is at hand; ``stops`` are offsets that will be asked for, rising."""
        if not part:
            return
        self._parts.append(part)
        self.size += len(part)
        self._ends.append(self.size)
        for stop in stops:
            if self._hashed < stop <= self.size:
                self.hashed_to(stop)
        self.feed(self._hasher, self._hashed, self.size)
        self._hashed = self.size

    def whole(self) -> bytes:
        """All of it."""
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
            self._ends = [self.size]
        return self._parts[0]

    def between(self, start: int, end: int) -> bytes:
        """Bytes ``[start, end)``."""
        return b"".join(self._pieces(start, end))

    def feed(self, hasher: xxhash.xxh3_128, start: int, end: int) -> None:
        """Hash bytes ``[start, end)``."""
        for piece in self._pieces(start, end):
            hasher.update(piece)

    def hashed_to(self, offset: int) -> xxhash.xxh3_128:
        """A hasher that has seen the bytes up to ``offset``; cheap when asked in rising order, or again."""
        state = self._states.get(offset)
        if state is None:
            if offset < self._hashed:
                state = xxhash.xxh3_128()
                self.feed(state, 0, offset)
            else:
                self.feed(self._hasher, self._hashed, offset)
                self._hashed, state = offset, self._hasher.copy()
            self._states[offset] = state
        return state

    def digest(self) -> bytes:
        """[16 bytes] digest of all of it."""
        return self.hashed_to(self.size).digest()

    def _pieces(self, start: int, end: int) -> Iterator[memoryview]:
        at = bisect.bisect_right(self._ends, start)
        while start < end and at < len(self._parts):
            begin = self._ends[at] - len(self._parts[at])
            until = min(end, self._ends[at])
            yield memoryview(self._parts[at])[start - begin : until - begin]
            start, at = until, at + 1


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a list item of an earlier body."""

    offset: int
    """Bytes up to and with the item."""
    digest: bytes
    """Of those bytes."""
    items: int
    """List items up to and with it."""
    place: Place


@dataclass(frozen=True, slots=True, eq=False)
class Memo:
    """What is remembered of one body."""

    dialect: str
    opening: int
    """Offset of the first byte inside the list."""
    probe: bytes
    """Bytes before the first mark: other conversations are told from this one without hashing."""
    marks: tuple[Mark, ...]
    """Rising."""
    tail_size: int
    """Bytes behind the last list item."""
    tail: bytes
    """Their digest."""
    wish: Wish


class Wishes:
    """Wishes that conversations have in common: a harness sends the same tools with each, up to 64 kB of them."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._known: OrderedDict[tuple[str, bytes], Wish] = OrderedDict()

    def shared(self, dialect: Dialect, around: bytes, wish: Wish) -> Wish:
        """The one object for what stands ``around`` the list of a body: same bytes, same wish."""
        key = dialect.name, xxhash.xxh3_128_digest(around)
        found = self._known.setdefault(key, wish)
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class Reading:
    """A body as far as it is new."""

    wish: Wish
    items: Sequence[object]
    """List items behind ``mark``; all of them without one."""
    mark: Mark | None = None
    memo: Memo | None = None
    """What ``mark`` is of."""
    kept: tuple[Mark, ...] = ()
    """Marks of the memo that hold for this body, too."""
    opening: int = 0
    ends: Sequence[int] = ()
    """Offset of the end of each of ``items``; empty when it is not known."""

    @property
    def first(self) -> int:
        """Index of ``items[0]`` in the whole list."""
        return self.mark.items if self.mark is not None else 0


@dataclass(slots=True)
class Matched:
    """Where a body's conversation stands in the forest."""

    place: Place
    messages: list[Message]
    """Kernel messages behind ``reading.mark``, or all of them, lead first, without one."""
    marks: list[tuple[int, Place]] = field(default_factory=list)
    """(list items, place) at the ends that the next memo shall know."""


def read(body: Body, dialect: Dialect, memos: Sequence[Memo] = ()) -> Reading:
    """Read ``body`` with the help of what is remembered. Raises ``BadRequest``."""
    for memo in memos:
        if memo.dialect == dialect.name:
            at = _deepest(body, memo)
            if at >= 0:
                found = _same_tail(body, memo, at) or _other_tail(body, dialect, memo, at)
                if found is not None:
                    return found
    return _whole(body.whole(), dialect)


def match(reading: Reading, dialect: Dialect, forest: Forest, start: Place | None = None) -> Matched:
    """Parse the new items and follow them through the forest.

    ``start``: where the conversation begins when it does not begin at its root. Raises ``BadRequest``.
    """
    items, first = reading.items, reading.first
    if reading.mark is not None:
        place, messages = reading.mark.place, []
    else:
        messages = [] if start is not None else list(reading.wish.lead)
        place = start if start is not None else forest.start(reading.wish.lead, reading.wish.tools)
    marks: list[tuple[int, Place]] = []
    at = 0
    for upto in _cuts(items, dialect):
        part = dialect.messages(items[at:upto], first=first + at)
        place = forest.advance(place, part)
        messages += part
        at = upto
        if dialect.closed_after(items[upto - 1]):
            marks.append((upto, place))
    return Matched(place, messages, marks)


def remember(body: Body, dialect: Dialect, reading: Reading, matched: Matched, wishes: Wishes) -> Memo | None:
    """What the next request of this conversation can make use of; ``None`` when offsets are not known."""
    if not reading.ends:
        return None
    marks = list(reading.kept)
    done = marks[-1].offset if marks else 0
    hasher = body.hashed_to(done).copy()
    for count, place in matched.marks:
        end = reading.ends[count - 1]
        body.feed(hasher, done, end)
        done = end
        marks.append(Mark(end, hasher.digest(), reading.first + count, place))
    if not marks:
        return None
    marks = marks[-_MARKS:]
    tail = body.between(reading.ends[-1], body.size)
    known = reading.memo is not None and reading.memo.wish is reading.wish
    around = body.between(0, reading.opening) + tail
    return Memo(
        dialect.name,
        reading.opening,
        body.between(max(0, marks[0].offset - _PROBE), marks[0].offset),
        tuple(marks),
        len(tail),
        xxhash.xxh3_128_digest(tail),
        reading.wish if known else wishes.shared(dialect, around, reading.wish),
    )


# -- ways to read -----------------------------------------------------------------------------------


def _whole(body: bytes, dialect: Dialect) -> Reading:
    raw = _object(body)
    wish = dialect.wish(raw)
    value = raw.get(dialect.list_field)
    if isinstance(value, str):
        return Reading(wish, dialect.items_of_text(value))
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{dialect.list_field} must be a non-empty list", param=dialect.list_field)
    opening, ends = _located(body, dialect.list_field, len(value))
    return Reading(wish, value, opening=opening, ends=ends)


def _same_tail(body: Body, memo: Memo, at: int) -> Reading | None:
    """Only list items were added: parse nothing else."""
    mark = memo.marks[at]
    until = body.size - memo.tail_size
    if until < mark.offset or xxhash.xxh3_128_digest(body.between(until, body.size)) != memo.tail:
        return None
    added = body.between(mark.offset, until)
    stripped = added.strip(_WHITE)
    kept = memo.marks[: at + 1]
    if not stripped:
        return Reading(memo.wish, (), mark, memo, kept, memo.opening, ())
    if stripped[:1] != b",":
        return None
    listed = b"[" + stripped[1:] + b"]"
    try:
        items, raws = _parsed(listed), _ITEMS.decode(listed)
    except (orjson.JSONDecodeError, msgspec.MsgspecError):
        return None
    if not isinstance(items, list) or not items or len(items) != len(raws):
        return None
    ends = [mark.offset + end for end in _ends(added, 0, raws)]
    return Reading(memo.wish, items, mark, memo, kept, memo.opening, ends)


def _other_tail(body: Body, dialect: Dialect, memo: Memo, at: int) -> Reading | None:
    """The rest of the body changed, too: parse it without the list items that are known."""
    mark = memo.marks[at]
    rest = body.between(mark.offset, body.size).lstrip(_WHITE)
    if rest[:1] != b",":
        return None
    short = body.between(0, memo.opening) + rest[1:]
    raw = _object(short)
    items = raw.get(dialect.list_field)
    if not isinstance(items, list) or not items:
        return None
    opening, ends = _located(short, dialect.list_field, len(items))
    # Another list of the same name further on would be the one that counts.
    if opening != memo.opening or not ends:
        return None
    wish = dialect.wish(raw)
    if wish.lead != memo.wish.lead or wish.tools != memo.wish.tools:
        return None
    shift = body.size - len(short)
    return Reading(wish, items, mark, memo, memo.marks[: at + 1], opening, [end + shift for end in ends])


def _deepest(body: Body, memo: Memo) -> int:
    """Index of the last mark up to which ``body`` is the remembered one, or -1."""
    first = memo.marks[0].offset
    if first > body.size or body.between(first - len(memo.probe), first) != memo.probe:
        return -1
    found = -1
    for at, mark in enumerate(memo.marks):
        if mark.offset > body.size or body.hashed_to(mark.offset).digest() != mark.digest:
            break
        found = at
    return found


# -- offsets ----------------------------------------------------------------------------------------


def _cuts(items: Sequence[object], dialect: Dialect) -> list[int]:
    """Ends of the runs of items that are matched together: the last few closed ends, and the end."""
    closed = [
        at for at in range(max(1, len(items) - 2 * _MARKS), len(items) + 1) if dialect.closed_after(items[at - 1])
    ]
    cuts = closed[-_MARKS:]
    return cuts if cuts and cuts[-1] == len(items) else [*cuts, len(items)] if items else []


def _located(body: bytes, name: str, count: int) -> tuple[int, Sequence[int]]:
    """(offset inside the list, end of each item); no ends when the list cannot be found for certain."""
    try:
        raws = _LISTS[name](body)
    except (msgspec.MsgspecError, RecursionError):
        return 0, ()
    if len(raws) != count:
        return 0, ()
    start = _address(raws[0]) - _address(body)
    opening = start - _white_before(memoryview(body), start)
    return opening, _ends(body, opening, raws)


def _ends(body: bytes, start: int, raws: Sequence[msgspec.Raw]) -> list[int]:
    ends = []
    at = start
    for raw in raws:
        while body[at] in b" \t\r\n,":
            at += 1
        at += len(memoryview(raw))
        ends.append(at)
    return ends


def _white_before(view: memoryview, at: int) -> int:
    count = 0
    while at - count > 0 and view[at - count - 1] in _WHITE:
        count += 1
    return count


def _address(data: object) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])  # type: ignore[call-overload]  # a buffer


def _object(body: bytes) -> dict[str, object]:
    try:
        raw = _parsed(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadRequest(f"the body is a JSON {type(raw).__name__}, want an object")
    return raw


def _parsed(data: bytes) -> object:
    """A JSON value that everything behind can walk, compare, show and write. Raises ``BadRequest`` when too deep."""
    value: object = orjson.loads(data)
    # Counting costs next to nothing, and few bodies have as many brackets.
    if data.count(b"[") + data.count(b"{") > _DEEPEST:
        wrapped = value
        for _ in range(_WRITTEN - _DEEPEST):
            wrapped = [wrapped]
        try:
            orjson.dumps(wrapped)
        except orjson.JSONEncodeError:
            raise BadRequest(f"the body is nested deeper than {_DEEPEST} levels") from None
    return value
