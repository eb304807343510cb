"""The cache figures of a server: per session as for the run, each call once, over restarts too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from server_helpers import TOOLS, ask, post, user

from tollway.router.fake import FakeEngine, FakeReply
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer


async def talk(server: FakeServer, session: Session, turns: int, messages: list[Any] | None = None) -> list[Any]:
    """A conversation of so many turns; its messages, with a question that is still open."""
    messages = messages or [user("hello")]
    for turn in range(turns):
        messages += [await ask(server, session, messages), user(f"more {turn}")]
    return messages


async def figures(server: FakeServer, session: Session) -> dict[str, Any]:
    return dict((await server.client.session(session.session_id))["cache"])  # type: ignore[call-overload]


async def test_a_session_shows_the_figures_of_the_run_that_are_its_own(server: FakeServer) -> None:
    one, two = await server.client.create(), await server.client.create()
    await talk(server, one, 3)
    server.engine.flush()
    messages = await talk(server, two, 1)
    server.engine.flush()
    await talk(server, two, 2, messages)
    mine, others = await figures(server, one), await figures(server, two)
    run: Any = await server.client.cache(sessions=5)
    for name in ("calls", "prompt_tokens", "possible_tokens", "useful_tokens", "wasted_tokens", "shared_tokens"):
        assert mine[name] + others[name] == run[name], name
    assert (mine["efficiency"], mine["first_calls"]) == (1.0, 1)
    assert set(run["sessions"][0]) == {*mine, "session_id"}
    assert "sessions" not in await server.client.cache()


async def test_the_most_wasteful_sessions_come_first(server: FakeServer) -> None:
    sessions = [await server.client.create() for _ in range(3)]
    for turns, session in enumerate(sessions):
        messages = await talk(server, session, 1 + turns)
        server.engine.script = lambda request: FakeReply([104, 261], cached_tokens=0)
        await ask(server, session, messages)
        server.engine.script = lambda request: FakeReply([104, 105, 261])
    listed: Any = (await server.client.cache(sessions=2))["sessions"]
    assert [each["session_id"] for each in listed] == [each.session_id for each in (sessions[2], sessions[1])]
    assert listed[0] == {"session_id": sessions[2].session_id, **await figures(server, sessions[2])}


async def test_more_sessions_than_are_kept_in_order_are_refused(server: FakeServer) -> None:
    for asked in ("65", "-1", "all"):
        url = f"{server.url}/cache?sessions={asked}"
        async with server.http.get(url, headers={"authorization": f"Bearer {server.admin_key}"}) as response:
            assert response.status in (400, 422)
            assert "sessions" in (await response.json())["error"]["message"]


async def test_choices_are_calls_and_a_retry_with_a_key_is_none(server: FakeServer) -> None:
    session = await server.client.create()
    body = {"model": "m", "messages": [user("hello")], "n": 3}
    for _ in range(2):
        status, _ = await post(server, session, body, {"idempotency-key": "k"})
        assert status == 200
    found = await figures(server, session)
    assert (found["calls"], found["first_calls"]) == (3, 3)
    assert found["prompt_tokens"] == sum(request.prompt_tokens for request in server.engine.requests)


async def test_branches_of_one_conversation_each_count_their_whole_prompt(server: FakeServer) -> None:
    session = await server.client.create()
    messages = await talk(server, session, 1)
    for question in ("a", "b"):
        await ask(server, session, [*messages[:-1], user(question)])
    found = await figures(server, session)
    assert (found["calls"], found["first_calls"], found["wasted_tokens"]) == (3, 1, 0)
    assert found["prompt_tokens"] == sum(request.prompt_tokens for request in server.engine.requests)


async def test_a_rewritten_history_says_what_it_lost(server: FakeServer) -> None:
    session = await server.client.create()
    messages = await talk(server, session, 3)
    before = await figures(server, session)
    assert before["lost_prefix_tokens"] == 0
    # The second answer is not the one that was given: all that came after the first is lost.
    await ask(server, session, [*messages[:3], {"role": "assistant", "content": "edited"}, user("on")])
    edited = await figures(server, session)
    longest = server.engine.requests[2]
    whole = longest.prompt_tokens + len(server.engine.replies[longest.rid])
    sent, last = server.engine.requests[-1].input_ids, [*longest.input_ids, *server.engine.replies[longest.rid]]
    common = next(at for at, (a, b) in enumerate(zip(sent, last, strict=False)) if a != b)
    assert edited["lost_prefix_tokens"] == whole - common > 0
    assert edited["wasted_tokens"] == 0


async def test_new_tools_break_the_prefix_and_lower_the_ceiling(server: FakeServer) -> None:
    session = await server.client.create()
    messages = await talk(server, session, 2)
    await ask(server, session, messages, TOOLS)
    found = await figures(server, session)
    assert found["beyond"]["prefix_mismatch"] > 0
    assert (found["first_calls"], found["wasted_tokens"]) == (1, 0)


async def test_after_a_restart_a_session_goes_on_where_it_was(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        async with FakeServer(tmp_path, engines=[engine]) as server:
            session = await server.client.create()
            messages = await talk(server, session, 2)
        async with FakeServer(tmp_path, engines=[engine]) as server:
            base = f"{server.url}/sessions/{session.session_id}"
            session = replace(session, base_url=base, openai_base_url=f"{base}/v1")
            messages = await talk(server, session, 1, messages)
            found = await figures(server, session)
            assert (found["calls"], found["first_calls"], found["efficiency"]) == (1, 0, 1.0), "not a first call"
        engine.flush()
        async with FakeServer(tmp_path, engines=[engine]) as server:
            base = f"{server.url}/sessions/{session.session_id}"
            session = replace(session, base_url=base, openai_base_url=f"{base}/v1")
            messages = await talk(server, session, 1, messages)
            assert (await figures(server, session))["waste"].keys() == {"server_restarted"}
            engine.flush()
            await talk(server, session, 1, messages)
            assert (await figures(server, session))["waste"].keys() == {"server_restarted", "unknown"}


async def test_closed_sessions_keep_their_figures_and_deleted_ones_leave_nothing(server: FakeServer) -> None:
    session = await server.client.create()
    await talk(server, session, 2)
    before = await figures(server, session)
    await server.client.close(session.session_id)
    ledger = server.gateway.router.ledger
    assert ledger.sessions == {}, "it rests"
    assert await figures(server, session) == before
    await server.client.delete(session.session_id)
    assert (ledger.sessions, ledger._resting, ledger._worst) == ({}, {}, {})
    assert (await server.client.cache())["calls"] == 2
