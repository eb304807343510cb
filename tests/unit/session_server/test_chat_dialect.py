"""Chat Completions: what is read, what is written, what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from dialect_helpers import END, ID, USER, Reply, call, events_of, names, play, text, wish_of
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tollway.errors import BadRequest, ContextLengthExceeded, EngineLost
from tollway.messages import Message, ToolCall
from tollway.session_server.bodies import Body
from tollway.session_server.bodies import read as read_body
from tollway.session_server.dialects.chat import CHAT
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.request import ToolChoice, TurnDelta


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


ADD, MUL = function("add"), function("mul")


def read(*messages: dict[str, Any]) -> list[Message]:
    return CHAT.messages(messages)


def sdk(content: bytes) -> openai.OpenAI:
    """The real SDK, answered with ``content``."""
    kind = "text/event-stream" if content.startswith(b"data:") else "application/json"
    answer = httpx.MockTransport(lambda _: httpx.Response(200, content=content, headers={"content-type": kind}))
    return openai.OpenAI(
        api_key="k", base_url="http://server/v1", max_retries=0, http_client=httpx.Client(transport=answer)
    )


# -- messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [None, "", [], [{"type": "text", "text": ""}], "absent"], ids=["null", "empty", "list", "part", "absent"]
)
def test_no_content_beside_calls_is_one_form(content: Any) -> None:
    """Reports A5, B2, B3: history with calls and no text reads alike however it says so."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    raw = {"role": "assistant", "tool_calls": calls, **({} if content == "absent" else {"content": content})}
    assert read(raw) == [Message(role="assistant", tool_calls=(ToolCall("c", "f", "{}"),))]


def test_one_part_is_its_text_and_parts_follow_each_other() -> None:
    parts = [{"type": "text", "text": "S"}]
    assert read({"role": "system", "content": parts}) == read({"role": "system", "content": "S"})
    two = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert read({"role": "assistant", "content": two})[0].content == "ab"


def test_white_space_of_content_is_kept() -> None:
    """Report A6."""
    assert read({"role": "assistant", "content": "done \n"})[0].content == "done \n"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_media_parts_are_refused_and_the_answer_says_why(kind: str) -> None:
    with pytest.raises(BadRequest, match="takes text only") as caught:
        read(USER, {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]})
    assert "messages[1]" in str(caught.value)
    assert kind in str(caught.value)


@pytest.mark.parametrize("role", ["developer", "system", "user", "tool", "assistant"])
def test_every_role_may_stand_anywhere(role: str) -> None:
    """Reports A7 and B1: nothing is dropped, wherever it is."""
    found = read(USER, {"role": "assistant", "content": "x"}, {"role": role, "content": "BANANA"}, USER)
    assert [message.role for message in found] == ["user", "assistant", role, "user"]
    assert found[2].content == "BANANA"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_under_both_names(field: str) -> None:
    """Report B15."""
    assert read({"role": "assistant", "content": "x", field: "r"})[0].reasoning == "r"
    assert read({"role": "user", "content": "x", field: "r"})[0].reasoning is None


def test_arguments_stay_the_text_that_was_sent() -> None:
    def arguments(value: object) -> str:
        raw = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": value}}]}
        return read(raw)[0].tool_calls[0].arguments

    assert arguments('{"b":1, "a":  1.0') == '{"b":1, "a":  1.0', "not even JSON, and still as it is"
    assert arguments({"b": 1.0, "a": True}) == '{"b":1.0,"a":true}'
    assert arguments(None) == ""


