"""The three dialects over HTTP on one turn path: continuation, choices, constraints, counting, retries."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
import vocabularies
from prometheus_client import generate_latest
from server_helpers import RUN, ask, call, ok, post, reasons, rows, say, sse, user

from tollway.records import VersionSpan
from tollway.router.fake import FakeReply
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer
from tollway.session_server.tokens import ControlTokenizer

TOKENIZER = ControlTokenizer(vocabularies.small(), name="small-qwen3")
IM_END = TOKENIZER.control["<|im_end|>"]
CALL_END = TOKENIZER.control["</tool_call>"]
ANTHROPIC_RUN = {"name": "run", "input_schema": {"type": "object", "properties": {}}}
RESPONSES_RUN = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}}


def text(words: str, *, end: bool = True) -> list[int]:
    return [*TOKENIZER.encode(words), *([IM_END] if end else [])]


CALL = text('<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>')


# -- responses --------------------------------------------------------------------------------------


async def test_a_named_reply_is_continued_from_the_new_items_alone(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(CALL, text("done"), text("bye"))
    session = await qwen_server.client.create()
    first = await ok(qwen_server, session, "responses", {"input": "go", "tools": [RESPONSES_RUN]})
    (called,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "ok"}
    body = {"input": [result], "tools": [RESPONSES_RUN], "previous_response_id": first["id"]}
    second = await ok(qwen_server, session, "responses", body)
    assert second["previous_response_id"] == first["id"]
    # The same conversation sent whole, as with store false, is the same path.
    whole = [{"role": "user", "content": "go"}, *first["output"], result, *second["output"], user("thanks")]
    await ok(qwen_server, session, "responses", {"input": whole, "tools": [RESPONSES_RUN], "store": False})
    assert reasons(qwen_server) == ["root", "continuation", "continuation"]
    (row,) = await rows(qwen_server, session)
    assert row.loss_mask.sum() == len(CALL) + len(text("done")) + len(text("bye"))


async def test_other_instructions_on_a_named_reply_open_a_branch_with_the_whole_conversation(
    qwen_server: FakeServer,
) -> None:
    qwen_server.engine.script = say(text("one"), text("two"))
    session = await qwen_server.client.create()
    first = await ok(qwen_server, session, "responses", {"input": "go", "instructions": "be brief"})
    await ok(qwen_server, session, "responses", {"input": "more", "previous_response_id": first["id"]})
    await ok(qwen_server, session, "responses", {"instructions": "be brief", "input": [user("go")]})
    prompts = [TOKENIZER.decode(request.input_ids) for request in qwen_server.engine.requests]
    assert "be brief" not in prompts[1]
    assert all(word in prompts[1] for word in ("go", "one", "more"))
    assert reasons(qwen_server) == ["root", "new_root", "sibling"]


async def test_items_that_an_earlier_body_had_in_front_are_said_again_behind_a_named_reply(server: FakeServer) -> None:
    """Each request of some harnesses begins with the same rules: they are a part of what is new."""
    session = await server.client.create()
    rules = {"role": "developer", "content": "RULES"}
    first = await ok(server, session, "responses", {"input": [rules, user("one")]})
    named = {"input": [rules, user("two")], "previous_response_id": first["id"]}
    await ok(server, session, "responses", named)
    prompt = bytes(token for token in server.engine.requests[1].input_ids if token < 256)
    assert prompt.count(b"RULES") == 2
    assert reasons(server) == ["root", "continuation"]


async def test_an_unknown_or_unstored_reply_cannot_be_named(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(text("one"))
    session, other = await qwen_server.client.create(), await qwen_server.client.create()
    stored = await ok(qwen_server, other, "responses", {"input": "go"})
    unstored = await ok(qwen_server, session, "responses", {"input": "go", "store": False})
    for name in ("resp_none", unstored["id"], stored["id"]):
        status, value = await call(qwen_server, session, "responses", {"input": "more", "previous_response_id": name})
        assert (status, value["error"]["param"]) == (400, "previous_response_id")


async def test_a_named_reply_survives_a_restart(tmp_path: Any, qwen: Any) -> None:
    async with FakeServer(tmp_path, family=qwen) as server:
        server.engine.script = say(text("one"))
        session = await server.client.create()
        first = await ok(server, session, "responses", {"input": "go"})
    async with FakeServer(tmp_path, family=qwen) as server:
        server.engine.script = say(text("two"))
        url = f"{server.url}/sessions/{session.session_id}/v1/responses"
        body = {"input": "more", "previous_response_id": first["id"]}
        async with server.http.post(url, json=body, headers={"x-api-key": session.token}) as response:
            assert response.status == 200
        assert reasons(server) == ["root", "continuation"]
        (row,) = await server.client.trajectories(session.session_id)
        assert row.token_ids.size == len(server.engine.requests[0].input_ids) + len(text("two"))


# -- messages ---------------------------------------------------------------------------------------


async def test_a_tool_loop_in_messages_is_one_path(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(CALL, text("done"))
    session = await qwen_server.client.create()
    asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "system": "be brief", "tools": [ANTHROPIC_RUN]}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]}
    ]
    first = await ok(qwen_server, session, "messages", {**asked, "messages": messages})
    assert first["stop_reason"] == "tool_use"
    (used,) = [part for part in first["content"] if part["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": [{"type": "text", "text": "ok"}]}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
    ]
    second = await ok(qwen_server, session, "messages", {**asked, "messages": messages})
    assert (second["stop_reason"], second["content"][-1]["text"]) == ("end_turn", "done")
    assert reasons(qwen_server) == ["root", "continuation"]
    assert len(await rows(qwen_server, session)) == 1


async def test_counting_says_what_would_be_sent_and_calls_no_engine(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(text("one"))
    session = await qwen_server.client.create()
    body = {"model": "m", "messages": [user("go")], "tools": [ANTHROPIC_RUN]}
    counted = await ok(qwen_server, session, "messages/count_tokens", body)
    assert qwen_server.engine.requests == []
    await ok(qwen_server, session, "messages", {**body, "max_tokens": 10})
    assert counted == {"input_tokens": len(qwen_server.engine.requests[0].input_ids)}
    longer = {**body, "messages": [user("go"), {"role": "assistant", "content": "one"}, user("on")]}
    counted = await ok(qwen_server, session, "messages/count_tokens", longer)
    await ok(qwen_server, session, "messages", {**longer, "max_tokens": 10})
    assert counted == {"input_tokens": len(qwen_server.engine.requests[1].input_ids)}
    assert reasons(qwen_server) == ["root", "continuation"]


async def test_errors_of_a_route_have_its_dialects_form(qwen_server: FakeServer) -> None:
    session = await qwen_server.client.create()
    status, value = await call(qwen_server, session, "messages", {"messages": []})
    assert (status, value["type"], value["error"]["type"]) == (400, "error", "invalid_request_error")
    stranger = {"x-api-key": "tw_nobody"}
    status, value = await call(qwen_server, session, "messages", {"messages": [user("x")]}, stranger)
    assert (status, value["error"]["type"]) == (401, "authentication_error")
    status, value = await call(qwen_server, session, "responses", {"input": 3})
    assert (status, value["error"]["param"]) == (400, "input")


# -- all of them ------------------------------------------------------------------------------------


async def test_a_conversation_may_change_its_dialect(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(text("one"), text("two"), text("three"))
    session = await qwen_server.client.create()
    first = await ask(qwen_server, session, [user("a")])
    messages = [user("a"), {"role": "assistant", "content": first["content"]}, user("b")]
    second = await ok(qwen_server, session, "messages", {"messages": messages, "max_tokens": 100})
    said = {"role": "assistant", "content": second["content"][0]["text"]}
    await ok(qwen_server, session, "responses", {"input": [*messages, said, user("c")]})
    assert reasons(qwen_server) == ["root", "continuation", "continuation"]
    assert len(await rows(qwen_server, session)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_is_recorded(qwen_server: FakeServer, stream: bool) -> None:
    qwen_server.engine.script = say(*(text(word) for word in ("one", "two", "three")))
    session = await qwen_server.client.create()
    body = {"messages": [user("go")], "n": 3, "seed": 5}
    if stream:
        events = await sse(qwen_server, session, body)
        assert events[-1] == "[DONE]"
        choices: dict[int, str] = {}
        for event in events[:-1]:
            for choice in event["choices"]:
                choices[choice["index"]] = choices.get(choice["index"], "") + (choice["delta"].get("content") or "")
    else:
        status, value = await post(qwen_server, session, body)
        assert status == 200, value
        choices = {choice["index"]: choice["message"]["content"] for choice in value["choices"]}
    assert sorted(choices.values()) == ["one", "three", "two"]
    seeds = [request.body["sampling_params"]["sampling_seed"] for request in qwen_server.engine.requests]  # type: ignore[index]
    assert sorted(seeds) == [5, 6, 7]
    assert sorted(reasons(qwen_server)) == ["choice", "choice", "root"]
    found = await rows(qwen_server, session)
    assert len(found) == 3
    # Any of them can be continued.
    for word in ("two", "three"):
        await ask(qwen_server, session, [user("go"), {"role": "assistant", "content": word}, user("on")])
    assert reasons(qwen_server)[3:] == ["continuation", "continuation"]


async def test_one_choice_that_fails_fails_them_all_and_leaves_nothing(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(text("one"), FakeReply(ids=text("two"), logprobs=[float("nan")] * 9))
    session = await qwen_server.client.create()
    status, _ = await post(qwen_server, session, {"messages": [user("go")], "n": 2})
    assert status == 502
    assert await qwen_server.client.trajectories(session.session_id) == ()


async def test_a_forced_call_and_a_schema_become_the_engines_constraint(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(CALL)
    session = await qwen_server.client.create()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bodies = [
        {"tools": [RUN], "tool_choice": "required"},
        {"tools": [RUN], "tool_choice": {"type": "function", "function": {"name": "run"}}},
        {"response_format": form},
    ]
    for body in bodies:
        status, value = await post(qwen_server, session, {"messages": [user("go")], **body})
        assert status == 200, value
    params = [request.body["sampling_params"] for request in qwen_server.engine.requests]
    assert "structural_tag" in params[0]  # type: ignore[operator]
    assert "structural_tag" in params[1]  # type: ignore[operator]
    constrained = params[2].get("json_schema") or params[2].get("structural_tag")  # type: ignore[attr-defined]
    assert '"integer"' in constrained
    both = {"messages": [user("go")], **bodies[0], **bodies[2]}
    status, value = await post(qwen_server, session, both)
    assert (status, value["error"]["param"]) == (400, "tool_choice")


async def test_what_a_family_cannot_do_is_refused_by_name(server: FakeServer) -> None:
    session = await server.client.create()
    for body, param in (
        ({"tools": [RUN], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [RUN], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ):
        status, value = await post(server, session, {"messages": [user("go")], **body})
        assert (status, value["error"]["param"]) == (400, param), value
    assert server.engine.requests == []


async def test_a_reply_kept_to_one_call_ends_there_and_goes_on_as_the_template_wants(
    qwen_server: FakeServer,
) -> None:
    ended = [*TOKENIZER.encode('<tool_call>\n{"name": "run", "arguments": {}}\n'), CALL_END]
    qwen_server.engine.script = say(ended, text("done"))
    session = await qwen_server.client.create()
    body: dict[str, Any] = {"tools": [RUN], "parallel_tool_calls": False}
    status, value = await post(qwen_server, session, {"messages": [user("go")], **body})
    assert (status, value["choices"][0]["finish_reason"]) == (200, "tool_calls")
    assert CALL_END in qwen_server.engine.requests[0].body["sampling_params"]["stop_token_ids"]  # type: ignore[index]
    said = value["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "ok"}
    status, _ = await post(qwen_server, session, {"messages": [user("go"), said, result], **body})
    assert status == 200
    assert reasons(qwen_server) == ["root", "continuation"]
    (row,) = await rows(qwen_server, session)
    first = row.turn_spans[0]
    # The close that the model did not write is context, and there is one.
    behind = row.token_ids[first.end : row.turn_spans[1].start].tolist()
    assert behind[0] == IM_END
    assert row.loss_mask[first.end] == 0


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_gives_the_same_bytes_in_every_dialect(qwen_server: FakeServer, route: str, stream: bool) -> None:
    qwen_server.engine.script = say(text("one"), text("two"))
    session = await qwen_server.client.create()
    name = "input" if route == "responses" else "messages"
    body = orjson.dumps({name: [user("go")], "max_tokens": 50, "stream": stream})
    sent = {"x-api-key": session.token, "idempotency-key": "k"}
    answers = []
    for forget in (False, False, True):
        if forget:
            qwen_server.gateway.store._loaded.clear()  # as after a restart: from the journal
        async with qwen_server.http.post(f"{session.base_url}/v1/{route}", data=body, headers=sent) as response:
            answers.append((response.status, response.content_type, await response.read()))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == 200
    assert len(qwen_server.engine.requests) == 1


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
async def test_a_key_keeps_the_whole_stream_of_a_reply_without_a_piece(server: FakeServer, route: str) -> None:
    session = await server.client.create()
    name = "input" if route == "responses" else "messages"
    body = orjson.dumps({name: [user("go")], "max_tokens": 50, "stream": True})
    server.engine.script = say([261])  # the end at once
    shapes = []
    for key in ("k", "k", None):
        if shapes:
            server.gateway.store._loaded.clear()  # from the journal
        sent = {"x-api-key": session.token, **({"idempotency-key": key} if key else {})}
        async with server.http.post(f"{session.base_url}/v1/{route}", data=body, headers=sent) as response:
            lines = (await response.read()).split(b"\n")
        events = [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        shapes.append([(event.get("type", event.get("object")), event.get("sequence_number")) for event in events])
    assert shapes[0] == shapes[1] == shapes[2]


async def test_a_key_and_a_body_that_two_dialects_can_read_are_two_calls(server: FakeServer) -> None:
    session = await server.client.create()
    body = {"messages": [user("hi")], "max_tokens": 20}
    _, chat = await call(server, session, "chat/completions", body, {"idempotency-key": "k"})
    status, value = await call(server, session, "messages", body, {"idempotency-key": "k"})
    assert chat["object"] == "chat.completion"
    assert (status, value["error"]["param"]) == (400, "idempotency-key")


async def test_a_retry_that_arrives_while_the_first_is_read_joins_it(server: FakeServer) -> None:
    """Other instructions on a named reply: the journal is asked for what was said."""
    session = await server.client.create()
    first = await ok(server, session, "responses", {"input": "go", "instructions": "a"})
    body = {"input": "on", "instructions": "b", "previous_response_id": first["id"]}
    spoken, asked = server.gateway.api._conversations._spoken, asyncio.Event()

    async def slowly(*args: Any) -> Any:
        asked.set()
        await asyncio.sleep(0.1)
        return await spoken(*args)

    server.gateway.api._conversations._spoken = slowly  # type: ignore[method-assign]
    calls = [asyncio.create_task(call(server, session, "responses", body, {"idempotency-key": "k"})) for _ in range(3)]
    await asked.wait()
    answers = await asyncio.gather(*calls)
    assert answers[0] == answers[1] == answers[2]
    assert len(server.engine.requests) == 2


async def test_spans_and_facts_of_every_call_are_exported(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(
        FakeReply(ids=text("one two"), versions=[("3", 0, 2), ("4", 2, len(text("one two")))])
    )
    session = await qwen_server.client.create(task_id="t", group_id="g", metadata={"a": "b"})
    await ask(qwen_server, session, [user("go")])
    (row,) = await rows(qwen_server, session)
    start = row.turn_spans[0].start
    kinds = {(span.kind, span.precision) for span in row.version_spans}
    assert len(kinds) == 1
    ((kind, precision),) = kinds
    assert row.version_spans == (
        VersionSpan(3, start, start + 2, kind, precision),
        VersionSpan(4, start + 2, row.token_ids.size, kind, precision),
    )
    assert (row.task_id, row.group_id, dict(row.metadata)) == ("t", "g", {"a": "b"})
    assert row.prompt_tokens == (start,)
    assert row.turn_times[0][0] <= row.turn_times[0][1]


async def test_codex_gets_one_compaction_item_for_its_trigger(qwen_server: FakeServer) -> None:
    qwen_server.engine.script = say(text("one"), text("all so far"), text("two"))
    session = await qwen_server.client.create()
    first = await ok(qwen_server, session, "responses", {"input": "go"})
    items = [{"role": "user", "content": "go"}, *first["output"]]
    asked = {"input": [*items, {"type": "compaction_trigger"}], "store": False}
    compacted = await ok(qwen_server, session, "responses", asked)
    assert [item["type"] for item in compacted["output"]] == ["compaction"]
    await ok(qwen_server, session, "responses", {"input": [*compacted["output"], user("on")], "store": False})
    prompt = TOKENIZER.decode(qwen_server.engine.requests[2].input_ids)
    assert "all so far" in prompt
    assert "one" not in prompt
    assert await rows(qwen_server, session)


async def test_branches_are_counted_by_reason(server: FakeServer) -> None:
    before = generate_latest().decode()
    session = await server.client.create()
    reply = await ask(server, session, [user("a")])
    await ask(server, session, [user("a"), {**reply, "content": "edited"}, user("b")])
    after = generate_latest().decode()
    name = 'tollway_branches_total{reason="edited"}'
    assert counted(after, name) == counted(before, name) + 1


def counted(metrics: str, name: str) -> float:
    return next((float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(name)), 0.0)


async def test_ids_that_no_vocabulary_has_are_no_turn(server: FakeServer) -> None:
    session = await server.client.create()
    server.engine.script = say([300_000, 261], [104, 271, 261])
    status, value = await post(server, session, {"messages": [user("a")]})
    assert (status, value["error"]["code"]) == (502, "upstream_error")
    assert "300000" in value["error"]["message"]
    # One of the padding of a model's vocabulary can be sampled and is kept.
    status, _ = await post(server, session, {"messages": [user("a")]})
    assert status == 200
    (row,) = await rows(server, session)
    assert row.token_ids[-3:].tolist() == [104, 271, 261]


async def test_an_empty_key_is_none(server: FakeServer) -> None:
    session = await server.client.create()
    for text_ in ("a", "b"):
        status, _ = await post(server, session, {"messages": [user(text_)]}, {"idempotency-key": ""})
        assert status == 200


@pytest.mark.parametrize(
    "sampling",
    [{"stop": [""]}, {"stop_token_ids": [-1]}, {"top_k": -2}, {"seed": 2**64}, {"min_p": 2}, {"max_new_tokens": 2**31}],
)
async def test_sampling_that_no_engine_takes_opens_no_session(server: FakeServer, sampling: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {server.admin_key}"}
    async with server.http.post(f"{server.url}/sessions", json={"sampling": sampling}, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"].startswith(f"sampling.{next(iter(sampling))}")


async def test_a_session_keeps_the_distribution_that_it_was_given(server: FakeServer) -> None:
    headers = {"authorization": f"Bearer {server.admin_key}"}
    fixed = {"top_k": 0, "min_p": 0.25, "presence_penalty": 0.5}
    async with server.http.post(f"{server.url}/sessions", json={"sampling": fixed}, headers=headers) as response:
        opened = await response.json()
    session = Session(**opened)
    status, _ = await post(server, session, {"messages": [user("a")], "top_k": 5, "min_p": 0.5, "temperature": 0.5})
    assert status == 200
    params: Any = server.engine.requests[0].body["sampling_params"]
    assert [params[name] for name in ("top_k", "min_p", "presence_penalty", "temperature")] == [-1, 0.25, 0.5, 0.5]
    shown = await server.client.session(session.session_id)
    assert shown["sampling_overridden"] == 2


async def test_identical_questions_at_once_are_siblings(server: FakeServer) -> None:
    session = await server.client.create()
    server.engine.script = lambda request: FakeReply(ids=[97 + request.number, 261], delay_s=0.1)
    await asyncio.gather(*(ask(server, session, [user("a")]) for _ in range(4)))
    assert len(server.engine.requests) == 4
    assert reasons(server) == ["root", "sibling", "sibling", "sibling"]
    assert len(await rows(server, session)) == 4
