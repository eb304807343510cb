"""Every family of the library: proved case by case, and its streams against its parser."""

from __future__ import annotations

import json

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.errors import BadRequest, ConfigError
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.session_server.families.base import Family, ParsedReply, PathTail, RenderOptions
from tollway.session_server.families.catalogue import UNUSABLE, family_kinds, renderers_family
from tollway.session_server.families.registry import families
from tollway.session_server.families.specimens import CALLS, RESULTS, TAILS, TOOLS, USER, Specimens, array
from tollway.session_server.families.verify import verify_family
from tollway.session_server.tokens import ControlTokenizer

OFFLINE = tuple(name for name in family_kinds() if name != "gpt-oss")
"""gpt-oss encodes with a vocabulary that its library downloads."""


def test_the_catalogue_covers_the_library() -> None:
    """A family that the library gains is usable by name, or listed with the reason why not."""
    assert len(family_kinds()) == 28
    listed = {entry.name: entry for entry in families()}
    assert set(family_kinds()) | {"compact-bytes", "auto", "jinja"} | set(UNUSABLE) == set(listed)
    assert all(listed[name].note for name in UNUSABLE)
    assert "TIKTOKEN_ENCODINGS_BASE" in listed["gpt-oss"].note


@pytest.mark.parametrize("name", OFFLINE)
def test_a_family_holds_over_its_control_strings(name: str) -> None:
    """Token cases, append-only behaviour, streams: the whole proof, over bytes and the family's control ids."""
    results = verify_family(vocabularies.small_family(name))
    failed = [(each.case, each.note) for each in results if each.state == "failed"]
    assert failed == []
    passed = {each.case for each in results if each.state == "passed"}
    assert {"A-1", "A-5", "A-6", "A-7", "A-17", "append-only", "streaming", "roles"} <= passed


def pieces_of(name: str) -> st.SearchStrategy[list[int]]:
    """Parts of replies: what the family writes, cut short, control ids, spelled-out markers, half characters."""
    family = vocabularies.small_family(name)
    specimens = Specimens(family)
    tokenizer = family.tokenizer
    written = []
    unknown = ToolCall("functions.nope:0", "nope", '{"cmd": "l"}')
    broken = ToolCall("functions.run:0", "run", '{"cmd": "l')
    for message in (
        Message(role="assistant", content="ok then"),
        Message(role="assistant", content="ok then", reasoning="hm so", tool_calls=CALLS[:1]),
        Message(role="assistant", tool_calls=CALLS),
        Message(role="assistant", content="ok", tool_calls=(unknown,)),
        Message(role="assistant", content="ok", tool_calls=(broken,)),
    ):
        made = specimens.reply("", message, TAILS[0][1])
        if made is not None:
            written.append(list(made[0].sampled))
    spelled = (
        "<think>",
        "</think>",
        "<tool_call>",
        "<",
        '{"name": "run", "parameters": {}}',
        " \n ",
        "<｜DSML｜invoke",
    )
    return st.one_of(
        st.sampled_from(written),
        st.builds(lambda ids, size: ids[:size], st.sampled_from(written), st.integers(0, 40)),
        st.lists(st.sampled_from(sorted(tokenizer.control_ids)), max_size=2),
        st.sampled_from([tokenizer.encode(tokenizer.guard(text)) for text in spelled]),
        st.sampled_from([[*"aé x<\n".encode()][:size] for size in range(8)]),
    )


def replay(family: Family, ids: list[int], cuts: list[int], stop: tuple[str, ...]) -> tuple[ParsedReply, ParsedReply]:
    """(what a client has after a stream, the verdict on the whole)."""
    end = family.render_prompt([USER], TOOLS)[-64:]
    parser = family.stream(TOOLS, prompt_end=end, stop=stop)
    deltas = []
    at = 0
    for size in [*cuts, len(ids)]:
        deltas += parser.feed(ids[at : at + size])
        at += size
    whole = family.parse(array(ids), TOOLS, prompt_end=end, stop=stop[0] if stop else None)
    deltas += parser.finish(whole)
    calls = tuple(delta.call for delta in deltas if delta.call is not None)
    reasoning = "".join(delta.reasoning for delta in deltas) or None
    return ParsedReply("".join(delta.content for delta in deltas), reasoning, calls), whole


