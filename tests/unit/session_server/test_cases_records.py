"""What is recorded beside ids: replies in pieces, expert choices, log-probabilities, versions."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_helpers import ask, check_rows, joined, post, rows, say, sse, user

from tollway.errors import InvalidRecord
from tollway.records import Sampling, Trajectory
from tollway.router.facts import EngineFacts
from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.router.replies import parse_reply
from tollway.router.wire import GenerateCall, Prompt
from tollway.session_server.fake import FakeServer


class Routing(FakeEngine):
    """A model with three layers and two experts per token; counts the rows that it sent."""

    rows_sent = 0

    def __init__(self) -> None:
        super().__init__(route_shape=(3, 2))

    def _routes(self, request: FakeRequest, reply: FakeReply) -> bytes:
        data = super()._routes(request, reply)
        self.rows_sent += len(data) // (3 * 2 * 4)
        return data


@asynccontextmanager
async def routing(folder: Path) -> AsyncIterator[tuple[FakeServer, Routing]]:
    async with (
        Routing() as engine,
        FakeServer(folder, engines=[engine], settings={"routed_experts": True}) as server,
    ):
        yield server, engine


def routes_of(tokens: list[int]) -> np.ndarray:
    """What the model chooses for a sequence, in one go."""
    sequence = np.array(tokens[:-1], np.int64)
    base = (sequence * 7 + np.arange(sequence.size) * 13)[:, None, None]
    out: np.ndarray = (base + np.arange(3)[:, None] * 3 + np.arange(2)) % 8
    return out


def check_routes(row: Trajectory) -> None:
    assert row.routed_experts is not None
    assert row.routed_experts.start == 0
    assert np.array_equal(row.routed_experts.ids, routes_of(row.token_ids.tolist()))


# -- replies in pieces ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_was_paused_goes_on_within_its_budget_and_keeps_both_versions(
    tmp_path: Path, stream: bool
) -> None:
    """Rows 33 and 34, reports F3, F4 and I9: seven tokens of ten, new weights, three more."""
    async with routing(tmp_path) as (server, engine):
        engine.script = say(
            FakeReply(ids=[*b"abcdefg"], finish="abort", versions=[("3", 0, 7)]),
            FakeReply(ids=[*b"hi", 261], versions=[("4", 0, 3)]),
        )
        session = await server.client.create()
        body = {"messages": [user("go")], "max_tokens": 10, "logprobs": True}
        if stream:
            told = joined(await sse(server, session, body))
            assert (told["content"], told["finish"]) == ("abcdefghi", ["stop"])
        else:
            _, value = await post(server, session, body)
            assert value["choices"][0]["message"]["content"] == "abcdefghi"
            assert value["usage"]["completion_tokens"] == 10
        first, second = engine.requests
        asked: Any = second.body["sampling_params"]
        assert asked["max_new_tokens"] == 3
        assert second.input_ids == [*first.input_ids, *b"abcdefg"]
        # The prefix that was computed is not asked for again: 13 + 3 rows in all.
        total = len(first.input_ids) + 10
        assert second.body["routed_experts_start_len"] == len(first.input_ids) + 7 - 1
        assert engine.rows_sent == total - 1
        (row,) = await server.client.trajectories(session.session_id)
        assert row.token_ids.tolist() == [*first.input_ids, *b"abcdefghi", 261]
        on = row.loss_mask == 1
        assert on.sum() == np.isfinite(row.logprobs).sum() == 10
        assert row.weight_version[on].tolist() == [3] * 7 + [4] * 3
        # Training on the new part only is this mask; every list of the row has the row's length.
        assert (row.weight_version[on] >= 4).tolist() == [False] * 7 + [True] * 3
        assert {row.loss_mask.size, row.logprobs.size, row.weight_version.size} == {total}
        check_routes(row)


async def test_a_reply_that_is_aborted_again_and_again_is_joined_from_all_its_pieces(tmp_path: Path) -> None:
    """One of them waited in the queue: it brings no token and no facts of a prefill."""

    def waited(value: dict[str, Any]) -> None:
        for name in ("prompt_tokens", "cached_tokens", "routed_experts"):
            value["meta_info"].pop(name, None)

    async with routing(tmp_path) as (server, engine):
        engine.script = say(
            FakeReply(ids=[*b"ab"], finish="abort", versions=[("1", 0, 2)]),
            FakeReply(ids=[], finish="abort", edit=waited),
            FakeReply(ids=[*b"c"], finish="abort", versions=[("2", 0, 1)]),
            FakeReply(ids=[*b"d", 261], versions=[("2", 0, 1), ("3", 1, 2)]),
        )
        session = await server.client.create()
        assert (await ask(server, session, [user("go")], max_tokens=9))["content"] == "abcd"
        asked: list[Any] = [request.body["sampling_params"] for request in engine.requests]
        assert [each["max_new_tokens"] for each in asked] == [9, 7, 7, 6]
        assert len({request.rid for request in engine.requests}) == 4
        (row,) = await server.client.trajectories(session.session_id)
        assert row.weight_version[row.loss_mask == 1].tolist() == [1, 1, 2, 2, 3]
        check_routes(row)


async def test_rows_that_a_resumed_engine_sends_a_second_time_are_no_turn(tmp_path: Path) -> None:
    """Report I9: all eight rows again, where five were asked for."""
    async with routing(tmp_path) as (server, engine):
        whole = base64.b64decode(base64.b64encode(np.zeros((14, 3, 2), "<i4").tobytes()))
        engine.script = say(
            FakeReply(ids=[*b"abcd"], finish="abort", versions=[("1", 0, 4)]),
            FakeReply(ids=[*b"efgh", 261], versions=[("1", 0, 5)], routes=whole),
        )
        session = await server.client.create()
        status, value = await post(server, session, {"messages": [user("go")], "max_tokens": 9})
        assert status == 502
        assert "rows" in value["error"]["message"]
        assert await server.client.trajectories(session.session_id) == ()


# -- expert choices ---------------------------------------------------------------------------------


async def test_ten_turns_fetch_every_row_of_expert_choices_once(tmp_path: Path) -> None:
    """Report I6: ten times a hundred new tokens; the whole is what one call would have sent."""
    async with routing(tmp_path) as (server, engine):
        engine.script = lambda r: FakeReply(ids=[*(65 + (r.number + at) % 26 for at in range(49)), 261])
        session = await server.client.create()
        messages: list[Any] = [user("x" * 46)]
        for _ in range(10):
            messages += [await ask(server, session, messages), user("x" * 47)]
        starts: list[Any] = [request.body["routed_experts_start_len"] for request in engine.requests]
        assert starts == sorted(set(starts))
        (row,) = await rows(server, session)
        assert row.token_ids.size == 1000
        assert engine.rows_sent == row.token_ids.size - 1
        check_routes(row)


async def test_a_turn_whose_expert_choices_are_missing_ends_the_sample_before_it(tmp_path: Path) -> None:
    """Report I8: the turn is refused, and what stands in the export is whole."""

    def forgets(value: dict[str, Any]) -> None:
        del value["meta_info"]["routed_experts"]

    async with routing(tmp_path) as (server, engine):
        engine.script = say([*b"ok", 261], FakeReply(ids=[*b"no", 261], edit=forgets))
        session = await server.client.create()
        reply = await ask(server, session, [user("go")])
        status, value = await post(server, session, {"messages": [user("go"), reply, user("on")]})
        assert status == 502
        assert "routed_experts" in value["error"]["message"]
        (row,) = await server.client.trajectories(session.session_id)
        check_rows((row,), server)
        assert row.finish_reasons == ("stop",)
        check_routes(row)


async def test_a_path_with_a_gap_in_its_expert_choices_is_refused_and_not_filled(tmp_path: Path) -> None:
    """Row 35: the first turn was recorded by a server that did not ask for them."""
    async with Routing() as engine:
        async with FakeServer(tmp_path, engines=[engine]) as server:
            session = await server.client.create()
            reply = await ask(server, session, [user("go")])
        async with FakeServer(tmp_path, engines=[engine], settings={"routed_experts": True}) as server:
            base = f"{server.url}/sessions/{session.session_id}"
            moved = replace(session, base_url=base, openai_base_url=f"{base}/v1")
            await ask(server, moved, [user("go"), reply, user("on")])
            with pytest.raises(InvalidRecord) as caught:
                await server.client.trajectories(session.session_id)
            assert caught.value.status == 422
            assert "1 of 2" in str(caught.value)


def test_seven_tokens_have_six_rows_of_two_layers_and_three_experts() -> None:
    """Report I2: 144 bytes of int32."""
    call = GenerateCall(
        rid="r",
        prompt=Prompt.of(np.array([1, 2, 3, 4], np.int32)),
        sampling=Sampling(),
        routing_key="k",
        return_routed_experts=True,
    )
    data = np.arange(36, dtype="<i4").tobytes()
    assert len(data) == 144
    reply = {
        "output_ids": [5, 6, 7],
        "meta_info": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "output_token_logprobs": [[-0.5, token, None] for token in (5, 6, 7)],
            "finish_reason": {"type": "length"},
            "weight_versions": [{"version": "0", "start": 0, "end": 3}],
            "routed_experts": base64.b64encode(data).decode(),
        },
    }
    found = parse_reply(call, reply, facts=EngineFacts(route_shape=(2, 3))).routed_experts
    assert found is not None
    assert found.ids.shape == (6, 2, 3)
    assert found.ids.reshape(-1).tolist() == list(range(36))


# -- log-probabilities ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
async def test_sampled_logprobs_are_kept_with_and_without_alternatives(
    server: FakeServer, stream: bool, top: int
) -> None:
    """Report I12: the engine sends output lists only."""
    given = [-0.5, -0.25, -0.125]
    server.engine.script = say(FakeReply(ids=[*b"ok", 261], logprobs=given))
    session = await server.client.create()
    body = {"messages": [user("go")], "logprobs": True, "top_logprobs": top}
    if stream:
        told = await sse(server, session, body)
        content = [e for event in told[:-1] if (lp := event["choices"][0]["logprobs"]) for e in lp["content"]]
    else:
        _, value = await post(server, session, body)
        content = value["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == given
    assert [len(entry["top_logprobs"]) for entry in content] == [top] * 3
    (row,) = await rows(server, session)
    assert row.logprobs[row.loss_mask == 1].tolist() == given


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
async def test_alternatives_belong_to_their_own_token_and_what_is_missing_is_marked(
    server: FakeServer, stream: bool, incremental: bool
) -> None:
    """Report I13: three tokens, two alternatives, the second has only one."""
    tops = [[(-0.5, 111), (-1.5, 1)], [(-0.25, 7)], [(-0.75, 9), (-2.5, 261)]]
    server.engine.script = say(
        FakeReply(ids=[111, 107, 261], logprobs=[-0.5, -4.0, -2.5], top=tops, incremental=incremental)
    )
    session = await server.client.create()
    body = {"messages": [user("go")], "logprobs": True, "top_logprobs": 2}
    if stream:
        assert (await sse(server, session, body))[-1] == "[DONE]"
    else:
        assert (await post(server, session, body))[0] == 200
    (row,) = await rows(server, session)
    assert row.top_logprobs is not None
    assert row.top_logprobs.ids.tolist() == [[111, 1], [7, -1], [9, 261]]
    assert row.top_logprobs.logprobs.tolist() == [[-0.5, -1.5], [-0.25, -np.inf], [-0.75, -2.5]]
    assert row.logprobs[row.loss_mask == 1].tolist() == [-0.5, -4.0, -2.5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", ["four of five", "no ids"])
async def test_lists_that_are_shorter_than_the_count_are_no_turn(server: FakeServer, stream: bool, what: str) -> None:
    """Report I11."""

    def lie(value: dict[str, Any]) -> None:
        if what == "no ids":
            value["output_ids"] = None
        else:
            value["meta_info"]["output_token_logprobs"].pop()

    server.engine.script = say(FakeReply(ids=[*b"okay", 261], edit=lie, chunk=5))
    session = await server.client.create()
    url = f"{session.openai_base_url}/chat/completions"
    body = {"messages": [user("go")], "stream": stream}
    async with server.http.post(url, json=body, headers={"authorization": f"Bearer {session.token}"}) as response:
        data = await response.read()
        assert response.status == 502
    assert json.loads(data)["error"]["code"] == "upstream_error"
    assert await server.client.trajectories(session.session_id) == ()
