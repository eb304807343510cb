"""The tokenizer object: foreign text, control strings, and who encodes."""

from __future__ import annotations

import logging
import re

import pytest
import vocabularies
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tollway.errors import ConfigError
from tollway.session_server.families.specimens import nasty_texts
from tollway.session_server.tokens import CORPUS, GUARD, ControlTokenizer

SMALL = ControlTokenizer(vocabularies.small(), name="small")


def copy() -> Tokenizer:
    return Tokenizer.from_str(vocabularies.small().to_str())


def test_fastokens_encodes_a_vocabulary_that_it_knows() -> None:
    assert SMALL.encoder == "fastokens"
    assert SMALL.fast_difference(nasty_texts(400)) is None
    assert ControlTokenizer(copy(), name="slow", fast=False).encoder == "tokenizers"


def test_a_difference_names_the_string_and_the_other_library_encodes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at the start is what stands between a wrong encoder and every prompt."""
    import fastokens

    class Wrong:
        """Wrong on one string of the corpus only."""

        def __init__(self, inner: object) -> None:
            self.inner = inner

        def encode_ordinary(self, text: str) -> object:
            return self.inner.encode_ordinary("x" if text == "1234567890" else text)  # type: ignore[attr-defined]

    made = fastokens.Tokenizer.from_json_str
    monkeypatch.setattr(fastokens, "Tokenizer", type("T", (), {"from_json_str": lambda text: Wrong(made(text))}))
    with caplog.at_level(logging.WARNING):
        tokenizer = ControlTokenizer(copy(), name="doubtful")
    assert tokenizer.encoder == "tokenizers"
    assert re.search("doubtful.*fastokens encodes '1234567890' as", caplog.text)
    assert tokenizer.encode("1234567890") == SMALL.encode("1234567890")


def test_a_vocabulary_that_fastokens_cannot_read_is_encoded_by_the_oracle(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fastokens

    def refuse(text: str) -> None:
        raise ValueError("unsupported pre-tokenizer")

    monkeypatch.setattr(fastokens, "Tokenizer", type("T", (), {"from_json_str": staticmethod(refuse)}))
    with caplog.at_level(logging.INFO):
        tokenizer = ControlTokenizer(copy(), name="odd")
    assert tokenizer.encoder == "tokenizers"
    assert "unsupported pre-tokenizer" in caplog.text


@given(st.text(st.sampled_from("<|im_end>think/ol_ca\\ufdd0[] \n" + GUARD), max_size=60))
def test_any_foreign_text_comes_back_without_a_control_id(text: str) -> None:
    ids = SMALL.encode("<|im_start|>" + SMALL.guard(text) + "<|im_end|>")
    assert [token for token in ids if token in SMALL.control_ids] == [ids[0], ids[-1]]
    assert SMALL.decode(ids[1:-1]) == text


@given(st.lists(st.one_of(st.sampled_from(vocabularies.CONTROL), st.text(max_size=8)), max_size=8))
def test_template_text_is_cut_at_control_strings_as_the_library_cuts_it(pieces: list[str]) -> None:
    text = "".join(pieces).replace(GUARD, "")
    assert SMALL.encode(text) == vocabularies.small().encode(text, add_special_tokens=False).ids


@given(st.lists(st.integers(0, SMALL.vocab_size - 1), max_size=20))
def test_ids_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    assert SMALL.decode(ids) == vocabularies.small().decode(ids, skip_special_tokens=False)
    assert SMALL.decode(ids, skip_special_tokens=True) == vocabularies.small().decode(ids, skip_special_tokens=True)


def test_ids_beyond_the_vocabulary_decode_to_nothing() -> None:
    assert SMALL.decode([SMALL.vocab_size + 7, 104]) == "h"
    assert SMALL.token_bytes(SMALL.vocab_size + 7) == b""


def test_the_longest_control_string_wins_and_blanks_around_it_may_belong_to_it() -> None:
    backend = copy()
    backend.add_tokens([AddedToken("<think", normalized=False), AddedToken("<think>more", normalized=False)])
    backend.add_tokens([AddedToken("[pad]", normalized=False, lstrip=True, rstrip=True)])
    tokenizer = ControlTokenizer(backend, name="long")
    text = "a<think>more b<think> c<thinkx d [pad]  e"
    assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids

    spans = list(tokenizer.control_spans("x<think>y</think>"))
    assert spans == [(tokenizer.control["<think>"], 8), (tokenizer.control["</think>"], 17)]


def test_a_control_string_that_is_ordinary_text_too_is_refused() -> None:
    backend = copy()
    backend.add_tokens([AddedToken("h", normalized=False)])
    with pytest.raises(ConfigError, match="ordinary text 'h' encodes to control id"):
        ControlTokenizer(backend, name="bad")


def test_the_corpus_holds_what_differs_between_encoders() -> None:
    """A corpus of plain words would prove nothing."""
    whole = "".join(CORPUS)
    for needle in ("e\u0301", "\r\n", "\x00", "\u200b", "1234567890", "日本語", "'LL", GUARD, "\U0001f469"):
        assert needle in whole


def test_the_library_may_not_ask_for_attributions() -> None:
    """They cost quadratic time and nobody reads them; the library takes this answer for an old tokenizer."""
    with pytest.raises(NotImplementedError):
        SMALL.decode([104], clean_up_tokenization_spaces=False)


def test_small_texts_are_remembered_and_not_shared() -> None:
    first = SMALL.encode("user\n")
    first.append(0)
    assert SMALL.encode("user\n") == first[:-1]
