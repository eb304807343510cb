"""How families write tool calls and thinking, and the grammars that force them.

Owns one table: family -> tool-call format -> structural tag, the JSON that SGLang hands to xgrammar as the
sampling parameter ``structural_tag``. A constraint covers the whole reply, so thinking that the prompt has
opened is part of it. A family without a row cannot force a call. Depends on the kernel only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tollway.messages import ToolSpec

if TYPE_CHECKING:
    from tollway.session_server.request import ToolChoice

__all__ = ["TEXT_TOOL_FORMATS", "TOOL_FORMATS", "Opening", "ToolFormat", "force_call", "force_content"]

Opening = Literal["open", "closed", "free"]
"""How a prompt leaves thinking: begun, ended (or not existing), or up to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The text of a reply's tool calls; ``{name}`` stands for the tool."""

    name: str
    begin: str
    """Up to the first byte of the arguments."""
    end: str
    style: str = "json"
    """How the arguments are written: a style of xgrammar's ``json_schema`` format."""
    separator: str = "\n"
    """Between two calls."""
    before: str = ""
    """Opens the section of calls."""
    after: str = ""
    """Closes the section of calls."""
    numbered: str = ""
    """What stands between the call's running number and its arguments, in formats that number calls."""
    think: tuple[str, str] | None = ("<think>", "</think>")
    after_think: str = "\n\n"
    """Between thinking and what follows it."""
    single: bool = False
    """Whether a reply holds one call at most."""
    call_end: str = ""
    """The control string that ends one call, where one id does."""


HERMES = ToolFormat(
    name="hermes",
    begin='<tool_call>\n{{"name": "{name}", "arguments": ',
    end="}\n</tool_call>",
    call_end="</tool_call>",
)
QWEN_XML = ToolFormat(
    name="qwen-xml",
    begin="<tool_call>\n<function={name}>\n",
    end="\n</function>\n</tool_call>",
    style="qwen_xml",
    call_end="</tool_call>",
)
NEMOTRON = replace(QWEN_XML, name="nemotron-xml", after_think="\n", after="\n")
GLM_XML = ToolFormat(
    name="glm-xml",
    begin="<tool_call>{name}",
    end="</tool_call>",
    style="glm_xml",
    separator="",
    after_think="",
    call_end="</tool_call>",
)
GLM_LINES = replace(
    GLM_XML, name="glm-xml-lines", begin="<tool_call>{name}\n", end="\n</tool_call>", separator="\n", after_think="\n"
)
LAGUNA_LINES = replace(GLM_LINES, name="laguna-lines", after="\n")
DEEPSEEK_V3 = ToolFormat(
    name="deepseek-v3",
    before="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    after="<｜tool▁calls▁end｜>",
    separator="",
    think=None,
    after_think="",
    call_end="<｜tool▁call▁end｜>",
)
DEEPSEEK_R1 = replace(DEEPSEEK_V3, name="deepseek-r1", think=("<think>", "</think>"))
DEEPSEEK_V4 = ToolFormat(
    name="deepseek-dsml",
    before="\n\n<｜DSML｜tool_calls>\n",
    begin='<｜DSML｜invoke name="{name}">\n',
    end="</｜DSML｜invoke>\n",
    after="</｜DSML｜tool_calls>",
    style="deepseek_xml",
    separator="",
    after_think="",
)
KIMI_K2 = ToolFormat(
    name="kimi-k2",
    before="<|tool_calls_section_begin|>",
    begin="<|tool_call_begin|>functions.{name}:",
    numbered="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    after="<|tool_calls_section_end|>",
    separator="",
    after_think="",
    call_end="<|tool_call_end|>",
)
MINIMAX_M2 = ToolFormat(
    name="minimax-xml",
    before="\n<minimax:tool_call>\n",
    begin='<invoke name="{name}">\n',
    end="</invoke>\n",
    after="</minimax:tool_call>",
    style="minimax_xml",
    separator="",
)
LLAMA_3 = ToolFormat(
    name="llama-json",
    begin='{{"name": "{name}", "parameters": ',
    end="}",
    think=None,
    single=True,
)
TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen3": HERMES,
    "qwen3-vl": HERMES,
    "prime-qwen3": QWEN_XML,
    "qwen3.5": QWEN_XML,
    "qwen3.6": QWEN_XML,
    "qwen3.8": QWEN_XML,
    "nemotron-3": NEMOTRON,
    "nemotron-3-ultra": NEMOTRON,
    "nemotron-3.5": NEMOTRON,
    "glm-4.5": GLM_LINES,
    "glm-5": GLM_XML,
    "glm-5.1": GLM_XML,
    "glm-5.3": GLM_XML,
    "laguna-s-2.1": GLM_XML,
    "laguna-xs-2.1": GLM_XML,
    "laguna-xs.2": LAGUNA_LINES,
    "laguna-m.1": LAGUNA_LINES,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
    "deepseek-v4": DEEPSEEK_V4,
    "kimi-k2": KIMI_K2,
    "kimi-k2.5": KIMI_K2,
    "minimax-m2": MINIMAX_M2,
    "llama-3": LLAMA_3,
}
"""Format by family name."""

