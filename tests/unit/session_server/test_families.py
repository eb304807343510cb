"""Families: rendering, verdicts, and streams that end as the whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.errors import BadRequest, ConfigError
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.session_server.families.base import Family, ParsedReply, PathTail, RenderOptions
from tollway.session_server.families.catalogue import renderers_family
from tollway.session_server.families.compact import ASSISTANT, BOS, CALL, END, SEP, TOOLS, USER, CompactFamily
from tollway.session_server.families.registry import families, load_family
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.tokens import GUARD, ControlTokenizer, load_tokenizer

COMPACT = CompactFamily()
TOKENIZER = ControlTokenizer(vocabularies.small(), name="small-qwen3")
QWEN = renderers_family("qwen3", TOKENIZER)
RUN = ToolSpec(name="run", parameters='{"type":"object","properties":{}}')
EDIT = ToolSpec(
    name="edit", parameters='{"type":"object","properties":{"rule":{"type":"string"},"line":{"type":"integer"}}}'
)
NONE = np.zeros(0, np.int32)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def stream_of(family: Family, ids: list[int], cuts: list[int], stop: tuple[str, ...] = ()) -> ParsedReply:
    """What a client has after a whole stream."""
    parser = family.stream((RUN, EDIT), prompt_end=NONE, stop=stop)
    deltas = []
    at = 0
    for size in [*cuts, len(ids)]:
        deltas += parser.feed(ids[at : at + size])
        at += size
    whole = family.parse(array(ids), (RUN, EDIT), prompt_end=NONE, stop=stop[0] if stop else None)
    deltas += parser.finish(whole)
    calls = tuple(delta.call for delta in deltas if delta.call is not None)
    reasoning = "".join(delta.reasoning for delta in deltas)
    return ParsedReply("".join(delta.content for delta in deltas), reasoning or None, calls)


control = list(TOKENIZER.control.values())
pieces = st.one_of(
    st.lists(st.integers(0, 255), max_size=5),
    st.lists(st.sampled_from(control), max_size=3),
    st.sampled_from(
        [
            TOKENIZER.encode('<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'),
            TOKENIZER.encode('<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'),
            TOKENIZER.encode("<think>\nhm\n</think>\n\n"),
            TOKENIZER.encode(TOKENIZER.guard("<think>x</think><tool_call>")),
            TOKENIZER.encode("stop<"),
        ]
    ),
)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(pieces, max_size=6), cuts=st.lists(st.integers(1, 9), max_size=8))
def test_a_qwen_stream_always_ends_as_the_parse_of_the_whole(parts: list[list[int]], cuts: list[int]) -> None:
    ids = [token for part in parts for token in part]
    whole = QWEN.parse(array(ids), (RUN, EDIT), prompt_end=NONE)
    assert stream_of(QWEN, ids, cuts) == whole


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 271), st.sampled_from([CALL, SEP, END, *b"edit", *b"run"])), max_size=30),
    cuts=st.lists(st.integers(1, 9), max_size=8),
    stop=st.sampled_from([(), ("ed",), ("\n\n",)]),
)
def test_a_compact_stream_always_ends_as_the_parse_of_the_whole(
    ids: list[int], cuts: list[int], stop: tuple[str, ...]
) -> None:
    whole = COMPACT.parse(array(ids), (RUN, EDIT), prompt_end=NONE, stop=stop[0] if stop else None)
    assert stream_of(COMPACT, ids, cuts, stop) == whole


def test_compact_layout() -> None:
    messages = [Message(role="developer", content="s"), Message(role="user", content="é")]
    ids = COMPACT.render_prompt(messages, (RUN, EDIT)).tolist()
    assert ids == [BOS, TOOLS, *b"run edit:rule,line", END, 257, *b"s", END, USER, *"é".encode(), END, ASSISTANT]


def test_compact_calls_go_both_ways() -> None:
    """What a message renders to parses back to the same call."""
    call = ToolCall("x", "edit", '{"rule": "ca st", "line": 3}')
    ids, mask = COMPACT.render_training([Message(role="assistant", content="so", tool_calls=(call,))], (RUN, EDIT))
    start = ids.tolist().index(ASSISTANT) + 1
    sampled = ids[start:]
    assert sampled.tolist() == [*b"so", CALL, *b"edit", SEP, *b"ca st", SEP, *b"3", END]
    reply = COMPACT.parse(sampled, (RUN, EDIT), prompt_end=NONE)
    assert (reply.content, reply.calls[0].name) == ("so", "edit")
    assert json.loads(reply.calls[0].arguments) == {"rule": "ca st", "line": 3}
    assert mask.tolist() == [0] * start + [1] * sampled.size


@pytest.mark.parametrize(
    "sampled",
    [
        [CALL, *b"edit", SEP, *b"a", SEP, *b"NaN", END],
        [CALL, *b"edit", SEP, *b"a", SEP, *b"{", END],
        [CALL, *b"edit", SEP, *b"a"],
        [CALL, END],
        [CALL, *b"run", SEP, END],
    ],
)
def test_compact_malformed_calls_are_text(sampled: list[int]) -> None:
    reply = COMPACT.parse(array(sampled), (RUN, EDIT), prompt_end=NONE)
    assert reply.calls == ()
    assert reply.content.startswith("<call>")


def test_compact_training_masks_what_a_model_samples() -> None:
    messages = [
        Message(role="user", content="q"),
        Message(role="assistant", content="a"),
        Message(role="tool", content="t"),
    ]
    ids, mask = COMPACT.render_training(messages, ())
    assert ids[mask == 1].tolist() == [*b"a", END]
    assert ids.tolist() == [BOS, USER, *b"q", END, ASSISTANT, *b"a", END, 260, *b"t", END]


def test_token_bytes_name_what_an_id_is() -> None:
    assert COMPACT.token_bytes(65) == b"A"
    assert COMPACT.token_bytes(CALL) == b"<call>"
    assert QWEN.token_bytes(TOKENIZER.encode("hello")[0]) == b"hello"
    assert QWEN.token_bytes(0xE2) == b"\xe2"
    assert QWEN.token_bytes(TOKENIZER.control["<think>"]) == b"<think>"


@given(st.text(st.sampled_from("<|im_end>think/tool_cal" + GUARD + "a\n"), max_size=40))
def test_guarded_text_never_gives_a_control_id_and_comes_back(text: str) -> None:
    ids = TOKENIZER.encode("<|im_start|>" + TOKENIZER.guard(text) + "<|im_end|>")
    assert [token for token in ids if token in control] == [
        TOKENIZER.control["<|im_start|>"],
        TOKENIZER.control["<|im_end|>"],
    ]
    assert TOKENIZER.decode(ids[1:-1]) == text
    assert TOKENIZER.unguard(TOKENIZER.guard(text)) == text


def test_an_extension_costs_the_tail_only_and_equals_the_one_of_the_whole_prompt() -> None:
    long = QWEN.render_prompt([Message(role="system", content="x " * 2000), Message(role="user", content="go")], (RUN,))
    sampled = array([*TOKENIZER.encode("ok"), TOKENIZER.control["<|im_end|>"]])
    new = [Message(role="tool", content="A"), Message(role="tool", content="B"), Message(role="user", content="on")]
    short = QWEN.extend(PathTail(long[-64:], sampled, "stop"), new, (RUN,))
    whole = QWEN.extend(PathTail(long, sampled, "stop"), new, (RUN,))
    assert short is not None
    assert whole is not None
    assert short.tolist() == whole.tolist()


def test_what_cannot_be_appended_is_a_branch() -> None:
    prompt = QWEN.render_prompt([Message(role="user", content="go")], ())
    tail = PathTail(prompt[-64:], array([104, TOKENIZER.control["<|im_end|>"]]), "stop")
    assert QWEN.extend(tail, [Message(role="assistant", content="x"), Message(role="user", content="y")], ()) is None


def test_many_threads_encode_alike() -> None:
    from concurrent.futures import ThreadPoolExecutor

    texts = [f"hello Pantom {number} <think> é\n\n" for number in range(64)]
    serial = [TOKENIZER.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(TOKENIZER.encode, texts)) == serial


def test_reading_a_stream_costs_a_constant_per_id_however_long_it_is() -> None:
    family = renderers_family("qwen3", TOKENIZER)
    inner = family._renderers[True]
    read = 0

    class Counting:
        def parse_response(self, ids: list[int], **options: object) -> object:
            nonlocal read
            read += len(ids)
            return inner.parse_response(ids, **options)  # type: ignore[arg-type]

    family._renderers = dict.fromkeys((True, False), Counting())  # type: ignore[arg-type]
    word = TOKENIZER.encode("word ")
    for length in (500, 8000):
        read = 0
        ids = (word * length)[:length]
        parser = family.stream((RUN,), prompt_end=NONE)
        sent = "".join(delta.content + delta.reasoning for at in ids for delta in parser.feed([at]))
        assert len(sent) > 0
        assert read <= 20 * length
        # A reply of control ids calls for a parse at each of them.
        read = 0
        odd = TOKENIZER.encode("a<|box_start|></think><tool_call>")
        parser = family.stream((RUN,), prompt_end=NONE)
        for at in (odd * length)[:length]:
            parser.feed([at])
        assert read <= 30 * length + 4096


def test_settings_inside_a_tokenizer_file_cut_nothing(tmp_path: Path) -> None:
    """Truncation and padding of the file are not ours."""
    description = json.loads(vocabularies.small().to_str())
    description["truncation"] = {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    loaded = load_tokenizer(tmp_path)
    assert len(loaded.encode("q w e r t z u i o p " * 4)) > 40


def test_families_are_found_by_name(tmp_path: Path) -> None:
    assert load_family("compact-bytes").name == "compact-bytes"
    vocabularies.small().save(str(tmp_path / "tokenizer.json"))
    assert isinstance(load_family("qwen3", tokenizer=tmp_path), RenderersFamily)
    with pytest.raises(ConfigError, match=r"needs server\.tokenizer"):
        load_family("qwen3")
    with pytest.raises(ConfigError, match="unknown model family"):
        load_family("no-such-family", tokenizer=tmp_path)
    with pytest.raises(ConfigError, match="unknown model family"):
        load_family("no-such-family")
    with pytest.raises(ConfigError, match="cannot read tokenizer"):
        load_family("qwen3", tokenizer=tmp_path / "missing.json")


class Foreign(CompactFamily):
    """A third party's, which gets the tokenizer's path."""

    def __init__(self, tokenizer: Path | None) -> None:
        self.tokenizer = tokenizer


def test_a_third_partys_family_opens_by_its_path_and_gets_the_tokenizer(tmp_path: Path) -> None:
    family = load_family(f"{__name__}:Foreign", tokenizer=tmp_path)
    assert isinstance(family, Foreign)
    assert family.tokenizer == tmp_path
    with pytest.raises(ConfigError, match=r"server\.family='json:JSONDecoder': .* is not a Family class"):
        load_family("json:JSONDecoder")


def test_an_installed_packages_family_opens_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_family.py").write_text(
        "from tollway.session_server.families.compact import CompactFamily\n"
        "def make(tokenizer):\n    family = CompactFamily()\n    family.name = f'mine {tokenizer}'\n    return family\n"
    )
    installed = tmp_path / "my_family-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: my-family\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[tollway.families]\nmy-model = my_family:make\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_family("my-model", tokenizer=Path("here")).name == "mine here"
    assert ("my-model", "entry point") in {(entry.name, entry.source) for entry in families()}


def test_a_template_that_refuses_is_a_bad_request() -> None:
    with pytest.raises(BadRequest):
        QWEN.render_prompt([], (), RenderOptions())


def test_a_server_starts_without_heavy_libraries() -> None:
    """Importing the server must load no torch, no transformers, no renderers, no tokenizers."""
    code = (
        "import sys, tollway.session_server.server, tollway.session_server.client, tollway.router.service\n"
        "print([m for m in ('torch', 'transformers', 'renderers', 'tokenizers', 'ray', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
