"""Matching and attachment as pure rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Sampling, Trajectory, TurnRecord, VersionSpan
from tollway.router.wire import Prompt, ids_json
from tollway.session_server.columns import pack_rows, unpack_rows
from tollway.session_server.export import ExportFacts, ExportPolicy, export_rows
from tollway.session_server.forest import Attachment, Forest, Node, common_prefix, path_prompt
from tollway.session_server.matching import canonical_arguments, message_key, tools_digest
from tollway.session_server.rows import TURN_COLUMNS, KeptTurn, TurnInsert, turn_from_row, turn_insert

TOOL = ToolSpec(name="run")


def record(suffix: list[int], sampled: list[int]) -> TurnRecord:
    return TurnRecord(
        suffix_ids=np.array(suffix, np.int32), sampled_ids=np.array(sampled, np.int32),
        logprobs=np.full(len(sampled), -1.0, np.float32), versions=(VersionSpan(0, 0, len(sampled)),),
        finish_reason="stop", sampling=Sampling(), engine_id="e", prompt_tokens=1000, cached_tokens=None,
        started_at=0.0, ended_at=1.0,
    )  # fmt: skip


def user(text: str) -> Message:
    return Message(role="user", content=text)


def attach(forest: Forest, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Attachment:
    return forest.attach(forest.advance(forest.start((), tools), messages))


def grow(forest: Forest, attachment: Attachment, reply: Message, suffix: list[int], sampled: list[int]) -> Node:
    place = attachment.place
    end, bare = forest.end_digests(place.at, reply)
    node = Node(
        number=len(forest), parent=attachment.parent, reason=attachment.reason, finish_reason="stop",
        chunk=ids_json(np.array([*suffix, *sampled], np.int32)), suffix_size=len(suffix), sampled_size=len(sampled),
        request_digest=place.at, end_digest=end, bare_digest=bare, root_digest=place.root, lead_digest=place.lead,
        tools=place.tools, engine_id="e", versions=(), cached_tokens=None,
        length=(attachment.parent.length if attachment.parent else 0) + len(suffix) + len(sampled),
    )  # fmt: skip
    forest.add(node)
    return node


def rows_of(forest: Forest, policy: ExportPolicy | None = None) -> tuple[Trajectory, ...]:
    """The export of a forest by way of its journal rows."""
    turns = [kept(node) for node in forest.nodes.values()]
    return export_rows(turns, ExportFacts("s"), policy)


def kept(node: Node) -> KeptTurn:
    """What comes back from the journal row of a node."""
    suffix, sampled = node.own_ids()
    insert = TurnInsert(messages=b"[]", boot="b")
    (sql, values), _ = turn_insert("s", node, record(suffix.tolist(), sampled.tolist()), insert)
    names = sql[sql.index("(") + 1 : sql.index(")")].split(", ")
    row = dict(zip(names, values, strict=True)) | {
        "superseded": int(node.superseded),
        "overflowed": int(node.overflowed),
    }
    return turn_from_row(tuple(row[name] for name in TURN_COLUMNS.split(", ")))


def test_an_undelivered_answer_is_superseded_by_the_next_and_stays_visible() -> None:
    forest = Forest()
    said = Message(role="assistant", content="a")
    first = grow(forest, attach(forest, [user("q")]), said, [1], [2])
    first.delivered = False
    again = attach(forest, [user("q")])
    assert (again.reason, again.supersedes) == ("retry", (first,))
    second = grow(forest, again, Message(role="assistant", content="b"), [1], [3])
    first.superseded = True
    third = attach(forest, [user("q")])
    assert (third.reason, third.supersedes) == ("sibling", ())
    rows = rows_of(forest)
    assert [(row.leaf, row.trainable) for row in rows] == [(first.number, False), (second.number, True)]


def thought(reasoning: str | None, content: str = "yes") -> Message:
    return Message(role="assistant", content=content, reasoning=reasoning)


@pytest.mark.parametrize("first", ["r1", None])
@pytest.mark.parametrize("second", ["r2", None])
def test_replies_that_differ_in_their_reasoning_only_keep_their_own_conversations(
    first: str | None, second: str | None
) -> None:
    """Whoever drops the reasoning is followed by what comes after it; whoever sends it is taken at their word."""
    forest = Forest()
    one = grow(forest, attach(forest, [user("q")]), thought(first), [1], [2])
    deeper = grow(
        forest, attach(forest, [user("q"), thought(None), user("on")]), Message(role="assistant", content="a"), [3], [4]
    )
    assert deeper.parent is one
    two = grow(forest, attach(forest, [user("q")]), thought(second), [1], [5])
    history = [user("q"), thought(None), user("on"), Message(role="assistant", content="a"), user("further")]
    found = attach(forest, history)
    assert (found.parent, found.reason, found.used) == (deeper, "continuation", 4)
    history[1] = thought(first)
    assert attach(forest, history).parent is deeper
    history[1] = thought("of nobody")
    assert attach(forest, history).reason == "edited"
    # Nothing tells them apart yet: the one that nobody went on with.
    assert attach(forest, [user("q"), thought(None), user("other")]).parent is two
    if first and second:
        assert attach(forest, [user("q"), thought(first), user("other")]).parent is one


def test_of_replies_that_look_alike_the_one_with_a_lost_answer_is_asked_again() -> None:
    forest = Forest()
    grow(forest, attach(forest, [user("q")]), thought("r1"), [1], [2])
    asked = [user("q"), thought(None), user("on")]
    lost = grow(forest, attach(forest, asked), Message(role="assistant", content="a"), [3], [4])
    grow(forest, attach(forest, [user("q")]), thought("r2"), [1], [5])
    lost.delivered = False
    again = attach(forest, asked)
    assert (again.reason, again.supersedes, again.parent) == ("retry", (lost,), lost.parent)


def test_many_replies_that_look_alike_cost_no_more_than_some() -> None:
    forest = Forest()
    nodes = [grow(forest, attach(forest, [user("q")]), thought(f"r{at}"), [1], [at]) for at in range(200)]
    found = attach(forest, [user("q"), thought(None), user("on")])
    assert found.parent is nodes[-1]
    assert len(forest.advance(forest.start((), ()), [user("q"), thought(None)]).ways) == 64


def test_a_superseded_leaf_does_not_take_a_shared_prefix_from_training() -> None:
    forest = Forest()
    said = Message(role="assistant", content="a")
    grow(forest, attach(forest, [user("q")]), said, [1], [2])
    for sampled in ([4], [5]):
        grow(
            forest,
            attach(forest, [user("q"), said, user("r")]),
            Message(role="assistant", content=str(sampled)),
            [3],
            sampled,
        )
    forest.nodes[1].superseded = True
    rows = {row.leaf: row for row in rows_of(forest)}
    assert rows[1].loss_mask.tolist() == [0, 0, 0, 1]
    assert rows[2].loss_mask.tolist() == [0, 1, 0, 1]


def test_identical_replies_continue_the_one_without_children() -> None:
    forest = Forest()
    said = Message(role="assistant", content="same")
    first = grow(forest, attach(forest, [user("q")]), said, [1], [2])
    second = grow(forest, attach(forest, [user("q")]), said, [1], [2])
    one = attach(forest, [user("q"), said, user("r")])
    assert one.parent is second
    grow(forest, one, said, [3], [4])
    assert attach(forest, [user("q"), said, user("s")]).parent is first


def test_a_request_that_ends_in_our_reply_continues_it() -> None:
    forest = Forest()
    said = Message(role="assistant", content="a")
    node = grow(forest, attach(forest, [user("q")]), said, [1], [2])
    again = attach(forest, [user("q"), said])
    assert (again.parent, again.used) == (node, 2)


def test_a_root_without_tools_beside_one_with_tools_is_a_side_request() -> None:
    forest = Forest()
    said = Message(role="assistant", content="a title")
    title = grow(forest, attach(forest, [user("name this")]), said, [1], [2])
    assert [row.side_request for row in rows_of(forest)] == [False]
    main = grow(forest, attach(forest, [user("do this")], [TOOL]), said, [3], [4])
    marked = {row.leaf: row for row in rows_of(forest)}
    assert (marked[title.number].side_request, marked[title.number].trainable) == (True, False)
    assert (marked[title.number].untrainable_reason, marked[main.number].trainable) == ("side_request", True)
    assert [row.trainable for row in rows_of(forest, ExportPolicy(side_requests="train"))] == [True, True]
    assert [row.leaf for row in rows_of(forest, ExportPolicy(side_requests="drop"))] == [main.number]


def test_the_main_branch_is_the_one_continued_last() -> None:
    forest = Forest()
    said = Message(role="assistant", content="a")
    grow(forest, attach(forest, [user("q")], [TOOL]), said, [1], [2])
    grow(forest, attach(forest, [user("q"), said, user("r")], [TOOL]), Message(role="assistant"), [3], [4])
    last = grow(forest, attach(forest, [user("q"), said, user("s")], [TOOL]), Message(role="assistant"), [5], [6])
    (row,) = rows_of(forest, ExportPolicy(branches="main"))
    assert (row.leaf, row.token_ids.tolist(), row.loss_mask.tolist()) == (last.number, [1, 2, 5, 6], [0, 1, 0, 1])


def test_paths_are_the_sums_of_their_nodes() -> None:
    forest = Forest()
    said = Message(role="assistant", content="a")
    grow(forest, attach(forest, [user("q")]), said, [1, 2], [3])
    node = grow(forest, attach(forest, [user("q"), said, user("r")]), said, [4], [5, 6])
    assert path_prompt(node).extended(b"7", 1).ids().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert path_prompt(None) == Prompt((), 0)
    assert [part.tolist() for part in node.own_ids()] == [[4], [5, 6]]
    assert node.length == 6
    assert [each.number for each in node.path()] == [0, 1]


ids = st.lists(st.integers(0, 120), max_size=12)


@given(ids, ids)
def test_the_common_prefix_is_where_the_first_difference_is(a: list[int], b: list[int]) -> None:
    expected = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(Prompt.of(np.array(a, np.int32)), Prompt.of(np.array(b, np.int32))) == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_arguments_match_however_they_are_written(value: object) -> None:
    import json

    assert canonical_arguments(json.dumps(value)) == canonical_arguments(
        json.dumps(value, indent=2, ensure_ascii=False)
    )


@given(st.text(max_size=30))
def test_any_text_has_canonical_arguments(raw: str) -> None:
    assert isinstance(canonical_arguments(raw), str)


def test_numbers_of_different_kinds_differ() -> None:
    forms = ['{"a":1}', '{"a":1.0}', '{"a":true}', '{"a":"1"}', '{"a":null}', "{}", '{"a":1,"a":1}', "[" * 100_000]
    assert len({canonical_arguments(raw) for raw in forms}) == len(forms)


def test_field_borders_count() -> None:
    one = message_key(Message(role="user", content="ab", name="c"))
    two = message_key(Message(role="user", content="a", name="bc"))
    assert one != two
    calls = [
        Message(role="assistant", tool_calls=(ToolCall("a", "bc", "{}"),)),
        Message(role="assistant", tool_calls=(ToolCall("ab", "c", "{}"),)),
    ]
    assert message_key(calls[0]) != message_key(calls[1])


def test_tool_lists_differ_in_order_text_and_strictness() -> None:
    a, b = ToolSpec(name="a"), ToolSpec(name="b")
    lists = [(), (a,), (a, b), (b, a), (ToolSpec(name="a", strict=True), b), (ToolSpec(name="a", description="x"), b)]
    assert len({tools_digest(tools) for tools in lists}) == len(lists)


def test_no_rows_survive_the_trip() -> None:
    assert unpack_rows(pack_rows(())) == ()
