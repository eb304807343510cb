"""Forced calls and schemas: what the engine is sent, and that its grammar takes what each family writes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import vocabularies

from tollway.messages import Message, ToolSpec
from tollway.session_server.families.base import RenderOptions
from tollway.session_server.families.compact import CompactFamily
from tollway.session_server.families.formats import TOOL_FORMATS
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.families.specimens import CALLS, RESULTS, TOOLS, USER, Specimens
from tollway.session_server.request import AUTO, ToolChoice

REQUIRED, EDIT = ToolChoice("required"), ToolChoice("named", "edit")
SGLANG = Path(__file__).resolve().parents[3] / ".venv-sglang" / "bin" / "python"
CHECK = """
import json, sys
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts
for line in sys.stdin:
    case = json.loads(line)
    grammar = xgrammar.Grammar.from_structural_tag(case["tag"])
    wrong = [text for text in case["yes"] if not accepts(grammar, text)]
    wrong += [text for text in case["no"] if accepts(grammar, text)]
    print(json.dumps([case["label"], wrong]))
"""


def format_of(value: dict[str, object] | None) -> Any:
    assert value is not None
    (key,) = value
    assert key == "structural_tag"
    tag = json.loads(str(value[key]))
    assert tag["type"] == "structural_tag"
    return tag["format"]


def test_a_named_tool_is_the_only_one_and_required_takes_all() -> None:
    family = vocabularies.small_family("qwen3-vl")
    named = format_of(family.tool_constraint(TOOLS, EDIT, parallel=True))
    assert named["elements"][-1]["stop_after_first"] or named["stop_after_first"]
    closed = family.render_prompt([USER], TOOLS)  # no thinking in it: it may come, or not
    required = format_of(family.tool_constraint(TOOLS, REQUIRED, parallel=True, prompt_end=closed[-64:]))
    text = json.dumps(required)
    assert '"name\\": \\"run' in text.replace("\\\\", "\\")
    assert "edit" in text


def test_the_prompt_says_whether_thinking_may_be_finished_first() -> None:
    """Opened thinking is part of the grammar, closed thinking is not, and where neither stands it is optional."""
    family = vocabularies.small_family("qwen3.5")
    ends = {
        thinking: family.render_prompt([USER], TOOLS, RenderOptions(thinking=thinking))[-64:]
        for thinking in (True, False)
    }
    opened = format_of(family.tool_constraint(TOOLS, REQUIRED, parallel=True, prompt_end=ends[True]))
    assert opened["elements"][0] == {
        "type": "tag",
        "begin": "",
        "content": {"type": "any_text", "excludes": ["<think>", "</think>"]},
        "end": "</think>",
    }
    closed = format_of(family.tool_constraint(TOOLS, REQUIRED, parallel=True, prompt_end=ends[False]))
    assert closed["type"] == "tags_with_separator"
    unknown = format_of(family.tool_constraint(TOOLS, REQUIRED, parallel=True))
    assert unknown["elements"][0]["type"] == "optional"
    schema = '{"type": "object"}'
    assert family.content_constraint(schema, prompt_end=ends[False]) == {"json_schema": schema}
    content = format_of(family.content_constraint(schema, prompt_end=ends[True]))
    assert content["elements"][-1] == {"type": "json_schema", "json_schema": {"type": "object"}}


def test_a_schema_binds_unless_the_tool_says_that_it_is_not_strict() -> None:
    family = vocabularies.small_family("qwen3")
    loose = ToolSpec(name="run", parameters=TOOLS[0].parameters, strict=False)
    for tool, wanted in ((TOOLS[0], json.loads(TOOLS[0].parameters)), (loose, True), (ToolSpec(name="run"), True)):
        text = json.dumps(format_of(family.tool_constraint((tool,), REQUIRED, parallel=True)))
        assert json.dumps({"type": "json_schema", "json_schema": wanted, "style": "json"}) in text


def test_families_whose_calls_have_no_grammar_refuse() -> None:
    assert CompactFamily().tool_constraint(TOOLS, REQUIRED, parallel=True) is None
    assert CompactFamily().content_constraint("{}") == {"json_schema": "{}"}
    for name in ("gemma4", "hy3", "inkling"):
        assert vocabularies.small_family(name).tool_constraint(TOOLS, REQUIRED, parallel=True) is None
    assert "gpt-oss" not in TOOL_FORMATS


def test_the_id_that_ends_a_call_is_known_where_there_is_one() -> None:
    for name, text in (("qwen3", "</tool_call>"), ("kimi-k2", "<|tool_call_end|>"), ("glm-5", "</tool_call>")):
        family = vocabularies.small_family(name)
        assert family.call_end_ids == (family.tokenizer.control[text],)
    for name in ("llama-3", "deepseek-v4", "minimax-m2"):
        assert vocabularies.small_family(name).call_end_ids == ()
    assert CompactFamily().call_end_ids == ()


def written(family: RenderersFamily, count: int) -> str | None:
    """What the family writes for its calls, with nothing before them."""
    specimens = Specimens(family)
    made = specimens.written(Message(role="assistant", tool_calls=CALLS[:count]), RESULTS[:count])
    if made is None:
        return None
    text = family.tokenizer.decode([token for token in made[0] if token not in family.stop_ids])
    form = family.tool_format
    assert form is not None
    start = text.index((form.before or form.begin.partition("{name}")[0].replace("{{", "{")).strip())
    return text[start:]


def cases() -> list[dict[str, Any]]:
    out = []
    strict = [
        ToolSpec(name=tool.name, parameters=json.dumps({**schema, "required": list(schema["properties"])}))
        for tool in TOOLS
        for schema in [json.loads(tool.parameters)]
    ]
    for name, form in TOOL_FORMATS.items():
        family = vocabularies.small_family(name)
        one, two = written(family, 1), written(family, 2)
        assert one is not None
        one, lead = form.before[: len(form.before) - len(form.before.lstrip())] + one, form.after_think
        two = None if two is None else form.before[: len(form.before) - len(form.before.lstrip())] + two

        def case(label: str, value: dict[str, object] | None, yes: list[str], no: list[str], of: str = name) -> None:
            assert value is not None
            out.append({"label": f"{of} {label}", "tag": value["structural_tag"], "yes": yes, "no": no})

        both = [one] if two is None else [one, two]
        case("required", family.tool_constraint(strict, REQUIRED, parallel=True), both, ["hello", ""])
        case("single", family.tool_constraint(strict, REQUIRED, parallel=False), [one], both[1:])
        case("named", family.tool_constraint(strict, EDIT, parallel=True), [], [one])
        free = family.tool_constraint(strict, AUTO, parallel=False)
        case("auto", free, ["hello", one.rstrip()], both[1:])
        if form.think is None:
            continue
        open_end = specimens_end(family, form.think[0])
        forced = family.tool_constraint(strict, REQUIRED, parallel=True, prompt_end=open_end)
        case("thinking", forced, [f"hm{form.think[1]}{lead}{one}"], [f"hm{form.think[1]}", one])
        schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
        bound = family.content_constraint(schema, prompt_end=open_end)
        case("content", bound, [f'hm{form.think[1]}{lead}{{"a": 3}}'], ['{"a": 3}', f"hm{form.think[1]}{lead}no"])
    return out


def specimens_end(family: RenderersFamily, think: str) -> Any:
    """The end of a prompt that has opened thinking."""
    import numpy as np

    return np.array([*family.render_prompt([USER], TOOLS).tolist(), *family.tokenizer.encode(think)], np.int32)


@pytest.mark.slow(60)
def test_the_engines_grammar_takes_what_each_family_writes() -> None:
    """xgrammar compiles every constraint; calls as the template writes them pass, anything else does not."""
    if not SGLANG.exists():
        pytest.skip("tests/contract/sglang_cpu/setup has not made .venv-sglang, which has xgrammar")
    asked = cases()
    done = subprocess.run(
        [str(SGLANG), "-c", CHECK], input="\n".join(map(json.dumps, asked)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [label for label, _ in verdicts] == [case["label"] for case in asked]
    assert [(label, wrong) for label, wrong in verdicts if wrong] == []
