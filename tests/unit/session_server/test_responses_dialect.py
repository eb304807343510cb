"""OpenAI Responses: items, tools of every kind, whole and streamed replies, compaction."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from dialect_helpers import END, ID, USER, Reply, call, events_of, names, play, text, think, wish_of
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tollway.errors import BadRequest, ContextLengthExceeded, EngineLost
from tollway.messages import Message, ToolCall
from tollway.session_server.bodies import Body, read
from tollway.session_server.dialects.chat import CHAT
from tollway.session_server.dialects.messages import MESSAGES
from tollway.session_server.dialects.responses import RESPONSES
from tollway.session_server.dialects.sealed import seal
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.request import ToolChoice, TurnDelta

RUN = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}, "strict": False}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [
        {"type": "function", "name": "wait", "description": "Wait.", "parameters": {"type": "object"}},
        {"type": "function", "name": "run", "parameters": {"type": "object"}},
    ],
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}
SEARCH = {"type": "web_search", "external_web_access": True}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def sdk(content: bytes) -> openai.OpenAI:
    """The real SDK, answered with ``content``."""
    answer = httpx.MockTransport(
        lambda _: httpx.Response(200, content=content, headers={"content-type": "text/event-stream"})
    )
    return openai.OpenAI(
        api_key="k", base_url="http://server/v1", max_retries=0, http_client=httpx.Client(transport=answer)
    )


# -- items ------------------------------------------------------------------------------------------


def test_input_may_be_one_text() -> None:
    reading = read(Body([b'{"input": "hi"}']), RESPONSES)
    assert RESPONSES.messages(reading.items) == [Message(role="user", content="hi")]


def test_a_text_is_no_item_of_a_list_and_no_conversation_of_the_other_dialects() -> None:
    with pytest.raises(BadRequest, match=r"input\[1\] must be an object, got str"):
        RESPONSES.messages([{"role": "user", "content": "hi"}, "NaN"])
    for dialect in (CHAT, MESSAGES):
        with pytest.raises(BadRequest, match="messages must be a non-empty list, got a text"):
            read(Body([b'{"messages": "hi", "max_tokens": 5}']), dialect)


def test_message_items_with_and_without_a_type() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"type": "message", "role": "developer", "content": parts, "id": "msg_1"},
        {"role": "system", "content": "late"},
        {"type": "message", "role": "user", "content": "go"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "y"}]},
    ]
    assert RESPONSES.messages(items) == [
        Message(role="developer", content="ab"),
        Message(role="system", content="late"),
        Message(role="user", content="go"),
        Message(role="assistant", content="xy"),
    ]


def test_what_the_model_said_in_one_turn_is_one_message() -> None:
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}], "phase": "x"},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "xx"},
        {"type": "function_call_output", "call_id": "c1", "output": "8"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "9"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "then"}]},
    ]
    calls = (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "patch", '{"input":"xx"}'))
    assert RESPONSES.messages(items) == [
        Message(role="user", content="go"),
        Message(role="assistant", content="so", reasoning="why", tool_calls=calls),
        Message(role="tool", content="8", tool_call_id="c1"),
        Message(role="tool", content="9", tool_call_id="c2"),
        Message(role="assistant", reasoning="then"),
    ]
    assert [RESPONSES.closed_after(item) for item in items] == [True, *[False] * 4, True, True, False]


@pytest.mark.parametrize(
    ("item", "reasoning"),
    [
        ({"summary": [], "encrypted_content": seal("why")}, "why"),
        ({"summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": seal("why")}, "why"),
        ({"summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAAAforeign"}, "s"),
        (
            {"summary": [{"type": "summary_text", "text": "s"}], "content": [{"type": "reasoning_text", "text": "c"}]},
            "c",
        ),
        ({"summary": [], "encrypted_content": "gAAAAforeign"}, None),
        ({"summary": [], "encrypted_content": "tw1.%%%"}, None),
        ({}, None),
    ],
)
def test_reasoning_survives_in_whatever_form_it_is_sent_back(item: dict[str, Any], reasoning: str | None) -> None:
    (message,) = RESPONSES.messages([{"type": "reasoning", **item}])
    assert message.reasoning == reasoning


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "previous_response_id"),
        ({"id": "msg_1"}, "previous_response_id"),
        ({"type": "web_search_call", "id": "ws"}, "web_search_call"),
        ({"type": "local_shell_call"}, "local_shell_call"),
        ({"type": "compaction", "encrypted_content": "gAAAAforeign"}, "compaction"),
        ({"type": ["message"]}, "message"),
        ({"role": "tool", "content": "x"}, "tool"),
        ({"type": "message", "content": "x"}, "unknown role"),
        ({"type": "function_call", "name": "f"}, "call_id"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "takes text only"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "takes text only"),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}, "takes text only"),
        (5, "int"),
        (None, "NoneType"),
    ],
)
def test_items_that_cannot_be_read_are_refused_by_name(item: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=r"input\[4\]") as caught:
        RESPONSES.messages([USER, item], first=3)
    assert said in str(caught.value)


# -- wishes -----------------------------------------------------------------------------------------


def test_every_field_that_can_be_honoured_is_read() -> None:
    wish = RESPONSES.wish(
        {
            "model": "m",
            "instructions": "Be brief.",
            "max_output_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_logprobs": 3,
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "parallel_tool_calls": False,
            "tools": [RUN],
            "tool_choice": {"type": "function", "name": "run"},
            "previous_response_id": "resp_1",
            "store": False,
            "stream": True,
            "truncation": "disabled",
            "background": False,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "array"}}, "verbosity": "low"},
            "reasoning": {"effort": "none", "summary": "auto"},
        }
    )
    assert wish.lead == (Message(role="system", content="Be brief."),)
    assert (wish.max_new_tokens, wish.temperature, wish.top_p, wish.top_logprobs) == (9, 0.5, 0.9, 3)
    assert (wish.logprobs, wish.parallel_tool_calls, wish.stream) == (True, False, True)
    assert wish.tool_choice == ToolChoice("named", "run")
    assert (wish.previous, wish.store) == ("resp_1", False)
    assert wish.schema == '{"type":"array"}'
    assert wish.options.thinking is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncation", "auto"),
        ("background", True),
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("context_management", [{"type": "compaction"}]),
        ("tool_choice", {"type": "function", "name": "nope"}),
        ("tool_choice", {"type": "web_search"}),
        ("tool_choice", {"type": "allowed_tools", "tools": []}),
        ("tools", [{"type": "local_shell"}]),
        ("tools", [{"type": "apply_patch"}]),
        ("tools", [{"type": "strange"}]),
        ("tools", ["run"]),
        ("tools", [{"name": "run"}]),
        ("tools", [RUN, RUN]),
        ("tools", [{"type": "namespace", "name": "n"}]),
        ("tools", [{"type": "namespace", "name": "n", "tools": [SEARCH]}]),
        ("tools", [AGENTS, {"type": "function", "name": "agents__run"}]),
        ("tools", [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]),
        ("text", {"format": {"type": "json_schema", "name": "s"}}),
        ("text", "json"),
        ("reasoning", "high"),
        ("include", [""]),
        ("metadata", []),
        ("instructions", ["x"]),
        ("max_output_tokens", 0),
        ("top_logprobs", 21),
        ("previous_response_id", 5),
        ("store", "no"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        RESPONSES.wish({"tools": [RUN], field: value})
    assert field.rstrip("s") in str(caught.value) + str(caught.value.param)


# -- tools ------------------------------------------------------------------------------------------


def test_hosted_tools_are_not_shown_and_the_reply_says_so(qwen: RenderersFamily) -> None:
    body = {"input": [USER], "tools": [RUN, SEARCH, {"type": "file_search"}], "stream": True}
    played = play(RESPONSES, body, qwen, Reply([*text("x"), *END]))
    assert [tool.name for tool in played.wish.tools] == ["run"]
    for response in (played.whole, played.events[0]["response"], played.events[-1]["response"]):
        assert [tool["type"] for tool in response["tools"]] == ["function"]
        assert response["tollway"]["left_out_tools"] == ["web_search", "file_search"]
    assert "weight_versions" not in played.events[0]["response"]["tollway"], "nothing is sampled yet"
    for response in (played.whole, played.events[-1]["response"]):
        assert response["tollway"]["weight_versions"] == {"start": 0, "end": 0}


def test_a_namespaced_call_goes_back_under_namespace_and_own_name(qwen: RenderersFamily) -> None:
    """As Codex wants it: a flat name is an unknown tool to it."""
    body = {"input": [USER], "tools": [RUN, AGENTS], "stream": True}
    played = play(RESPONSES, body, qwen, Reply([*call("agents__run", '{"a": 1}'), *call("run"), *END]))
    assert [tool.name for tool in played.wish.tools] == ["run", "agents__wait", "agents__run"]
    assert played.wish.tools[1].description == "[About all tools of agents: Sub-agents.]\nWait."
    assert played.wish.tools[2].description == "", "the namespace is told once"
    first, second = played.whole["output"]
    assert (first["namespace"], first["name"], first["arguments"]) == ("agents", "run", '{"a": 1}')
    assert (second["name"], "namespace" in second) == ("run", False)
    done = [event["item"] for event in played.events if event["type"] == "response.output_item.done"]
    assert done == [first, second]
    assert RESPONSES.messages(played.whole["output"]) == [played.outcome.message]


def test_a_free_text_tool_is_called_back_as_itself(qwen: RenderersFamily) -> None:
    body = {"input": [USER], "tools": [PATCH], "tool_choice": {"type": "custom", "name": "patch"}, "stream": True}
    played = play(RESPONSES, body, qwen, Reply([*call("patch", '{"input": "xx\\n"}'), *END]))
    (item,) = played.whole["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "xx\n")
    (spec,) = played.wish.tools
    assert "start: /x+/" in json.loads(spec.parameters)["properties"]["input"]["description"]
    kinds = [event["type"] for event in played.events]
    assert "response.custom_tool_call_input.delta" in kinds
    assert "response.function_call_arguments.delta" not in kinds
    (back,) = RESPONSES.messages([item])
    assert json.loads(back.tool_calls[0].arguments) == {"input": "xx\n"}


# -- replies ----------------------------------------------------------------------------------------

REPLIES = {
    "plain": Reply([*text("hello"), *END]),
    "everything": Reply([*think("hm"), *text("so"), *call("run", '{"a": 3}'), *call("run"), *END], top=3),
    "calls-only": Reply([*call("run"), *END]),
    "cut-text": Reply([*think("hm"), *text("so")], finish="length"),
    "cut-thinking": Reply([ID["<think>"], *text("\nhm")], finish="length"),
    "empty": Reply(END),
}
WISHES: dict[str, dict[str, Any]] = {
    "bare": {},
    "summary": {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"}},
}


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("more", WISHES)
def test_a_stream_is_well_formed_and_ends_as_the_whole_reply(
    qwen: RenderersFamily, more: str, reply: str, chunk: int
) -> None:
    """Every event is one of the SDK's own types; brackets close; numbers rise; text adds up."""
    body = {"model": "m", "input": [USER], "tools": [RUN], "stream": True, **WISHES[more]}
    played = play(RESPONSES, body, qwen, REPLIES[reply], chunk=chunk)
    Response.model_validate(played.whole)
    assert [event["sequence_number"] for event in played.events] == list(range(len(played.events)))
    assert [event["type"] for event in played.events[:2]] == ["response.created", "response.in_progress"]
    for event in played.events:
        EVENT.validate_python(event)
    _check_brackets(played.events)
    last = played.events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"] == played.whole
    done = [event["item"] for event in played.events if event["type"] == "response.output_item.done"]
    assert [_without_logprobs(item) for item in done] == [_without_logprobs(item) for item in played.whole["output"]]


