"""The arithmetic of the rollout benchmark: what it counts, what it asks directly, and that it finds a difference."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from bench_rollout import added, hit_share, unexplained
from rollout_exact import Comparison, Served, compare, moved_sessions, read_log
from rollout_family import WIDE_VOCAB_SIZE, WideBytes
from rollout_fleet import difference
from rollout_load import Part, Round, SessionRun, Sizes, answered, joined, schedule

from tollway.messages import ToolSpec
from tollway.records import Sampling, TokenSpan, Trajectory, VersionSpan

ENGINES = ("http://a:1", "http://b:2")
IDS = np.array([1, 2, 3, 10, 11, 4, 5, 12, 13, 14], np.int32)
SPANS = (TokenSpan(3, 5), TokenSpan(7, 10))
PROBABLE = np.array([-0.1, -0.25, -0.3, -1.5, -2.75], np.float32)


def row(**changes: object) -> Trajectory:
    """Two calls: three ids and two sampled ones, two more and three sampled ones."""
    on = np.zeros(IDS.size, np.uint8)
    for span in SPANS:
        on[span.start : span.end] = 1
    logprobs = np.full(IDS.size, np.nan, np.float32)
    logprobs[on == 1] = PROBABLE
    given: dict[str, object] = {
        "token_ids": IDS.copy(),
        "loss_mask": on,
        "logprobs": logprobs,
        "weight_version": np.where(on == 1, 7, -1).astype(np.int32),
        "session_id": "s",
        "leaf": 1,
        "branch_reason": "root",
        "turn_spans": SPANS,
        "finish_reasons": ("length", "length"),
        "sampling": Sampling(max_new_tokens=9),
        "engine_ids": (f"{ENGINES[0]}#1", f"{ENGINES[0]}#1"),
        "cached_tokens": (0, 4),
    }
    return Trajectory(**(given | changes))  # type: ignore[arg-type]


def served(turn: int, engine: str = ENGINES[0]) -> Served:
    """What the engine logs of one call of ``row``."""
    span = SPANS[turn]
    count = span.end - span.start
    return Served(
        engine=engine,
        prompt=IDS[: span.start].copy(),
        sampled=IDS[span.start : span.end].copy(),
        logprobs=PROBABLE[:2].copy() if turn == 0 else PROBABLE[2:].copy(),
        versions=(VersionSpan(7, 0, count),),
        cached=4 * turn,
        finish="length",
    )


def compared(rows: tuple[Trajectory, ...], calls: list[Served], killed: frozenset[str] = frozenset()) -> Comparison:
    return compare({"s": rows}, [{"s": calls}], turns=2, killed=killed)


def test_an_export_that_is_what_the_engine_logged_has_no_difference() -> None:
    found = compared((row(),), [served(0), served(1)])
    assert found.found == []
    assert (found.sessions, found.calls, found.ids, found.logprobs) == (1, 2, 5 + 10, 5)


def changed(name: str, change: Callable[[np.ndarray], None]) -> Served:
    call = served(1)
    change(getattr(call, name))
    return call


def one_bit_more(logprobs: np.ndarray) -> None:
    logprobs[1] = np.nextafter(logprobs[1], np.float32(0))


def another_first(ids: np.ndarray) -> None:
    ids[0] += 1


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (changed("logprobs", one_bit_more), "log-probabilities: 1 of 3 differ, first at 1"),
        (changed("prompt", another_first), "prompt ids: 1 of 7 differ, first at 0"),
        (changed("sampled", another_first), "sampled ids: 1 of 3 differ, first at 0"),
        (replace(served(1), versions=(VersionSpan(6, 0, 1), VersionSpan(7, 1, 3))), "weight versions: 1 of 3"),
        (replace(served(1), cached=3), "cached tokens 4 in the export, 3 in the log"),
        (replace(served(1), finish="stop"), "finish reason 'length' in the export, 'stop' in the log"),
        (served(1, ENGINES[1]), "0 calls of 7 ids in the log of http://a:1, want 1"),
    ],
)
def test_one_thing_that_differs_is_found(call: Served, word: str) -> None:
    found = compared((row(),), [served(0), call])
    assert any(word in line for line in found.found), found.found


def test_a_call_that_is_only_in_the_export_or_only_in_the_log_is_found() -> None:
    assert len(compared((row(),), [served(0)]).found) == 1
    assert len(compared((row(),), [served(0), served(1), served(1, ENGINES[1])]).found) == 1
    assert len(compared((), [served(0), served(1)]).found) == 1


def test_what_a_killed_engine_finished_and_nobody_got_is_counted_and_no_difference() -> None:
    moved = row(engine_ids=(f"{ENGINES[0]}#1", f"{ENGINES[1]}#1"))
    calls = [served(0), served(1), served(1, ENGINES[1])]
    found = compared((moved,), calls, frozenset({ENGINES[0]}))
    assert (found.found, found.undelivered) == ([], 1)
    assert moved_sessions({"s": (moved,), "t": (row(),)}) == 1


def log_line(**changes: object) -> str:
    rows = [[float(p), int(t), None] for p, t in zip(PROBABLE[:2], IDS[3:5], strict=True)]
    meta = {
        "output_token_logprobs": rows,
        "weight_versions": [{"version": "7", "start": 0, "end": 2}],
        "cached_tokens": 0,
        "finish_reason": {"type": "length", "length": 2},
    }
    obj: dict[str, object] = {"input_ids": [1, 2, 3], "routing_key": "s"}
    out = {"output_ids": [10, 11], "meta_info": meta}
    line = {"timestamp": "t", "event": "request.finished", "rid": "r", "obj": obj | changes, "out": out}
    return f"[2026-01-01 00:00:00] {json.dumps(line)}\n"


def test_a_log_is_read_from_where_it_was_to_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    before = "Server is ready\n" + log_line(routing_key="earlier")
    received = '[t] {"event": "request.received", "rid": "r"}\n'
    path.write_text(before + received + log_line(routing_key=None) + log_line() + log_line()[:100])
    calls = read_log(path, ENGINES[0], begin=len(before))
    assert list(calls) == ["s"]
    (call,) = calls["s"]
    for name in ("prompt", "sampled", "logprobs"):
        assert np.array_equal(getattr(call, name), getattr(served(0), name)), name
    assert (call.versions, call.cached, call.finish) == (served(0).versions, 0, "length")


def test_a_shortened_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(log_line(input_ids=[1, "...", 3]))
    with pytest.raises(ValueError, match="level 3"):
        read_log(path, ENGINES[0])


def test_the_direct_client_sends_what_the_session_had_and_asks_for_as_many_tokens() -> None:
    engines = (f"{ENGINES[0]}#1", f"{ENGINES[1]}#4")
    first, second = schedule(row(engine_ids=engines))
    assert (first.engine, second.engine) == ENGINES
    assert (first.added.tolist(), second.added.tolist()) == ([1, 2, 3], [4, 5])
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (2, 3)


def test_parts_of_several_processes_are_one_round_from_the_first_start_to_the_last_reply() -> None:
    places = [[SessionRun(str(n), [10.0, 11.0], [0.1 * n, 1.0], [100, 200], [30, 20], [])] for n in range(4)]
    whole = joined([Part(places[:2], 10.0, 14.0), Part(places[2:], 10.5, 15.0)])
    assert [each.name for each in whole.sessions] == ["0", "1", "2", "3"]
    assert (whole.turns, whole.output_tokens, whole.prompt_tokens, whole.wall_s) == (8, 200, 1200, 5.0)
    assert whole.tokens_s == 40.0
    assert (whole.latency_s(0.0), whole.latency_s(0.99)) == (0.0, 1.0)


def test_steady_is_the_time_in_which_every_place_is_between_its_first_reply_and_its_last() -> None:
    # One place replies at 2, 4, 6 (two sessions), the other at 3, 5: from 3 to 5, 10 and 20 tokens a turn of 2 s.
    one = [SessionRun("a", [0.0, 2.0], [2.0, 2.0], [], [10, 10], []), SessionRun("b", [4.0], [2.0], [], [10], [])]
    two = [SessionRun("c", [1.0, 3.0], [2.0, 2.0], [], [20, 20], [])]
    assert Round([one, two], 6.0).steady_tokens_s == pytest.approx((10 + 20) / 2.0)
    assert Round([one, two], 6.0).tokens_s == pytest.approx(70 / 6)
    alone = [SessionRun("d", [0.0], [9.0], [], [5], [])]
    assert Round([one, alone], 9.0).steady_tokens_s == 0.0


def test_the_size_of_a_session_is_all_that_its_last_call_leaves_in_a_cache() -> None:
    assert Sizes(turns=6, prompt=1024, new=256, tool=256).total == 1024 + 6 * 256 + 5 * 256


def test_cache_figures_of_rounds_add_up_and_give_the_rates_of_all_of_them() -> None:
    looks = [
        {"prompt_tokens": 100 * n, "possible_tokens": 80 * n, "useful_tokens": 70 * n, "waste": {"moved": 10 * n}}
        for n in range(3)
    ]
    rounds = [difference(after, before) for before, after in pairwise(looks)]
    total = added(rounds)
    assert total["prompt_tokens"] == 200
    assert total["waste"] == {"moved": 20}
    assert (total["hit_rate"], total["ceiling"], total["efficiency"]) == (0.7, 0.8, 0.875)


def test_the_engines_own_rate_leaves_out_what_they_had_counted_before() -> None:
    before = {"device_hit": 50.0, "host_hit": 0.0, "input": 50.0}
    after = {"device_hit": 110.0, "host_hit": 10.0, "input": 80.0}
    assert hit_share(after, before) == pytest.approx(0.7)
    assert hit_share({}, {}) is None


def test_only_the_loss_of_the_engine_explains_what_was_wasted() -> None:
    assert unexplained({"waste": {"moved": 5}, "moved": {"engine_lost": 5}}, 2) == []
    assert unexplained({"waste": {"moved": 5}, "moved": {"migration": 5}}, 2) == [
        "tokens wasted by migration: 5, want 0"
    ]
    assert len(unexplained({"waste": {}, "moved": {}}, 0)) == 1


def test_every_id_of_the_vocabulary_reads_as_text_and_a_reply_as_a_call() -> None:
    family = WideBytes()
    tool = ToolSpec(name="bash", description="", parameters='{"type":"object","properties":{"command":{}}}')
    every = np.arange(WIDE_VOCAB_SIZE, dtype=np.int32)
    whole = family.parse(every, (), prompt_end=every[:1])
    assert len(whole.content) >= 4 * (WIDE_VOCAB_SIZE - 272)
    reply = family.parse(every[300:310], (tool,), prompt_end=every[:1])
    (call,) = reply.calls
    assert reply.content + json.loads(call.arguments)["command"] == whole.content[-4 * (WIDE_VOCAB_SIZE - 300) :][:40]
    parser = family.stream((tool,), prompt_end=every[:1])
    assert parser.feed(list(range(300, 310))) == []
    said = parser.finish(reply)
    assert "".join(delta.content for delta in said) == reply.content
    assert [delta.call for delta in said if delta.call] == [call]


def test_a_result_is_shared_by_the_calls_of_a_reply_and_text_where_there_are_none() -> None:
    calls = [{"id": "1"}, {"id": "2"}]
    assert [m.get("content") for m in answered({"role": "assistant", "tool_calls": calls}, "abcd")[1:]] == ["ab", "cd"]
    assert answered({"role": "assistant", "content": "x"}, "abcd")[1] == {"role": "user", "content": "abcd"}
