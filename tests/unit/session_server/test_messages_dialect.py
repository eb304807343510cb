"""Anthropic Messages: blocks, stop reasons, the bracketed stream, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_helpers import END, ID, USER, Reply, call, events_of, names, play, record_of, text, think, wish_of

from tollway.errors import (
    BadRequest,
    CapacityExceeded,
    Conflict,
    ContextLengthExceeded,
    EngineLost,
    JournalError,
    NoEngine,
    NotFound,
    RequestAborted,
    TollwayError,
    Unauthorized,
    UpstreamError,
)
from tollway.messages import Message, ToolCall
from tollway.session_server.dialects.messages import MESSAGES, count_reply
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.matching import message_key
from tollway.session_server.request import ToolChoice, TurnDelta, TurnOutcome

RUN = {"name": "run", "description": "d", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}


def block(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


# -- requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "lead"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ("Be.", "Be."),
        ([block("Be.")], "Be."),
        ([{**block("Be "), "cache_control": {"type": "ephemeral"}}, block("brief.")], "Be brief."),
        ([block("x-anthropic-billing-header: cc_version=2.1.332.0b8; cc_entrypoint=cli;"), block("Be.")], "Be."),
        ("x-anthropic-billing-header: cc_version=2; cch=1a2b3;\nBe.", "Be."),
        ([block("On x-anthropic-billing-header: a word")], "On x-anthropic-billing-header: a word"),
    ],
)
def test_the_system_prompt_leads_without_the_billing_line(system: Any, lead: str) -> None:
    expected = (Message(role="system", content=lead),) if lead else ()
    assert MESSAGES.wish({"system": system}).lead == expected


def test_results_and_text_of_one_user_message_become_messages_in_their_order() -> None:
    content = [
        block("before "),
        block("that"),
        {"type": "tool_result", "tool_use_id": "t1", "content": "8"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [block("9"), block("10")], "is_error": False},
        {"type": "tool_result", "tool_use_id": "t3", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t4"},
        {**block("after"), "cache_control": {"type": "ephemeral"}},
    ]
    assert MESSAGES.messages([{"role": "user", "content": content}]) == [
        Message(role="user", content="before that"),
        Message(role="tool", content="8", tool_call_id="t1"),
        Message(role="tool", content="910", tool_call_id="t2"),
        Message(role="tool", content="[tool error]\nno such file", tool_call_id="t3"),
        Message(role="tool", content="", tool_call_id="t4"),
        Message(role="user", content="after"),
    ]


def test_assistant_blocks_become_one_message() -> None:
    content = [
        {"type": "thinking", "thinking": "why", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        block("so"),
        {"type": "tool_use", "id": "t", "name": "run", "input": {"b": 1.0, "a": "é"}},
        block(" on"),
    ]
    assert MESSAGES.messages([{"role": "assistant", "content": content}]) == [
        Message(
            role="assistant",
            content="so on",
            reasoning="why",
            tool_calls=(ToolCall("t", "run", '{"b":1.0,"a":"é"}'),),
        )
    ]


def test_plain_contents_and_late_system_messages() -> None:
    items = [USER, {"role": "system", "content": [block("late")]}, {"role": "assistant", "content": "x"}]
    assert MESSAGES.messages([*items, {"role": "user", "content": []}]) == [
        Message(role="user", content="go"),
        Message(role="system", content="late"),
        Message(role="assistant", content="x"),
        Message(role="user"),
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, "takes text only"),
        ({"role": "user", "content": [{"type": "document", "source": {}}]}, "takes text only"),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{}]}]}, "takes text"),
        ({"role": "user", "content": [{"type": "tool_result", "content": "x"}]}, "tool_use_id"),
        ({"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}, "tool_use"),
        ({"role": "user", "content": ["x"]}, "no block"),
        ({"role": "user", "content": {"a": 1}}, "list of blocks"),
        ({"role": "assistant", "content": [{"type": "server_tool_use"}]}, "server_tool_use"),
        ({"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}, "id and name"),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "x"}]}, "object"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "thinking"),
        ({"role": "tool", "content": "x"}, "unknown role"),
        ({"role": ["user"]}, "unknown role"),
        ("x", "must be an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(message: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=r"messages\[6\]") as caught:
        MESSAGES.messages([USER, message], first=5)
    assert said in str(caught.value)


def test_every_field_that_can_be_honoured_is_read() -> None:
    wish = MESSAGES.wish(
        {
            "model": "m",
            "max_tokens": 9,
            "stop_sequences": ["4"],
            "temperature": 1,
            "top_p": 0.9,
            "top_k": 5,
            "stream": True,
            "metadata": {"user_id": "u"},
            "cache_control": {"type": "ephemeral"},
            "tools": [{**RUN, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}],
            "tool_choice": {"type": "tool", "name": "run", "disable_parallel_tool_use": True},
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "array"}}},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }
    )
    assert (wish.model, wish.max_new_tokens, wish.stop, wish.stream) == ("m", 9, ("4",), True)
    assert (wish.temperature, wish.top_p, wish.top_k) == (1.0, 0.9, 5)
    assert (wish.tool_choice, wish.parallel_tool_calls) == (ToolChoice("named", "run"), False)
    assert wish.schema == '{"type":"array"}'
    (tool,) = wish.tools
    assert (tool.name, tool.strict) == ("run", True)
    assert tool.parameters == '{"type":"object","properties":{"z":{},"a":{}}}'


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_tool_choices(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    wish = MESSAGES.wish({"tools": [RUN], "tool_choice": choice})
    assert (wish.tool_choice, wish.parallel_tool_calls) == (expected, parallel)


@pytest.mark.parametrize(
    ("thinking", "switch"),
    [
        (None, None),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive", "display": "updates"}, None),
    ],
)
def test_thinking_switches(thinking: Any, switch: bool | None) -> None:
    assert MESSAGES.wish({"thinking": thinking}).options.thinking is switch


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("stop_sequences", [""]),
        ("temperature", "hot"),
        ("thinking", {"type": "deep"}),
        ("thinking", "enabled"),
        ("container", "c"),
        ("mcp_servers", [{"type": "url"}]),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015"}]}),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("context_management", {"edits": "x"}),
        ("output_config", {"format": {"type": "json_schema"}}),
        ("tool_choice", {"type": "tool", "name": "nope"}),
        ("tool_choice", {"type": "some"}),
        ("tool_choice", "auto"),
        ("tools", [{"type": "bash_20250124", "name": "bash"}]),
        ("tools", [{"type": "text_editor_20250728", "name": "e"}]),
        ("tools", [{"name": "run"}]),
        ("tools", [RUN, RUN]),
        ("tools", "run"),
        ("system", [{"type": "image"}]),
        ("system", {"text": "x"}),
    ],
)
def test_wishes_that_cannot_be_honoured_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        MESSAGES.wish({"tools": [RUN], field: value})
    assert field.rstrip("s") in str(caught.value) + str(caught.value.param)


def test_server_tools_are_not_shown_and_the_reply_says_so(qwen: RenderersFamily) -> None:
    body = {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}, RUN], "stream": True}
    played = play(MESSAGES, body, qwen, Reply([*text("x"), *END]))
    assert [tool.name for tool in played.wish.tools] == ["run"]
    left_out = {"left_out_tools": ["web_search_20250305"]}
    assert played.whole["tollway"] == {**left_out, "weight_versions": {"start": 0, "end": 0}}
    assert played.events[0]["message"]["tollway"] == left_out


# -- replies ----------------------------------------------------------------------------------------

REPLIES = {
    "plain": (Reply([*text("hello"), *END]), "end_turn"),
    "everything": (
        Reply([*think("hm"), *text("so"), *call("run", '{"a": 3}'), *call("run"), *END]),
        "tool_use",
    ),
    "calls-only": (Reply([*call("run"), *END]), "tool_use"),
    "cut": (Reply([*think("hm"), *text("so")], finish="length"), "max_tokens"),
    "cut-thinking": (Reply([ID["<think>"], *text("\nhm")], finish="length"), "max_tokens"),
    "empty": (Reply(END), "end_turn"),
}


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize("reply", REPLIES)
def test_a_stream_is_bracketed_and_ends_as_the_whole_reply(qwen: RenderersFamily, reply: str, chunk: int) -> None:
    """Reports B9 and B10."""
    sampled, reason = REPLIES[reply]
    played = play(
        MESSAGES, {"model": "m", "messages": [USER], "tools": [RUN], "stream": True}, qwen, sampled, chunk=chunk
    )
    message = assembled(played.events)
    assert message == played.whole
    assert message["stop_reason"] == reason
    assert message["usage"]["output_tokens"] == len(sampled.ids)


def test_text_behind_a_call_gets_a_block_of_its_own() -> None:
    """Report B9: nothing goes into an open block of another kind, nothing is lost."""
    wish = wish_of(MESSAGES, {})
    writer = MESSAGES.stream(wish, names(MESSAGES), None)  # type: ignore[arg-type]  # not used here
    stream = writer.start()
    for delta in (
        TurnDelta(reasoning="r"),
        TurnDelta(content="a"),
        TurnDelta(call=ToolCall("t", "run", '{"a": 1}')),
        TurnDelta(content="b"),
    ):
        stream += writer.delta(delta)
    said = Message(role="assistant", content="ab", reasoning="r", tool_calls=(ToolCall("t", "run", '{"a": 1}'),))
    message = assembled(events_of(stream + writer.end([said_outcome(said)])))
    assert [entry["type"] for entry in message["content"]] == ["thinking", "text", "tool_use", "text"]
    assert MESSAGES.messages([message]) == [
        Message(role="assistant", content="ab", reasoning="r", tool_calls=(ToolCall("t", "run", '{"a":1}'),))
    ]


def test_a_stop_sequence_is_reported(qwen: RenderersFamily) -> None:
    """Report B11."""
    body = {"messages": [USER], "stop_sequences": ["4"], "stream": True}
    played = play(MESSAGES, body, qwen, Reply(text("1,2,3,4"), matched="4"), chunk=1)
    assert played.wish.stop == ("4",)
    for message in (played.whole, assembled(played.events)):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "4")
        assert message["content"] == [{"type": "text", "text": "1,2,3,"}]
    ended = play(MESSAGES, body, qwen, Reply([*text("1"), *END], matched=END[0]))
    assert (ended.whole["stop_reason"], ended.whole["stop_sequence"]) == ("end_turn", None)


def test_usage_tells_cached_tokens_apart_and_unknown_is_not_zero(qwen: RenderersFamily) -> None:
    usage = play(MESSAGES, {"messages": [USER]}, qwen, Reply([*text("x"), *END])).whole["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (30, 20)
    usage = play(MESSAGES, {"messages": [USER]}, qwen, Reply([*text("x"), *END], cached=None)).whole["usage"]
    assert usage == {"input_tokens": 50, "output_tokens": 2}


def test_omitted_thinking_travels_in_its_signature(qwen: RenderersFamily) -> None:
    body = {"messages": [USER], "thinking": {"type": "adaptive", "display": "omitted"}, "stream": True}
    played = play(MESSAGES, body, qwen, Reply([*think("hm"), *text("so"), *END]))
    assert all(event.get("delta", {}).get("type") != "thinking_delta" for event in played.events)
    for message in (played.whole, assembled(played.events)):
        assert message["content"][0]["thinking"] == ""
        assert "hm" not in json.dumps(message)
        assert MESSAGES.messages([message]) == [played.outcome.message]


@pytest.mark.parametrize("arguments", ['{"a": 1.0, "c": "\\u00e9\\n"}', "{}", "", "[1]", '"x"', "{broken", "NaN"])
def test_any_arguments_reach_the_client_as_an_object_and_come_back_as_they_were(arguments: str) -> None:
    """What is no object stands under a key that no tool knows."""
    said = Message(role="assistant", tool_calls=(ToolCall("t", "run", arguments),))
    outcome = said_outcome(said)
    wish = wish_of(MESSAGES, {})
    whole = MESSAGES.reply(wish, [outcome], names(MESSAGES), None)  # type: ignore[arg-type]  # not used here
    writer = MESSAGES.stream(wish, names(MESSAGES), None)  # type: ignore[arg-type]  # not used here
    stream = writer.start() + writer.delta(TurnDelta(call=said.tool_calls[0])) + writer.end([outcome])
    for message in (json.loads(whole), assembled(events_of(stream))):
        assert isinstance(message["content"][0]["input"], dict)
        (back,) = MESSAGES.messages([message])
        assert message_key(back) == message_key(said)


def test_digits_of_arguments_stay_as_they_were_sampled() -> None:
    """No reader here turns them into a float on the way."""
    said = Message(role="assistant", tool_calls=(ToolCall("t", "run", '{"b": 12345678901234567890123}'),))
    whole = MESSAGES.reply(wish_of(MESSAGES, {}), [said_outcome(said)], names(MESSAGES), None)  # type: ignore[arg-type]
    assert b'"input":{"b": 12345678901234567890123}' in whole


def test_a_broken_stream_shows_an_error_and_no_end() -> None:
    """Report C7."""
    writer = MESSAGES.stream(wish_of(MESSAGES, {}), names(MESSAGES), None)  # type: ignore[arg-type]  # not used here
    events = events_of(writer.start() + writer.delta(TurnDelta(content="a")) + writer.error(EngineLost("gone")))
    assert [event["type"] for event in events][-1] == "error"
    assert not {"message_delta", "message_stop"} & {event["type"] for event in events}
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "gone", "code": "engine_lost"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("x", param="tools"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (NotFound("x"), "not_found_error"),
        (CapacityExceeded("x"), "rate_limit_error"),
        (Conflict("x"), "invalid_request_error"),
        (NoEngine("x"), "overloaded_error"),
        (UpstreamError("x"), "api_error"),
        (JournalError("x"), "api_error"),
        (RequestAborted("x"), "api_error"),
        (TollwayError("x"), "api_error"),
    ],
)
def test_errors_have_the_types_that_sdks_know(error: TollwayError, kind: str) -> None:
    value = json.loads(MESSAGES.error(error))
    assert (value["type"], value["error"]["type"], value["error"]["code"]) == ("error", kind, error.code)


def test_an_overlong_prompt_is_told_in_the_words_that_claude_code_reads() -> None:
    message = json.loads(MESSAGES.error(ContextLengthExceeded(40, 32)))["error"]["message"]
    assert message == "prompt is too long: 40 tokens > 32 maximum"


def test_counting_reads_the_same_request() -> None:
    assert MESSAGES.wish({"model": "m"}).max_new_tokens is None
    assert json.loads(count_reply(7)) == {"input_tokens": 7}


def said_outcome(message: Message) -> TurnOutcome:
    """The outcome of a message that no ids stand behind."""
    reason = "tool_calls" if message.tool_calls else "stop"
    return TurnOutcome(number=0, message=message, finish_reason=reason, record=record_of(Reply(END)))


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream says, read as strictly as the format is told."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    open_block: dict[str, Any] | None = None
    partial = ""
    allowed = {
        "text": {"text_delta"},
        "thinking": {"thinking_delta", "signature_delta"},
        "tool_use": {"input_json_delta"},
    }
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(message["content"])
            open_block, partial = event["content_block"], ""
            continue
        assert open_block is not None
        assert event["index"] == len(message["content"])
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            assert delta["type"] in allowed[open_block["type"]]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                open_block[field] += delta[field]
        else:
            assert event["type"] == "content_block_stop"
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(partial)
            message["content"].append(open_block)
            open_block = None
    assert open_block is None
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    message["tollway"] = message.get("tollway", {}) | events[-2]["tollway"]
    return message