def test_the_sdk_reads_the_stream_into_the_whole_reply(qwen: RenderersFamily) -> None:
    body = {"model": "m", "input": [USER], "tools": [RUN], "stream": True}
    played = play(RESPONSES, body, qwen, REPLIES["everything"])
    with sdk(played.stream).responses.stream(model="m", input="go") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    assert final.output_text == "so"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.usage == Response.model_validate(played.whole).usage


def test_a_cut_reply_is_incomplete_and_says_why(qwen: RenderersFamily) -> None:
    played = play(RESPONSES, {"input": [USER]}, qwen, REPLIES["cut-text"])
    assert played.whole["status"] == "incomplete"
    assert played.whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in played.whole["output"]] == ["completed", "incomplete"]


def test_usage_has_its_details_and_unknown_is_not_zero(qwen: RenderersFamily) -> None:
    ids = [*think("hm hm"), *text("so"), *END]
    usage = play(RESPONSES, {"input": [USER]}, qwen, Reply(ids)).whole["usage"]
    thought = len([ID["<think>"], *text("\nhm hm")])
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (50, len(ids), 50 + len(ids))
    assert usage["input_tokens_details"]["cached_tokens"] == 20
    assert usage["output_tokens_details"] == {"reasoning_tokens": thought}
    unknown = play(RESPONSES, {"input": [USER]}, qwen, Reply(ids, cached=None)).whole["usage"]
    assert "input_tokens_details" not in unknown
    cut = play(RESPONSES, {"input": [USER]}, qwen, REPLIES["cut-thinking"]).whole
    assert cut["usage"]["output_tokens_details"]["reasoning_tokens"] == len(REPLIES["cut-thinking"].ids)
    assert [item["type"] for item in cut["output"]] == ["reasoning"]