@pytest.mark.parametrize(
    "message",
    [
        "x",
        None,
        {},
        {"role": "alien", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": [["x"]]},
        {"role": "user", "content": [{"type": ["text"], "text": "x"}]},
        {"role": "user", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": {"a": 1}},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "function_call": {"name": "f"}},
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": 3}}]},
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        CHAT.messages([USER, message], first=7)
    assert "messages[8]" in str(caught.value) or caught.value.param == "input"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nul", b'{"messages":', b"\xff", b'"x"', b"[" * 5000, b'{"a":"\\ud800"}']
)
def test_a_body_that_is_no_clean_json_object_is_refused(body: bytes) -> None:
    """The last one is a lone surrogate (A-row 30)."""
    with pytest.raises(BadRequest):
        read_body(Body([body]), CHAT)


# -- wishes -----------------------------------------------------------------------------------------


def test_every_field_that_can_be_honoured_is_read() -> None:
    wish = CHAT.wish(
        {
            "model": "m",
            "tools": [ADD],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 3,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 0,
            "min_p": 0.1,
            "frequency_penalty": -2,
            "presence_penalty": 2,
            "repetition_penalty": 1.1,
            "logit_bias": {"0151": -100, "5": 1.5},
            "max_completion_tokens": 9,
            "max_tokens": 99,
            "seed": 7,
            "stop": "x",
            "logprobs": True,
            "top_logprobs": 4,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert (wish.model, wish.stream, wish.choices, wish.seed, wish.stop) == ("m", True, 3, 7, ("x",))
    assert (wish.temperature, wish.top_p, wish.top_k, wish.min_p) == (0.0, 0.5, -1, 0.1)
    assert (wish.frequency_penalty, wish.presence_penalty, wish.repetition_penalty) == (-2.0, 2.0, 1.1)
    assert wish.logit_bias == {"151": -100.0, "5": 1.5}
    assert (wish.max_new_tokens, wish.logprobs, wish.top_logprobs) == (9, True, 4)
    assert (wish.tool_choice, wish.parallel_tool_calls) == (ToolChoice("required"), False)
    assert wish.options.thinking is False
    assert [tool.name for tool in wish.tools] == ["add"]


def test_tools_keep_the_key_order_of_their_schemas() -> None:
    schema = {"type": "object", "required": [], "properties": {"z": {}, "a": {"default": 1.0}}}
    (tool,) = CHAT.wish(
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]}
    ).tools
    assert tool.parameters == '{"type":"object","required":[],"properties":{"z":{},"a":{"default":1.0}}}'
    assert tool.strict is True


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "mul"}}, ToolChoice("named", "mul")),
    ],
)
def test_tool_choices(choice: Any, expected: ToolChoice) -> None:
    assert CHAT.wish({"tools": [ADD, MUL], "tool_choice": choice}).tool_choice == expected


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array"}}}, '{"type":"array"}'),
    ],
)
def test_response_formats(form: Any, schema: str | None) -> None:
    assert CHAT.wish({"response_format": form}).schema == schema


def test_single_calls_without_tools_are_no_wish() -> None:
    assert CHAT.wish({"parallel_tool_calls": False}).parallel_tool_calls


