"""Bodies are read from where an earlier one stood, and always mean what the whole body means."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.errors import BadRequest
from tollway.session_server.bodies import Body, Memo, Wishes, match, read, remember
from tollway.session_server.dialects.chat import CHAT
from tollway.session_server.forest import Forest

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def pieces(data: bytes) -> Body:
    """A body as a socket may bring it."""
    return Body([data[at : at + 37] for at in range(0, len(data), 37)])


def memo_of(data: bytes, *memos: Memo) -> Memo:
    body = pieces(data)
    reading = read(body, CHAT, memos)
    memo = remember(body, CHAT, reading, match(reading, CHAT, Forest()), Wishes())
    assert memo is not None
    return memo


def same(data: bytes, *memos: Memo) -> int:
    """Index of the first item that was read; the place must be that of the whole body."""
    body = pieces(data)
    reading, whole = read(body, CHAT, memos), read(body, CHAT)
    assert reading.wish == whole.wish
    assert list(reading.items) == list(whole.items)[reading.first :]
    forest = Forest()
    assert match(reading, CHAT, forest).place == match(whole, CHAT, forest).place
    return reading.first


def test_only_what_was_added_is_read() -> None:
    messages = [user("one"), {"role": "assistant", "content": "two"}]
    memo = memo_of(orjson.dumps({"model": "m", "messages": messages, "tools": TOOLS}))
    more = [*messages, user("three")]
    assert same(orjson.dumps({"model": "m", "messages": more, "tools": TOOLS}), memo) == 2
    # The rest may change, too.
    assert same(orjson.dumps({"model": "m", "messages": more, "tools": TOOLS, "max_tokens": 7}), memo) == 2
    # Other tools make another conversation, other bytes in front of the list another body.
    assert same(orjson.dumps({"model": "m", "messages": more}), memo) == 0
    assert same(orjson.dumps({"model": "n", "messages": more, "tools": TOOLS}), memo) == 0


def test_last_messages_may_be_rewritten_and_older_ones_are_still_known() -> None:
    first = [user("one"), {"role": "assistant", "content": "two"}, {**user("three"), "cache_control": {"type": "x"}}]
    memo = memo_of(orjson.dumps({"messages": first, "stream": False}))
    second = [*first[:2], user("three"), {"role": "assistant", "content": "four"}, user("five")]
    assert same(orjson.dumps({"messages": second, "stream": False}), memo) == 2


def test_a_chain_of_memos_keeps_to_what_is_new() -> None:
    messages = [user("0")]
    memo = memo_of(orjson.dumps({"messages": messages, "stream": False}))
    for turn in range(1, 30):
        messages += [{"role": "assistant", "content": f"a{turn}"}, user(f"u{turn}")]
        body = orjson.dumps({"messages": messages, "stream": False, **({"seed": turn} if turn % 3 == 0 else {})})
        assert same(body, memo) == len(messages) - 2
        memo = memo_of(body, memo)
    assert len(memo.marks) <= 6


@pytest.mark.parametrize(
    "form",
    [
        '{"messages":[%s],"messages":[%s]}',
        '{"messages" : [ %s ] , "x" : {"messages":[1]}, "messages" :\n[ %s ]  }',
        '{"m\\u0065ssages":[%s],"model":"m","messages":[%s]}',
    ],
)
def test_of_two_lists_the_last_counts_as_in_any_json(form: str) -> None:
    one, two = json.dumps(user("old")), json.dumps(user("new"))
    memo = memo_of((form % (one, two)).encode())
    longer = (form % (one, f"{two} , {json.dumps(user('more'))}")).encode()
    same(longer, memo)
    same((form % (f"{one},{two}", two)).encode(), memo)


def test_a_second_list_behind_the_known_one_is_seen() -> None:
    memo = memo_of(orjson.dumps({"messages": [user("a")], "model": "m"}))
    one, two, other = (json.dumps(user(text), separators=(",", ":")) for text in "abz")
    body = f'{{"messages":[{one},{two}],"messages":[{other}]}}'.encode()
    assert same(body, memo) == 0


@pytest.mark.parametrize("tail", [",]}", ",}", "", "]", ',{"role":"user"]}', '],"x":[{"role":"user","content":"b"}'])
def test_what_is_no_json_is_refused_though_it_begins_well(tail: str) -> None:
    start = b'{"messages":[{"role":"user","content":"a"}'
    memo = memo_of(start + b"]}")
    with pytest.raises(BadRequest):
        read(pieces(start + tail.encode()), CHAT, [memo])


contents = st.sampled_from(["", "a", "]", '"', "],[", "é", '","messages":[', "\\"])
steps = st.lists(st.tuples(st.integers(0, 3), contents, st.booleans()), min_size=1, max_size=8)


@settings(max_examples=200)
@given(steps, st.sampled_from([None, 1]))
def test_any_history_of_bodies_is_read_as_the_last_one_alone(
    history: list[tuple[int, str, bool]], indent: int | None
) -> None:
    messages: list[dict[str, Any]] = [user("start")]
    memos: list[Memo] = []
    for cut, text, extra in history:
        messages = [*messages[: max(1, len(messages) - cut)], {"role": "assistant", "content": text}, user(text)]
        value = {"model": "m", "messages": messages, "tools": TOOLS, **({"seed": cut} if extra else {})}
        body = json.dumps(value, indent=indent, ensure_ascii=cut % 2 == 0).encode()
        same(body, *memos)
        reading = read(pieces(body), CHAT, memos)
        memo = remember(pieces(body), CHAT, reading, match(reading, CHAT, Forest()), Wishes())
        memos = [memo, *memos][:3] if memo is not None else memos  # None: nothing was added


def test_conversations_of_one_harness_share_their_tools() -> None:
    wishes = Wishes(most=2)

    def kept(text: str, **more: Any) -> Memo:
        body = pieces(orjson.dumps({"model": "m", "messages": [user(text)], "tools": TOOLS, **more}))
        reading = read(body, CHAT)
        memo = remember(body, CHAT, reading, match(reading, CHAT, Forest()), wishes)
        assert memo is not None
        assert memo.wish == reading.wish
        return memo

    assert kept("one").wish is kept("two").wish
    assert kept("one", seed=1).wish is not kept("two").wish
    kept("one", seed=2), kept("one", seed=3)
    assert kept("one").wish == kept("two").wish