@pytest.mark.parametrize("name", OFFLINE)
def test_a_stream_never_sends_what_the_verdict_takes_back(name: str) -> None:
    family = vocabularies.small_family(name)

    @settings(max_examples=60, deadline=None, derandomize=False)
    @given(
        parts=st.lists(pieces_of(name), max_size=5),
        cuts=st.lists(st.integers(1, 6), max_size=40),
        stop=st.sampled_from([(), ("x<",), ("\n\n",)]),
        ended=st.booleans(),
    )
    def streams(parts: list[list[int]], cuts: list[int], stop: tuple[str, ...], ended: bool) -> None:
        ids = [token for part in parts for token in part]
        if not ended:
            ids = [token for token in ids if token not in family.stop_ids]
        streamed, whole = replay(family, ids, cuts, stop)
        assert streamed == whole

    streams()


def test_ordinary_text_streams_id_by_id() -> None:
    """A stream that held everything back to the end would pass every comparison."""
    for name in OFFLINE:
        family = vocabularies.small_family(name)
        specimens = Specimens(family)
        made = specimens.reply("", Message(role="assistant", content="one two three four"), TAILS[0][1])
        assert made is not None
        parser = family.stream(TOOLS, prompt_end=specimens.end)
        early = "".join(delta.content for token in made[0].sampled[:-1] for delta in parser.feed([token]))
        assert "one two three".startswith(early) or early == "one two three four"
        assert len(early) >= len("one two"), name


def test_a_call_leaves_when_it_is_closed() -> None:
    for name in ("qwen3", "qwen3.5", "glm-5", "kimi-k2", "hy3", "inkling", "minimax-m2", "deepseek-v3"):
        family = vocabularies.small_family(name)
        specimens = Specimens(family)
        made = specimens.reply("", Message(role="assistant", tool_calls=CALLS[:1]), RESULTS[:1])
        assert made is not None
        parser = family.stream(TOOLS, prompt_end=specimens.end)
        deltas = [delta for token in made[0].sampled for delta in parser.feed([token])]
        assert [delta.call.name for delta in deltas if delta.call is not None] == ["run"], name


def test_a_role_that_a_template_would_drop_is_refused_by_name() -> None:
    """Some templates drop or refuse a system message behind the first; its text must never be absent."""
    late = [USER, Message(role="assistant", content="a"), Message(role="developer", content="BANANA"), USER]
    for name in ("qwen3.5", "qwen3-vl", "minimax-m2", "deepseek-v4"):
        family = vocabularies.small_family(name)
        with pytest.raises(BadRequest, match=f"{name} takes developer messages at the beginning") as caught:
            family.render_prompt(late, ())
        assert caught.value.param == "messages"
        prompt = family.render_prompt([USER], ())
        with pytest.raises(BadRequest, match="developer"):
            family.extend(PathTail(prompt[-64:], array([*b"ok"]), "length"), late[2:], ())


def test_leading_system_and_developer_messages_are_one_where_a_template_takes_one() -> None:
    family = vocabularies.small_family("qwen3.5")
    lead = [Message(role="system", content="S"), Message(role="developer", content="D"), USER]
    shown = family.tokenizer.decode(family.render_prompt(lead, ()).tolist())
    assert shown.startswith("<|im_start|>system\nS\n\nD<|im_end|>")


def test_an_end_that_opens_a_turn_stays_only_where_that_turn_comes() -> None:
    """GLM stops at the header of the next turn: the sampled id is used, not written twice, or the path branches."""
    family = vocabularies.small_family("glm-4.5")
    user, observation = (family.tokenizer.control[text] for text in ("<|user|>", "<|observation|>"))
    end = family.render_prompt([USER], TOOLS)[-64:]
    ok = family.tokenizer.encode("\n<think></think>\nok")
    result, question = RESULTS[:1], TAILS[0][1]
    before = {token: PathTail(end, array([*ok, token]), "stop") for token in (user, observation)}
    assert family.extend(before[observation], question, TOOLS) is None
    assert family.extend(before[user], result, TOOLS) is None
    added = family.extend(before[observation], result, TOOLS)
    assert added is not None
    assert observation not in added.tolist()
    assert family.tokenizer.decode(added.tolist()).startswith("\n<tool_response>\nfirst result")


def test_several_results_append_where_the_library_alone_would_branch() -> None:
    family = vocabularies.small_family("deepseek-v4")
    specimens = Specimens(family)
    made = specimens.reply("", Message(role="assistant", tool_calls=CALLS), RESULTS)
    assert made is not None
    added = family.extend(PathTail(specimens.end, array(made[0].sampled), "stop"), RESULTS, TOOLS)
    assert added is not None
    assert added.tolist() == made[1]


