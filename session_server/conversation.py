"""From a request body to a conversation placed in its session's forest.

Reads only what is new (``bodies``); what an earlier request or reply is known to hold is fetched from the
body or from the journal only when a turn has to render it anew. Depends on ``bodies``, ``forest``, ``rows``
and the journal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

from tollway.errors import BadRequest
from tollway.messages import Message
from tollway.session_server.bodies import Body, Matched, Reading, Wishes, match, read, remember
from tollway.session_server.dialects.base import Dialect
from tollway.session_server.forest import Forest, Node
from tollway.session_server.journal import Journal
from tollway.session_server.matching import EMPTY, chain, message_key
from tollway.session_server.rows import messages_from_json
from tollway.session_server.session import Session
from tollway.session_server.turn import Asked

__all__ = ["Conversations"]


@dataclass(frozen=True, slots=True)
class _Names:
    reply_id: str
    key: str | None


class Conversations:
    """Places requests in forests."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._wishes = Wishes()

    async def read(self, session: Session, dialect: Dialect, body: Body, *, reply_id: str, key: str | None) -> Asked:
        """The request of ``body`` and where its conversation stands. Raises ``BadRequest``."""
        names = _Names(reply_id, key)
        reading = read(body, dialect, session.memos)
        if reading.wish.previous is not None:
            if reading.mark is not None:
                # What a memo knows is placed from a conversation's beginning, this list from the named reply.
                reading = read(body, dialect)
            return await self._continued(session, dialect, reading, names)
        matched = match(reading, dialect, session.forest)
        memo = remember(body, dialect, reading, matched, self._wishes)
        if memo is not None:
            session.keep_memo(memo, reading.memo)
        mark = reading.mark

        async def whole() -> Sequence[Message]:
            return matched.messages if mark is None else _all_messages(body, dialect, session.forest)

        return _asked(
            dialect, reading, matched, names, first=mark.place.messages if mark is not None else 0, whole=whole
        )

    async def _continued(self, session: Session, dialect: Dialect, reading: Reading, names: _Names) -> Asked:
        """A request that names the reply it continues and brings only what is new."""
        wish, forest = reading.wish, session.forest
        node = forest.by_reply(wish.previous or "")
        if node is None:
            raise BadRequest(
                f"previous_response_id {wish.previous!r} is no stored reply of this session; send the whole input",
                param="previous_response_id",
            )
        frame = forest.start(wish.lead, wish.tools)
        same = frame.tools == node.tools and frame.lead == node.lead_digest

        async def before() -> list[Message]:
            return [*wish.lead, *await self._spoken(session, node)]

        if same:
            matched = match(reading, dialect, forest, forest.after(node))

            async def whole() -> Sequence[Message]:
                return [*await before(), *matched.messages]

            return _asked(dialect, reading, matched, names, whole=whole, named=node)
        # Other instructions or tools: the same words make another prompt, so another conversation.
        old = await before()
        place = forest.advance(frame, old[len(wish.lead) :])
        found = match(reading, dialect, forest, place)
        everything = [*old, *found.messages]

        async def all_of_it() -> Sequence[Message]:
            return everything

        return _asked(dialect, reading, Matched(found.place, everything), names, whole=all_of_it)

    async def _spoken(self, session: Session, node: Node) -> list[Message]:
        """Messages of ``node``'s path, its reply included, without the leading ones."""
        path = [each.number for each in node.path()]
        rows = await self._journal.read(
            "SELECT number, messages FROM turns WHERE session_id=? ORDER BY number", (session.session_id,)
        )
        kept = {row[0]: cast(bytes, row[1]) for row in rows}
        messages = [message for number in path for message in messages_from_json(kept[number])]
        return messages[_lead_count(messages, node.lead_digest, call_ids=session.forest.call_ids) :]


def _asked(
    dialect: Dialect,
    reading: Reading,
    matched: Matched,
    names: _Names,
    *,
    whole: Callable[[], Awaitable[Sequence[Message]]],
    first: int = 0,
    named: Node | None = None,
) -> Asked:
    wish = dialect.settle(reading.wish, reading.items[-1]) if reading.items else reading.wish
    return Asked(
        wish=wish,
        place=matched.place,
        messages=matched.messages,
        first=first,
        whole=whole,
        named=named if matched.place.used == 0 else None,
        reply_id=names.reply_id,
        call_prefix=dialect.call_prefix,
        key=names.key,
    )


def _all_messages(body: Body, dialect: Dialect, forest: Forest) -> Sequence[Message]:
    return match(read(body, dialect), dialect, forest).messages


def _lead_count(messages: Sequence[Message], lead: bytes, *, call_ids: bool) -> int:
    """How many of the first messages make up the digest ``lead``."""
    digest, count = EMPTY, 0
    while digest != lead and count < len(messages):
        digest = chain(digest, message_key(messages[count], call_ids=call_ids))
        count += 1
    return count