@pytest.mark.parametrize("effort", ["none", "low", "high", None])
def test_an_effort_of_none_turns_thinking_off(effort: str | None) -> None:
    assert CHAT.wish({"reasoning_effort": effort}).options.thinking is (False if effort == "none" else None)
    switched = CHAT.wish({"reasoning_effort": effort, "chat_template_kwargs": {"enable_thinking": True}})
    assert switched.options.thinking is True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("tool_choice", {"type": "function", "function": {"name": "nope"}}),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", {"type": "allowed_tools"}),
        ("tool_choice", "some"),
        ("tool_choice", 5),
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": "x"}}),
        ("response_format", "json"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", [5]),
        ("frequency_penalty", 2.5),
        ("presence_penalty", "x"),
        ("repetition_penalty", 0),
        ("min_p", 1.5),
        ("parallel_tool_calls", "no"),
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_completion_tokens", 1.5),
        ("stop", [""]),
        ("stop", ["x"] * 33),
        ("stop", 5),
        ("stream", "yes"),
        ("stream_options", 5),
        ("top_logprobs", 3),
        ("seed", 2**64),
        ("model", 5),
        ("tools", {"a": 1}),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tools", [{"type": "web_search"}]),
        ("tools", [ADD, ADD]),
        ("chat_template_kwargs", {"foo": 1}),
        ("modalities", ["audio"]),
        ("functions", [{"name": "f"}]),
        ("web_search_options", {"a": 1}),
        ("guided_json", {"type": "object"}),
        ("stop_token_ids", [5]),
        ("ignore_eos", True),
        ("continue_final_message", True),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    body = {"logprobs": False, "stream": True, "tools": [ADD], field: value}
    with pytest.raises(BadRequest) as caught:
        CHAT.wish(body)
    assert field.rstrip("s") in str(caught.value) + str(caught.value.param)
    assert len(str(caught.value)) < 400


def test_unknown_fields_and_empty_wishes_are_ignored() -> None:
    """Report B14."""
    plain = CHAT.wish({})
    extra = {"y_bar": 2, "service_tier": "auto", "store": True, "logit_bias": {}, "functions": [], "user": "u"}
    assert CHAT.wish({**extra, "metadata": {"a": "b"}, "verbosity": "low", "prediction": {"type": "content"}}) == plain


# -- replies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_parallel_calls_have_their_own_index_and_say_their_id_once(
    qwen: RenderersFamily, chunk: int, choice: Any
) -> None:
    """Reports B5 and B6."""
    ids = [*call("add", '{"a": 3, "b": 12}'), *text("\n"), *call("mul", '{"a": 11, "b": 49}'), *END]
    body = {"messages": [USER], "tools": [ADD, MUL], "tool_choice": choice, "stream": True}
    played = play(CHAT, body, qwen, Reply(ids), chunk=chunk)
    calls: dict[int, dict[str, str]] = {}
    for event in played.events[:-1]:
        ChatCompletionChunk.model_validate(event)
        for piece in event["choices"][0]["delta"].get("tool_calls", []):
            entry = calls.setdefault(piece["index"], {"arguments": ""})
            assert "id" not in piece or "id" not in entry, "an id comes once"
            entry |= {"id": piece["id"]} if "id" in piece else {}
            entry["arguments"] += piece["function"]["arguments"]
    assert sorted(calls) == [0, 1]
    assert [json.loads(calls[at]["arguments"]) for at in (0, 1)] == [{"a": 3, "b": 12}, {"a": 11, "b": 49}]
    assert len({entry["id"] for entry in calls.values()}) == 2
    finish = [event["choices"][0]["finish_reason"] for event in played.events[:-1] if event["choices"]]
    assert [reason for reason in finish if reason] == ["tool_calls"] == [played.whole["choices"][0]["finish_reason"]]


def test_the_sdk_reads_both_forms_alike(qwen: RenderersFamily) -> None:
    ids = [ID["<think>"], *text("\nhm\n"), ID["</think>"], *text("\n\nso"), *call("add", "{}"), *END]
    body = {
        "model": "m",
        "messages": [USER],
        "tools": [ADD],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
    }
    played = play(CHAT, body, qwen, Reply(ids, top=3))
    whole = ChatCompletion.model_validate(played.whole)
    with sdk(played.stream).chat.completions.stream(model="m", messages=[]) as stream:
        final = stream.get_final_completion()
    one, other = whole.choices[0], final.choices[0]
    assert (one.message.content, one.finish_reason) == (other.message.content, other.finish_reason)
    assert one.message.tool_calls
    assert other.message.tool_calls
    assert one.message.tool_calls[0].id == other.message.tool_calls[0].id
    assert whole.usage == final.usage
    assert one.logprobs
    assert other.logprobs
    assert one.logprobs.content == other.logprobs.content
    assert len(one.logprobs.content or []) == len(ids)
    assert [len(entry.top_logprobs) for entry in one.logprobs.content or []] == [2] * len(ids)
    assert played.whole["choices"][0]["message"]["reasoning_content"] == "hm"