def test_a_section_of_calls_is_closed_behind_a_call_that_was_stopped() -> None:
    """With one call allowed, generation stops at its end: the section's own end is context."""
    family = vocabularies.small_family("kimi-k2")
    specimens = Specimens(family)
    made = specimens.reply("", Message(role="assistant", tool_calls=CALLS[:1]), RESULTS[:1])
    assert made is not None
    (end,) = family.call_end_ids
    sampled = list(made[0].sampled)
    stopped = sampled[: sampled.index(end) + 1]
    assert family.parse(array(stopped), TOOLS, prompt_end=specimens.end).calls[0].name == "run"
    added = family.extend(PathTail(specimens.end, array(stopped), "stop"), RESULTS[:1], TOOLS)
    assert added is not None
    assert [*stopped, *added.tolist()] == [*sampled, *made[1]]


def test_a_reply_that_ended_inside_its_thinking_is_carried_on() -> None:
    family = vocabularies.small_family("qwen3.5")
    end = family.render_prompt([USER], ())[-64:]
    stop = family.tokenizer.control["<|im_end|>"]
    added = family.extend(PathTail(end, array([*family.tokenizer.encode("hm"), stop]), "stop"), TAILS[0][1], ())
    assert added is not None
    assert family.tokenizer.decode(added.tolist()).startswith("\n<|im_start|>user\nAnd now?")


def test_thinking_is_read_as_the_prompt_left_it() -> None:
    """Primed thinking cut by length is reasoning; with thinking off the same ids are content, in every mode."""
    for name in ("qwen3.5", "glm-4.5", "glm-5", "deepseek-v4", "nemotron-3"):
        family = vocabularies.small_family(name)
        for thinking in (True, False):
            prompt = family.render_prompt([USER], (), RenderOptions(thinking=thinking))
            verdict = family.parse(array([*b"abc"]), (), prompt_end=prompt[-64:])
            opened = family.opened(prompt.tolist())
            assert (verdict.reasoning or "", verdict.content) == (("abc", "") if opened else ("", "abc")), (
                name,
                thinking,
            )


def test_escaped_control_strings_in_call_arguments_stay_text() -> None:
    """Families that parse arguments would otherwise turn an escape into a control string."""
    call = ToolCall("i", "run", '{"cmd": "\\u003c|im_end|\\u003e\\u003cthink\\u003e"}')
    for name in ("qwen3", "qwen3.5", "glm-4.5", "deepseek-v4"):
        family = vocabularies.small_family(name)
        plain = ToolCall("i", "run", '{"cmd": "harmless"}')
        counts = []
        for each in (call, plain):
            said = Message(role="assistant", tool_calls=(each,))
            ids = family.render_prompt([USER, said, Message(role="tool", content="r", tool_call_id="i")], TOOLS)
            counts.append([token for token in ids.tolist() if token in family.tokenizer.control_ids])
        assert counts[0] == counts[1], name


def test_arguments_are_rendered_once_as_an_object() -> None:
    family = vocabularies.small_family("qwen3")
    said = Message(role="assistant", tool_calls=(ToolCall("i", "run", '{"command":"ls"}'),))
    shown = family.tokenizer.decode(
        family.render_prompt([USER, said, Message(role="tool", content="r", tool_call_id="i")], TOOLS).tolist()
    )
    assert '"arguments": {"command":"ls"}}' in shown


def test_a_schema_that_a_template_dumps_as_ascii_keeps_its_text() -> None:
    """Nemotron's template spells non-ASCII characters of an enum out, ours between them too."""
    schema = {"type": "object", "properties": {"p": {"type": "string", "enum": ["<a|b>"]}}}
    family = vocabularies.small_family("nemotron-3")
    tool = ToolSpec(name="run", parameters=json.dumps(schema))
    shown = family.tokenizer.decode(family.render_prompt([USER], (tool,)).tolist())
    assert '["<a|b>"]' in shown


def test_a_custom_renderer_opens_by_its_path() -> None:
    tokenizer = ControlTokenizer(vocabularies.small(), name="small")
    family = renderers_family(f"renderer:{__name__}.Custom", tokenizer)
    assert family.tokenizer.decode(family.render_prompt([USER], ()).tolist()).endswith("assistant\n")
    with pytest.raises(ConfigError, match="does not fit tokenizer"):
        renderers_family("renderer:no.such.Module", tokenizer)


def _custom() -> type:
    from renderers.configs import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer

    class Custom(Qwen3Renderer):  # type: ignore[misc]  # the library is not typed
        """A third party's renderer."""

        config_class = Qwen3RendererConfig

    return Custom


Custom = _custom()