TEXT_TOOL_FORMATS: dict[str, ToolFormat] = {each.name: each for each in (HERMES, QWEN_XML, LLAMA_3)}
"""Format by the name under which a chat template's calls are read."""


def force_call(
    form: ToolFormat, tools: Sequence[ToolSpec], choice: ToolChoice, *, parallel: bool, opening: Opening
) -> dict[str, object]:
    """Sampling parameters under which a reply is thinking (as the prompt leaves it) and tool calls.

    ``auto``: free text, with one call at most when they are not ``parallel``. A named tool is called once.
    """
    wanted = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    calls: dict[str, object] = {
        "type": "tags_with_separator",
        "tags": [_tag(form, tool) for tool in wanted],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not parallel or form.single or choice.mode == "named",
    }
    if choice.mode == "auto":
        return _structural([*_thinking(form, opening), _free(form, calls)])
    parts = [calls]
    if form.before:
        parts.insert(0, _const(form.before))
    if form.after:
        parts.append(_const(form.after))
    return _structural([*_thinking(form, opening), *parts])


def _free(form: ToolFormat, calls: dict[str, object]) -> dict[str, object]:
    """Text, and behind the string that opens calls nothing but calls."""
    tags = calls["tags"]
    trigger = form.begin.partition("{name}")[0].replace("{{", "{")
    if form.before.strip():
        trigger = form.before.strip()
        inner = {"type": "tag", "begin": trigger + form.before.rpartition(trigger)[2], "content": calls}
        tags = [{**inner, "end": form.after}]
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "stop_after_first": calls["stop_after_first"],
        "excludes": list(form.think or ()),
    }


def force_content(form: ToolFormat | None, schema: str, *, opening: Opening) -> dict[str, object]:
    """Sampling parameters under which the content behind the thinking follows a JSON schema."""
    thinking = _thinking(form, opening) if form is not None else []
    if not thinking:
        return {"json_schema": schema}
    return _structural([*thinking, {"type": "json_schema", "json_schema": json.loads(schema)}])


def _tag(form: ToolFormat, tool: ToolSpec) -> dict[str, object]:
    schema = True if tool.strict is False else json.loads(tool.parameters) or True
    arguments: dict[str, object] = {"type": "json_schema", "json_schema": schema, "style": form.style}
    content = arguments
    if form.numbered:
        number = {"type": "regex", "pattern": r"\d+"}
        content = {"type": "sequence", "elements": [number, _const(form.numbered), arguments]}
    return {"type": "tag", "begin": form.begin.format(name=tool.name), "content": content, "end": form.end}


def _thinking(form: ToolFormat, opening: Opening) -> list[dict[str, object]]:
    """What may stand before the answer. Where the model may begin to think itself, it need not."""
    if form.think is None or opening == "closed":
        return []
    begin, end = form.think
    thought: dict[str, object] = {
        "type": "tag",
        "begin": "" if opening == "open" else begin,
        "content": {"type": "any_text", "excludes": [begin, end]},
        "end": end,
    }
    parts = [thought, _const(form.after_think)] if form.after_think else [thought]
    if opening == "open":
        return parts
    return [{"type": "optional", "content": {"type": "sequence", "elements": parts}}]


def _const(text: str) -> dict[str, object]:
    return {"type": "const_string", "value": text}


def _structural(elements: list[dict[str, object]]) -> dict[str, object]:
    whole = elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False)}
