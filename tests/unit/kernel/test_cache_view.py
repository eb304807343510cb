"""The prefix cache in the terminal: what it shows, at any width, with and without colours."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tollway.cache_view import BEYOND, CAUSES, CacheView, show_cache
from tollway.errors import EngineLost, TollwayError
from tollway.router import causes
from tollway.router.cache_ledger import CacheLedger, Entry
from tollway.router.causes import Miss
from tollway.router.fake import FakeReply
from tollway.session_server.fake import FakeServer

URL = "http://127.0.0.1:8700"


def ledger_with_everything() -> CacheLedger:
    """A call for every cause and reason, over many engines and two models."""
    ledger = CacheLedger()
    misses = [Miss(cause, 100 + at) for at, cause in enumerate(causes.CAUSES) if cause != "moved"]
    misses += [Miss("moved", 50 + at, reason) for at, reason in enumerate(causes.MOVES)]
    for at, miss in enumerate(misses):
        new = tuple(Miss(reason, 10 + n) for n, reason in enumerate(causes.BEYOND))
        beyond = sum(each.tokens for each in new)
        ledger.record(
            f"{at}.abcdefghijklmnopqrstuvwxyz",
            Entry(
                engine_id=f"e{at}", model="" if at % 2 else "judge", prompt=1000 + beyond, cached=1000 - miss.tokens,
                possible=1000, misses=(miss,), beyond=new, retractions=1, lost_prefix=5,
                outcome="cancelled" if at == 3 else "ok",
            ),
        )  # fmt: skip
    ledger.record("first", Entry(engine_id="e0", prompt=10, cached=9, first=True, beyond=(Miss("first_call", 10),)))
    ledger.record("silent", Entry(engine_id="e0", prompt=10, cached=None))
    return ledger


def drawn(view: CacheView, width: int, **console: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, **console).print(view.render(width))
    return out.getvalue()


def view_of(answer: Any, **more: Any) -> CacheView:
    view = CacheView(URL, **more)
    view.take(answer, 0.0)
    return view


def test_every_cause_has_a_title_and_something_to_do() -> None:
    assert set(CAUSES) == {*causes.CAUSES, *(f"moved/{reason}" for reason in causes.MOVES)}
    assert set(BEYOND) == set(causes.BEYOND)
    assert all(title and advice for title, advice in (*CAUSES.values(), *BEYOND.values()))


@pytest.mark.parametrize("width", [80, 120])
def test_everything_fits_and_nothing_is_cut(width: int) -> None:
    text = drawn(view_of(ledger_with_everything().summary(sessions=8)), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for cause, (title, advice) in CAUSES.items():
        if cause != "moved":
            assert title in text
            assert (advice in text) == (width == 120)
    for title, why in BEYOND.values():
        assert title in text
        assert (why in text) == (width == 120)
    for words in (URL, "hit rate", "ceiling", "efficiency", "model judge", "model policy", "more engines"):
        assert words in text
    for note in ("cancelled calls: 1\n", "was cached: 1\n", "KV away: 17\n", "other sessions (tokens): 9\n"):
        assert note in text, text


def test_colours_say_nothing_that_the_text_does_not() -> None:
    view = view_of(ledger_with_everything().summary(sessions=8))
    plain = drawn(view, 100)
    coloured = drawn(view, 100, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert "\x1b[" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_a_terminal_without_block_characters_gets_plain_ones() -> None:
    assert drawn(view_of(ledger_with_everything().summary(sessions=8), ascii_only=True), 120).isascii()


def test_a_hundred_percent_is_all_of_it() -> None:
    ledger = CacheLedger()
    ledger.record(
        "s", Entry(engine_id="e0", prompt=10**6, cached=10**6 - 2, possible=10**6 - 1, misses=(Miss("unknown", 1),),
        beyond=(Miss("new", 1),)),
    )  # fmt: skip
    text = drawn(view_of(ledger.summary()), 100)
    assert "100.0 %" in text.split("wasted, by cause")[1]
    assert "100.0 %" not in text.split("wasted, by cause")[0]
    assert "99.9 %" in text


def test_without_a_call_or_without_waste_it_says_so() -> None:
    assert "no call yet" in drawn(view_of(CacheLedger().summary(sessions=8)), 80)
    ledger = CacheLedger()
    ledger.record("s", Entry(engine_id="e0", prompt=10, cached=9, possible=9, beyond=(Miss("new", 1),)))
    assert "nothing wasted" in drawn(view_of(ledger.summary()), 80)


def test_the_last_minute_is_told_apart_from_the_sums() -> None:
    ledger, view = CacheLedger(), CacheView(URL)

    def one(cached: int) -> None:
        missed = (Miss("eviction", 99 - cached),) if cached < 99 else ()
        ledger.record(
            "s", Entry(engine_id="e0", prompt=100, cached=cached, possible=99, misses=missed, beyond=(Miss("new", 1),))
        )

    one(0)
    view.take(ledger.summary(), 0.0)
    assert "last" not in drawn(view, 80)
    for second in (30.0, 61.0, 90.0):
        one(99)
        view.take(ledger.summary(), second)
    (row,) = (line.split() for line in drawn(view, 80).splitlines() if line.startswith("last "))
    assert row[:4] == ["last", "60", "s", "2"]
    assert row[-3:] == ["100.0", "%", "0"]
    view.take(CacheLedger().summary(), 92.0)
    assert "no call yet" in drawn(view, 80), "a server that began anew has no last minute yet"


def test_while_the_server_is_away_the_last_figures_stay_and_it_says_why() -> None:
    view = view_of(ledger_with_everything().summary())
    view.problem = "session server at http://x: refused"
    assert "refused" in drawn(view, 80)
    assert "refused" in drawn(CacheView(URL, problem="refused"), 80)
    view.take(ledger_with_everything().summary(), 1.0)
    assert "refused" not in drawn(view, 80)


def test_workers_that_are_down_are_named() -> None:
    answer = {**CacheLedger().summary(), "workers_down": [1, 3]}
    assert "workers 1, 3" in drawn(view_of(answer), 80)


# -- against a server ----------------------------------------------------------------------------------


async def two_turns(server: FakeServer) -> str:
    """A session whose second turn finds nothing; its id."""
    session = await server.client.create()
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    url, headers = f"{session.openai_base_url}/chat/completions", {"authorization": f"Bearer {session.token}"}
    for _ in range(2):
        async with server.http.post(url, json={"model": "policy", "messages": messages}, headers=headers) as response:
            assert response.status == 200
            messages += [(await response.json())["choices"][0]["message"], {"role": "user", "content": "more"}]
        server.engine.script = lambda request: FakeReply([104, 105, 261], cached_tokens=0)
    return session.session_id


async def test_the_command_prints_what_the_server_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeServer(tmp_path) as server:
        session_id = await two_turns(server)
        url, key = server.client.base_url, server.admin_key
        assert await asyncio.to_thread(show_cache, url, key, watch=False, as_json=True) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown == await server.client.cache(sessions=8)
        assert (shown["calls"], [each["session_id"] for each in shown["sessions"]]) == (2, [session_id])
        assert await asyncio.to_thread(show_cache, url + "/", key, watch=False, as_json=False) == 0
        text = capsys.readouterr().out
        assert "UNKNOWN" in text
        assert session_id[:16] in text
        with pytest.raises(TollwayError) as refused:
            await asyncio.to_thread(show_cache, url, "wrong", watch=False, as_json=True)
        assert refused.value.status == 401
    with pytest.raises(EngineLost):
        await asyncio.to_thread(show_cache, url, key, watch=True, as_json=False)


async def test_watching_follows_the_server_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    async with FakeServer(tmp_path) as server:
        outside, inside = pty.openpty()
        environment = {**os.environ, "TOLLWAY_ADMIN_KEY": server.admin_key, "TERM": "xterm", "COLUMNS": "100"}
        command = [sys.executable, "-m", "tollway", "cache", "--url", server.client.base_url]
        running = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment)
        os.close(inside)
        try:
            assert "no call yet" in await asyncio.to_thread(_read_until, outside, "no call yet")
            await two_turns(server)
            assert "UNKNOWN" in await asyncio.to_thread(_read_until, outside, "UNKNOWN")
            running.send_signal(signal.SIGINT)
            await asyncio.to_thread(_read_until, outside, "stopped")
            assert await asyncio.to_thread(running.wait, 10) == 130
        finally:
            running.kill()
            running.wait()
            os.close(outside)


def _read_until(terminal: int, words: str) -> str:
    """What the terminal showed up to ``words``; the test's own timeout is the limit."""
    text = ""
    while words not in text:
        text += os.read(terminal, 65536).decode("utf-8", "replace")
    return text


def test_the_command_needs_the_admin_key() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TOLLWAY_ADMIN_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "tollway", "cache", "--once"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "TOLLWAY_ADMIN_KEY" in done.stderr