def test_several_choices_are_told_apart(qwen: RenderersFamily) -> None:
    replies = [Reply([*text("one"), *END]), Reply(text("two"), finish="length", cached=50)]
    body = {"messages": [USER], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    played = play(CHAT, body, qwen, *replies)
    found = {0: "", 1: ""}
    reasons: list[tuple[int, str]] = []
    for event in played.events[:-2]:
        ChatCompletionChunk.model_validate(event)
        (choice,) = event["choices"]
        found[choice["index"]] += choice["delta"].get("content") or ""
        reasons += [(choice["index"], choice["finish_reason"])] if choice["finish_reason"] else []
    assert found == {0: "one", 1: "two"}
    assert reasons == [(0, "stop"), (1, "length")]
    assert [choice["message"]["content"] for choice in played.whole["choices"]] == ["one", "two"]
    usage = played.events[-2]["usage"]
    assert usage == played.whole["usage"]
    sampled = sum(len(reply.ids) for reply in replies)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (50, sampled)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 20, "the other choice read what this one cached"


def test_usage_is_streamed_only_when_asked_and_then_alone(qwen: RenderersFamily) -> None:
    """Report B7."""
    silent = play(CHAT, {"messages": [USER], "stream": True}, qwen, Reply([*text("x"), *END]))
    assert all(event["choices"] and "usage" not in event for event in silent.events[:-1])
    body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    told = play(CHAT, body, qwen, Reply([*text("x"), *END]))
    assert told.events[-2]["choices"] == []
    assert told.events[-1] == "[DONE]"


def test_unknown_is_not_zero(qwen: RenderersFamily) -> None:
    """Report J6: an engine that does not tell what it cached."""
    played = play(CHAT, {"messages": [USER]}, qwen, Reply([*text("x"), *END], cached=None))
    assert "prompt_tokens_details" not in played.whole["usage"]


def test_an_empty_reply_has_empty_content_and_a_call_has_none(qwen: RenderersFamily) -> None:
    empty = play(CHAT, {"messages": [USER]}, qwen, Reply(END)).whole["choices"][0]["message"]
    assert empty == {"role": "assistant", "content": ""}
    body = {"messages": [USER], "tools": [ADD]}
    called = play(CHAT, body, qwen, Reply([*call("add", "{}"), *END])).whole["choices"][0]["message"]
    assert called["content"] is None


def test_a_broken_stream_shows_an_error_and_no_end() -> None:
    """Report C7."""
    writer = CHAT.stream(wish_of(CHAT, {"stream": True}), names(CHAT), None)  # type: ignore[arg-type]  # not used here
    stream = writer.start() + writer.delta(TurnDelta(content="a")) + writer.error(EngineLost("the engine is gone"))
    events = events_of(stream)
    assert b"[DONE]" not in stream
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert events[-1]["error"]["code"] == "engine_lost"
    with pytest.raises(openai.APIError, match="gone"):
        list(sdk(stream).chat.completions.create(model="m", messages=[], stream=True))


def test_errors_have_the_form_that_sdks_read() -> None:
    error = json.loads(CHAT.error(ContextLengthExceeded(40, 32)))["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")


# -- free-text tools --------------------------------------------------------------------------------


def test_a_free_text_tool_is_offered_as_a_function_and_called_back_as_itself(qwen: RenderersFamily) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x+/"}}
    tool = {"type": "custom", "custom": {"name": "patch", "description": "d", "format": grammar}}
    body = {"messages": [USER], "tools": [tool, ADD]}
    played = play(CHAT, body, qwen, Reply([*call("patch", '{"input": "xx\\n"}'), *END]))
    schema = json.loads(played.wish.tools[0].parameters)
    assert "start: /x+/" in schema["properties"]["input"]["description"]
    message = played.whole["choices"][0]["message"]
    ChatCompletion.model_validate(played.whole)
    assert message["tool_calls"] == [{"id": "call_0", "type": "custom", "custom": {"name": "patch", "input": "xx\n"}}]
    (back,) = CHAT.messages([message])
    assert json.loads(back.tool_calls[0].arguments) == {"input": "xx\n"}


def test_arguments_that_are_no_free_text_go_out_whole(qwen: RenderersFamily) -> None:
    tool = {"type": "custom", "custom": {"name": "patch"}}
    played = play(
        CHAT, {"messages": [USER], "tools": [tool]}, qwen, Reply([*call("patch", '{"input": 3, "b": 1}'), *END])
    )
    (made,) = played.whole["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["custom"]["input"]) == {"input": 3, "b": 1}
