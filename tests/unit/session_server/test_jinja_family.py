"""The fallback: any chat template, proved before it appends, refused where it would lose something."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import vocabularies
from tokenizers import AddedToken, Tokenizer

from tollway.errors import BadRequest, ConfigError
from tollway.messages import Message, ToolCall
from tollway.session_server.families.base import PathTail, RenderOptions
from tollway.session_server.families.jinja import ChatTemplate, JinjaFamily
from tollway.session_server.families.registry import load_family
from tollway.session_server.families.specimens import CALLS, RESULTS, TAILS, TOOLS, USER, array
from tollway.session_server.families.verify import verify_family
from tollway.session_server.tokens import ControlTokenizer

TOKENIZER = ControlTokenizer(vocabularies.small(), name="small")
IM_END = TOKENIZER.control["<|im_end|>"]
NEXT = TAILS[0][1]
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set c = call.function %}
            {{- '<tool_call>\\n' + {'name': c.name, 'arguments': c.arguments} | tojson + '\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
THINKING = CHATML.replace(
    "{%- generation %}{{ message.content }}",
    "{%- generation %}{% if loop.last and message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}{{ message.content }}",
).replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think></think>' }}{% endif %}{% endif %}",
)


def family(source: str = CHATML, **options: object) -> JinjaFamily:
    return JinjaFamily(TOKENIZER, ChatTemplate(source, values={}), **options)  # type: ignore[arg-type]


def extended(made: JinjaFamily, sampled: list[int], reply: Message, new: tuple[Message, ...]) -> str | None:
    end = made.render_prompt([USER], ())[-64:]
    added = made.extend(PathTail(end, array(sampled), "stop"), new, (), history=[USER, reply])
    return None if added is None else TOKENIZER.decode(added.tolist())


@pytest.mark.parametrize("source", [CHATML, THINKING], ids=["plain", "thinking"])
def test_a_template_holds_every_case(source: str) -> None:
    results = verify_family(family(source))
    assert [(each.case, each.note) for each in results if each.state == "failed"] == []
    assert {"A-17", "append-only", "streaming", "calls"} <= {each.case for each in results if each.state == "passed"}


def test_a_template_that_leaves_its_history_alone_is_appended_to() -> None:
    made = family()
    ok = TOKENIZER.encode("ok")
    reply = Message(role="assistant", content="ok")
    assert extended(made, [*ok, IM_END], reply, NEXT) == (
        "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert extended(made, ok, reply, NEXT).startswith("<|im_end|>\n<|im_start|>user")  # type: ignore[union-attr]
    ended = [*ok, TOKENIZER.control["<|endoftext|>"]]
    other = family(stop_ids=(TOKENIZER.control["<|endoftext|>"],))
    assert extended(other, ended, reply, NEXT) is None


def test_a_template_that_rewrites_its_history_branches() -> None:
    """Thinking that vanishes when another message comes: earlier ids would change."""
    made = family(THINKING)
    sampled = [*TOKENIZER.encode("<think>hm</think>ok"), IM_END]
    with_thought = Message(role="assistant", content="ok", reasoning="hm")
    assert extended(made, sampled, with_thought, NEXT) is None
    assert extended(made, sampled, Message(role="assistant", content="ok"), NEXT) is not None


def test_without_the_conversation_nothing_is_proved() -> None:
    made = family()
    assert made.needs_history
    tail = PathTail(made.render_prompt([USER], ())[-64:], array([IM_END]), "stop")
    assert made.extend(tail, NEXT, ()) is None
    assert made.extend(tail, NEXT, (), history=[USER]) is None


def test_open_thinking_is_closed_first() -> None:
    made = family(THINKING)
    sampled = TOKENIZER.encode("<think>hm")
    added = extended(made, sampled, Message(role="assistant", content=""), NEXT)
    assert added is not None
    assert added.startswith("</think><|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("'<tool_call>\\n' + {'name': c.name, 'arguments': c.arguments} | tojson + '\\n</tool_call>'", "hermes"),
        ("{'name': c.name, 'parameters': c.arguments} | tojson", "llama-json"),
        ("'[TOOL_CALLS]' + [{'name': c.name, 'arguments': c.arguments}] | tojson", "mistral"),
        ("'[TOOL_CALLS]' + c.name + '[ARGS]' + c.arguments | tojson", "mistral"),
        (
            "'<tool_call>\\n<function=' + c.name + '>\\n<parameter=a>\\n' + c.arguments['a'] + '\\n</parameter>\\n"
            "<parameter=b>\\n' + c.arguments['b'] | string + '\\n</parameter>\\n</function>\\n</tool_call>'",
            "qwen-xml",
        ),
        ("'CALL ' + c.name", None),
    ],
)
def test_the_format_of_calls_is_the_one_that_reads_them_back(written: str, expected: str | None) -> None:
    hermes = "'<tool_call>\\n' + {'name': c.name, 'arguments': c.arguments} | tojson + '\\n</tool_call>'"
    made = family(CHATML.replace(hermes, written))
    found = made._calls.name if made._calls is not None else None
    assert found == expected
    if expected is None:
        with pytest.raises(BadRequest, match="no known format reads this template's tool calls") as caught:
            made.render_prompt([USER], TOOLS)
        assert caught.value.param == "tools"
    else:
        assert made.render_prompt([USER], TOOLS).size > 0


def test_a_format_is_named_or_switched_off() -> None:
    assert family(calls="mistral")._calls.name == "mistral"  # type: ignore[union-attr]
    with pytest.raises(BadRequest, match="jinja:hermes"):
        family(calls="none").render_prompt([USER], TOOLS)
    with pytest.raises(ConfigError, match="unknown tool-call format 'xml'; known: none, hermes"):
        family(calls="xml")


def test_arguments_are_objects_for_templates_that_dump_them() -> None:
    """Text would come out with its quotes doubled, and a model would imitate that."""
    said = Message(role="assistant", tool_calls=(ToolCall("i", "run", '{"command":"ls"}'),))
    shown = TOKENIZER.decode(family().render_prompt([USER, said, *RESULTS[:1]], TOOLS).tolist())
    assert '"arguments": {"command": "ls"}}' in shown


def test_a_control_word_that_is_spelled_out_is_no_call() -> None:
    made = family()
    end = made.render_prompt([USER], TOOLS)[-64:]
    text = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    real = made.parse(array(TOKENIZER.encode(text)), TOOLS, prompt_end=end)
    spelled = made.parse(array(TOKENIZER.encode(TOKENIZER.guard(text))), TOOLS, prompt_end=end)
    assert [call.name for call in real.calls] == ["run"]
    assert (spelled.calls, spelled.content) == ((), text)


def test_what_is_no_call_stays_where_it_was_written() -> None:
    made = family()
    end = made.render_prompt([USER], TOOLS)[-64:]
    good = '<tool_call>{"name": "run", "arguments": {"n": 1}}</tool_call>'
    for bad in ('<tool_call>{"name": "nope"}</tool_call>', "<tool_call>{</tool_call>", "<tool_call>[" * 2000):
        reply = made.parse(array(TOKENIZER.encode(f"a {good}b {bad}")), TOOLS, prompt_end=end)
        assert reply.content == f"a b {bad}".strip()
        assert [call.arguments for call in reply.calls] == ['{"n": 1}']


USERS_ONLY = CHATML.replace("{%- else %}", "{%- elif message.role == 'user' %}")
USER_FIRST = "{%- if messages[0].role != 'user' %}{{ raise_exception('begin with user') }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (USERS_ONLY, [Message(role="developer", content="B"), USER]),
        (USER_FIRST, [Message(role="system", content="B"), USER]),
    ],
    ids=["ignores", "raises"],
)
def test_a_role_that_a_template_ignores_or_refuses_is_named(source: str, messages: list[Message]) -> None:
    with pytest.raises(BadRequest, match=messages[0].role):
        family(source).render_prompt(messages, ())


def test_a_template_that_wants_a_user_message_sees_the_whole_conversation() -> None:
    """A suffix alone has none, the conversation has."""
    source = (
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no user query') }}{% endif %}" + CHATML
    )
    made = family(source)
    said = Message(role="assistant", tool_calls=CALLS[:1])
    sampled = [*TOKENIZER.encode('<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'), IM_END]
    end = made.render_prompt([USER], TOOLS)[-64:]
    added = made.extend(PathTail(end, array(sampled), "stop"), RESULTS[:1], TOOLS, history=[USER, said])
    assert added is not None
    assert "first result" in TOKENIZER.decode(added.tolist())
    with pytest.raises(BadRequest, match="no user query"):
        made.render_prompt([Message(role="system", content="S")], ())


def test_a_template_is_sandboxed() -> None:
    """A model directory is data: its template must not reach the interpreter."""
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        made = ChatTemplate(source, values={})
        with pytest.raises(Exception, match=r"unsafe|immutable|not safely|undefined|is not callable"):
            made.text([{"role": "user", "content": "x"}], None, opening=True, thinking=None)


def test_a_template_that_shows_nothing_or_ends_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}", values={})
    with pytest.raises(ConfigError, match="shows no text"):
        family("{{ '<|im_start|>' }}")
    with pytest.raises(ConfigError, match="nothing ends a reply"):
        family("{% for m in messages %}{{ m.content }}{% endfor %}")


def test_the_thinking_switch_is_there_when_it_makes_a_difference() -> None:
    assert not family().switch
    assert family(THINKING).switch
    assert not family(CHATML + "{# enable_thinking #}").switch
    with pytest.raises(BadRequest, match="no thinking switch"):
        family().render_prompt([USER], (), RenderOptions(thinking=True))


def test_a_model_directory_brings_template_tokens_and_ends(tmp_path: Path) -> None:
    backend = Tokenizer.from_str(vocabularies.small().to_str())
    backend.add_tokens([AddedToken("<s>", normalized=False, special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "chat_template": "{{ bos_token }}" + CHATML,
        "bos_token": {"content": "<s>"},
        "eos_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, 270]}))
    made = load_family("jinja", tokenizer=tmp_path)
    assert isinstance(made, JinjaFamily)
    ids = made.render_prompt([USER], ()).tolist()
    assert ids.count(backend.token_to_id("<s>")) == 1
    assert made.stop_ids == (IM_END, 270)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert backend.token_to_id("<s>") not in load_family("jinja", tokenizer=tmp_path).render_prompt([USER], ()).tolist()
    other = tmp_path / "other.jinja"
    other.write_text(CHATML.replace("user\\n", "human\\n"))
    assert load_family("jinja:none", tokenizer=tmp_path, chat_template=other).name == "jinja:none"
    with pytest.raises(ConfigError, match=r"server\.chat_template: .* is no file"):
        load_family("jinja", tokenizer=tmp_path, chat_template=tmp_path / "missing")
    with pytest.raises(ConfigError, match="is for family jinja"):
        load_family("qwen3", tokenizer=tmp_path, chat_template=other)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_family("jinja", tokenizer=tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"set server\.chat_template"):
        load_family("jinja", tokenizer=tmp_path)
    with pytest.raises(ConfigError, match=r"needs server\.tokenizer"):
        load_family("jinja")


@pytest.mark.all
@pytest.mark.slow(300)
def test_the_templates_of_many_models_hold(tmp_path: Path) -> None:
    """72 templates that trl ships, those that append and those that branch; what cannot be used says so."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "trl==1.16.0"], check=True
    )
    (wheel,) = tmp_path.glob("trl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sources = {
            Path(name).stem: archive.read(name).decode() for name in archive.namelist() if name.endswith(".jinja")
        }
    backend = Tokenizer.from_str(vocabularies.small().to_str())
    control = re.compile(
        r"<\|[a-zA-Z_]+\|>|<｜[^｜]+｜>|<end_of_turn>|<start_of_turn>|<end_of_utterance>|<turn\|>|<\|turn>"
    )
    strings = sorted({text for source in sources.values() for text in control.findall(source)})
    backend.add_tokens([AddedToken(text, normalized=False, special=True) for text in strings])
    tokenizer = ControlTokenizer(backend, name="templates")
    held, appends = [], {}
    for name, source in sources.items():
        try:
            made = JinjaFamily(
                tokenizer, ChatTemplate(source, values={"bos_token": "", "eos_token": "<|im_end|>"}), stop_ids=(IM_END,)
            )
        except ConfigError:
            continue
        results = verify_family(made)
        if any("cannot render a user message, a reply" in each.note for each in results):
            continue  # it writes the end of a reply nowhere, or another one when it is not the last
        assert [(each.case, each.note) for each in results if each.state == "failed"] == [], name
        held.append(name)
        appends[name] = next(each.note for each in results if each.case == "append-only")
    assert len(held) >= 60
    assert "appended" in appends["qwen3_training"]
    assert "branch" in appends["qwen3"]