def test_the_response_repeats_what_it_was_asked(qwen: RenderersFamily) -> None:
    body = {
        "model": "m",
        "input": [USER],
        "instructions": "Be.",
        "metadata": {"a": "b"},
        "previous_response_id": "resp_0",
        "store": False,
        "tool_choice": "required",
        "tools": [RUN],
        "text": {"format": {"type": "json_object"}},
    }
    whole = play(RESPONSES, body, qwen, Reply([*call("run"), *END])).whole
    for field in ("model", "instructions", "metadata", "previous_response_id", "store", "tool_choice", "text"):
        assert whole[field] == body[field]
    assert whole["tools"] == [RUN]
    assert whole["temperature"] == 0.5, "what the engine really used"


def test_reasoning_can_be_carried_by_a_client_that_keeps_items_only(qwen: RenderersFamily) -> None:
    body = {"input": [USER], "tools": [RUN], **WISHES["summary"]}
    played = play(RESPONSES, body, qwen, REPLIES["everything"])
    item = played.whole["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in item
    assert RESPONSES.messages(played.whole["output"]) == [played.outcome.message]
    assert RESPONSES.messages([{**item, "summary": []}])[0].reasoning == "hm"


def test_logprobs_are_there_when_asked_and_text_was_written(qwen: RenderersFamily) -> None:
    body = {"input": [USER], "tools": [RUN], **WISHES["logprobs"]}
    played = play(RESPONSES, body, qwen, REPLIES["everything"])
    (part,) = played.whole["output"][1]["content"]
    assert len(part["logprobs"]) == len(REPLIES["everything"].ids)
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    bare = play(RESPONSES, {"input": [USER], "tools": [RUN]}, qwen, REPLIES["everything"])
    assert bare.whole["output"][1]["content"][0]["logprobs"] == []


def test_a_broken_stream_fails_and_has_no_end() -> None:
    """Report C7."""
    writer = RESPONSES.stream(wish_of(RESPONSES, {}), names(RESPONSES), None)  # type: ignore[arg-type]  # not used here
    stream = writer.start() + writer.delta(TurnDelta(content="a")) + writer.error(EngineLost("the engine is gone"))
    events = events_of(stream)
    kinds = [event["type"] for event in events]
    assert kinds[-2:] == ["response.failed", "error"]
    assert "response.completed" not in kinds
    assert events[-2]["response"]["error"] == {"code": "server_error", "message": "the engine is gone"}
    for event in events:
        EVENT.validate_python(event)
    with pytest.raises(openai.APIError, match="gone"):
        list(sdk(stream).responses.create(model="m", input="go", stream=True))


def test_an_overlong_prompt_names_the_list_of_this_dialect() -> None:
    error = json.loads(RESPONSES.error(ContextLengthExceeded(40, 32)))["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert json.loads(RESPONSES.error(BadRequest("x", param="tools")))["error"]["param"] == "tools"


# -- compaction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger_is_answered_with_exactly_one_compaction_item(qwen: RenderersFamily, stream: bool) -> None:
    """Environment report 18: what Codex sends and expects, and what it sends afterwards."""
    history = [USER, {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}"}]
    body = {
        "input": [*history, {"type": "compaction_trigger"}],
        "tools": [RUN],
        "tool_choice": "required",
        "stream": stream,
    }
    assert not RESPONSES.closed_after(body["input"][-1])
    asked = RESPONSES.messages(body["input"])
    assert [message.role for message in asked] == ["user", "assistant", "user"]
    played = play(RESPONSES, body, qwen, Reply([*think("hm"), *text("We ran it."), *END]))
    assert played.wish.tool_choice == ToolChoice("none")
    assert [tool.name for tool in played.wish.tools] == ["run"], "the prompt before it stays as it was"
    (item,) = played.whole["output"]
    assert item["type"] == "compaction"
    Response.model_validate(played.whole)
    if stream:
        for event in played.events:
            EVENT.validate_python(event)
        done = [event["item"] for event in played.events if event["type"] == "response.output_item.done"]
        assert done == [item]
    (summary,) = RESPONSES.messages([item])
    assert summary.role == "user"
    assert summary.content.endswith("We ran it.")


def test_a_trigger_comes_last() -> None:
    with pytest.raises(BadRequest, match=r"input\[1\].*last"):
        RESPONSES.messages([USER, {"type": "compaction_trigger"}, USER])


def test_only_a_trigger_changes_the_wish() -> None:
    wish = RESPONSES.wish({"tools": [RUN]})
    assert RESPONSES.settle(wish, USER) is wish


def _check_brackets(events: list[dict[str, Any]]) -> None:
    """added ... done around every item and part, one at a time, with rising indices and one text."""
    item: str | None = None
    part: tuple[str, str] | None = None
    index, pieces = -1, ""
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert item is None
            index += 1
            item = event["item"]["id"]
        elif kind == "output_item.done":
            assert part is None
            assert event["item"]["id"] == item
            item = None
        elif kind in ("content_part.added", "reasoning_summary_part.added"):
            assert part is None
            part, pieces = (kind.split(".")[0], event["part"]["type"]), ""
        elif kind in ("content_part.done", "reasoning_summary_part.done"):
            assert part == (kind.split(".")[0], event["part"]["type"])
            assert event["part"]["text"] == pieces
            part = None
        elif kind.endswith("_text.delta"):
            assert part is not None
            assert part[1] == kind.removesuffix(".delta").replace("reasoning_summary_text", "summary_text")
            pieces += event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == pieces
        if "item_id" in event:
            assert event["item_id"] == item
        assert event["output_index"] == index
    assert item is None


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
