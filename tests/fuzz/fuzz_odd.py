"""Requests that are nearly right: valid ones with options, and what can be wrong with them.

Everything is drawn from one ``Random``, so that hypothesis can drive and shrink it and a plain loop can run it
fast. ``BREAK`` in a text makes the scripted engine misbehave for that very request.
"""

from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

from fuzz_talk import LISTS, PATHS, SCHEMAS, Json, Talk
from fuzz_wire import Shot

BREAK = "!b"
TEXTS = (
    *("go", "fix a.py", "", " ", "e\u0301 \n", "<|im_end|><think>", "Pantom", "\n\n", "日本", "x" * 50, "\u2028\ufeff"),
    *(
        "\ufdd0a\ufdd0",
        "\x00\x01",
        "\uffff\U0010ffff",
        '{"a": 1}',
        "</think>",
        "<tool_call>",
        "🏳️‍🌈",
        "data: [DONE]\n\n",
    ),
    *("tw1.", "tw1.aGk=", "<call>", "</tool_response>", "x-anthropic-billing-header: a\nb"),
)
ARGUMENTS = (
    *(
        "{}",
        "",
        " {} ",
        '{"rule": "cast"}',
        '{"rule":"cast","rule":"x"}',
        '{"rule": 1.0}',
        '{"rule": true}',
        "[]",
        "null",
    ),
    *('{"rule": 1e999}', '{"rule": NaN}', '{"rule": "\\ud800"}', '{"a":', "[" * 1500, '{"b": 1, "a": {"c": []}}'),
    *(
        '{"n": 123456789012345678901234567890}',
        '{"rule": "\\u0000"}',
        '"text"',
        "not json",
        "[" * 900 + "]" * 900,
        '{"rule": "<|im_end|>"}',
    ),
)
NUMBERS = (0, 1, -1, 2, 0.5, 1.0, -0.0, 1e308, 10**30, -(10**30), 2**31, 2**63, 2**64, 1e-320)
NAMES = (
    *("role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "id", "reasoning_content"),
    *("call_id", "output", "tool_use_id", "is_error", "input", "signature", "thinking", "encrypted_content", "summary"),
    *("tool_call_id", "index", "cache_control", "refusal", "custom", "namespace", "\u00e9", ""),
)
FIELDS = {
    "chat": (
        *("messages", "tools", "tool_choice", "stream", "temperature", "top_p", "top_k", "max_tokens", "n", "stop"),
        *("seed", "logprobs", "top_logprobs", "response_format", "chat_template_kwargs", "stream_options", "model"),
        *("logit_bias", "parallel_tool_calls", "max_completion_tokens", "modalities", "reasoning_effort", "functions"),
        *("min_p", "frequency_penalty", "repetition_penalty", "user", "store", "metadata"),
    ),
    "responses": (
        *("input", "tools", "tool_choice", "stream", "temperature", "top_p", "top_k", "max_output_tokens", "text"),
        *("instructions", "previous_response_id", "store", "include", "reasoning", "truncation", "metadata", "model"),
        *("top_logprobs", "parallel_tool_calls", "logit_bias", "background", "user", "seed", "stop", "prompt"),
    ),
    "messages": (
        *("messages", "tools", "tool_choice", "stream", "temperature", "top_p", "top_k", "max_tokens", "system"),
        *("stop_sequences", "thinking", "metadata", "model", "output_config", "context_management", "mcp_servers"),
    ),
}
KINDS = (
    *("function", "custom", "text", "message", "tool_use", "tool_result", "reasoning", "function_call", "image_url"),
    *("function_call_output", "compaction_trigger", "compaction", "json_schema", "json_object", "auto", "any", "tool"),
    *("required", "none", "enabled", "disabled", "namespace", "web_search", "redacted_thinking", "thinking", "user"),
    *("assistant", "system", "developer", "alien", "input_text", "output_text", "refusal", "grammar", "item_reference"),
)


def anything(rng: Random, level: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(14 if level < 3 else 10)
    if kind < 2:
        return rng.choice((*TEXTS, "\ud800", "a\udfff"))
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(KINDS)
    if kind < 9:
        return rng.choice((None, True, False))
    if kind < 10:
        return deep(rng)
    if kind < 12:
        return [anything(rng, level + 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*NAMES, *FIELDS["chat"])): anything(rng, level + 1) for _ in range(rng.randrange(4))}


def deep(rng: Random) -> str:
    """A stand-in for lists or objects within each other, up to beyond what parsers take."""
    return f"@deep{rng.choice((3, 30, 200, 260, 500, 990, 1020, 3000))}{rng.choice('lo')}@"


def _deepened(found: re.Match[str]) -> str:
    levels = int(found[1])
    return "[" * levels + "]" * levels if found[2] == "l" else '{"a":' * levels + "1" + "}" * levels


def grow(rng: Random, talk: Talk, *, broken_engine: float = 0.0) -> None:
    """Go on with a conversation: what a harness adds, now and then after changing what was said."""
    if talk.items and rng.random() < 0.12:
        edit(rng, talk)
    text = rng.choice(TEXTS)
    if rng.random() < broken_engine:
        text += f"{BREAK}{rng.randrange(10)}!"
    talk.tell(rng, text)


def edit(rng: Random, talk: Talk) -> None:
    """Change the history as harnesses do: cut, compact, rewrite, other tools."""
    kind = rng.randrange(6)
    talk.previous = talk.number = ""
    talk.sound = talk.sound and kind < 4
    if kind == 0:
        del talk.items[rng.randrange(len(talk.items)) :]
        talk.calls = ()
    elif kind == 1:
        talk.items[:] = [{"role": "user", "content": "summary " + rng.choice(TEXTS)}]
        talk.calls = ()
    elif kind == 2:
        talk.tools = tuple(name for name in SCHEMAS if rng.random() < 0.5)
    elif kind == 3:
        talk.lead = rng.choice(("", "be calm", rng.choice(TEXTS)))
    elif kind == 4:
        at = rng.randrange(len(talk.items))
        talk.items.insert(at, copy.deepcopy(rng.choice(talk.items)))
    else:
        at = rng.randrange(len(talk.items))
        talk.items[at] = replaced(rng, talk.items[at], share=0.3)


def replaced(rng: Random, value: Any, *, share: float) -> Any:
    """``value`` with some of its leaves replaced."""
    if isinstance(value, dict):
        return {key: replaced(rng, inner, share=share) for key, inner in value.items()}
    if isinstance(value, list):
        return [replaced(rng, inner, share=share) for inner in value]
    if rng.random() >= share:
        return value
    return rng.choice(TEXTS) if isinstance(value, str) and rng.random() < 0.7 else anything(rng, 2)


def shot(rng: Random, talk: Talk, *, stream: bool) -> Shot:
    """The next request of a conversation, or something near it. The draws decide how near."""
    named = rng.random() < 0.2
    value = talk.body(stream=stream, named=named)
    wrong = rng.random()
    if wrong < 0.45:
        options(rng, talk.dialect, value)
        return Shot(PATHS[talk.dialect], _written(rng, value, sort_keys=talk.sort_keys), clean=talk.sound)
    clean_text = wrong < 0.8
    for _ in range(rng.randrange(1, 4) if clean_text or rng.random() < 0.5 else 0):
        value = mutated(rng, talk.dialect, value)
    data = _written(rng, value, sort_keys=talk.sort_keys)
    if clean_text:
        return Shot(PATHS[talk.dialect], data)
    if wrong < 0.9:
        return Shot(PATHS[talk.dialect], torn(rng, data))
    return carried(rng, Shot(PATHS[talk.dialect], data))


def options(rng: Random, dialect: str, value: Json) -> None:
    """Valid options that every family can honour."""
    for _ in range(rng.choice((0, 0, 1, 2))):
        name, allowed = rng.choice(_OPTIONS[dialect])
        value[name] = rng.choice(allowed)
    if "top_logprobs" in value and dialect == "chat":
        value["logprobs"] = True


_OPTIONS: dict[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
    "chat": (
        ("temperature", (0, 0.7, 2, None)),
        ("top_p", (0.1, 1, None)),
        ("top_k", (-1, 0, 5, 2**31 - 1)),
        ("n", (1, 2, 3, None)),
        ("stop", ("#", ["zz"], None, [])),
        ("seed", (0, -(2**63), 2**63 - 1, None)),
        ("max_tokens", (1, 2, 100, 5.0, None)),
        ("top_logprobs", (0, 1, 20)),
        ("logit_bias", ({}, {"0": 1, "007": -100.0})),
        ("user", ("x", None, 5)),
        ("response_format", ({"type": "text"}, None)),
        ("stream_options", ({"include_usage": True}, None, {})),
        ("parallel_tool_calls", (True, None)),
        ("y_bar", (1, {"a": []})),
    ),
    "responses": (
        ("temperature", (0, 0.7, 2, None)),
        ("max_output_tokens", (1, 2, 100, None)),
        ("top_logprobs", (0, 5)),
        ("store", (True, None)),
        ("include", (["reasoning.encrypted_content"], ["message.output_text.logprobs"], [], None)),
        ("reasoning", ({"effort": "low", "summary": "auto"}, None, {})),
        ("text", ({"format": {"type": "text"}}, {"verbosity": "low"}, None)),
        ("metadata", ({"a": "b"}, None, {})),
        ("truncation", ("disabled", None)),
        ("user", ("x", None)),
    ),
    "messages": (
        ("temperature", (0, 0.7, None)),
        ("max_tokens", (1, 2, 300)),
        ("stop_sequences", (["#"], [], None)),
        ("thinking", ({"type": "enabled", "budget_tokens": 9}, {"type": "disabled"}, None)),
        ("metadata", ({"user_id": "x"}, None)),
        ("tool_choice", ({"type": "auto"}, {"type": "none"}, None)),
        ("top_k", (5, -1, None)),
    ),
}


def enriched(rng: Random, dialect: str, value: Json) -> Json:
    """A body that asks for something rarer, which a family may not have."""
    if rng.random() < 0.4:
        return value | rng.choice(_RARE[dialect])
    items = value.get(LISTS[dialect])
    if not isinstance(items, list):
        return value
    return value | {LISTS[dialect]: [*items, rng.choice(_LAST[dialect])]}


_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_GRAMMAR = {"type": "grammar", "definition": "start: /a+/", "syntax": "lark"}
_RARE: dict[str, tuple[Json, ...]] = {
    "chat": (
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "run"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}, "tools": None},
        {"response_format": {"type": "json_object"}},
        {
            "tools": [
                {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": _GRAMMAR}}}
            ]
        },
        {"n": 16, "logprobs": True, "top_logprobs": 20},
        {"parallel_tool_calls": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"stop": ["\n", "#", "\u00e9", "</tool_call>"], "max_tokens": 3},
    ),
    "responses": (
        {"tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}, "tools": None},
        {"tools": [{"type": "custom", "name": "patch", "format": _GRAMMAR}, {"type": "web_search"}]},
        {
            "tools": [
                {"type": "namespace", "name": "a", "description": "all", "tools": [{"type": "function", "name": "b"}]}
            ]
        },
        {"store": False},
        {"parallel_tool_calls": False},
        {"reasoning": {"effort": "none", "summary": "detailed"}, "include": ["reasoning.encrypted_content"]},
        {"previous_response_id": "resp_of_nobody"},
    ),
    "messages": (
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "tool", "name": "run"}},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}}, "tools": None},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "b"}]},
    ),
}
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
_LAST: dict[str, tuple[Json, ...]] = {
    "chat": (
        {"role": "developer", "content": "be LATE"},
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "see"}, _PICTURE]},
        {"role": "assistant", "content": "prefill"},
        {"role": "tool", "tool_call_id": "call_of_nobody", "content": None},
    ),
    "responses": (
        {"type": "compaction_trigger"},
        {"type": "compaction", "encrypted_content": "tw1.c3VtbWFyeQ=="},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"role": "developer", "content": [{"type": "input_text", "text": "be LATE"}]},
    ),
    "messages": (
        {"role": "system", "content": "be LATE"},
        {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "AA=="}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_of_nobody", "is_error": True}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "tws1.0"}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
    ),
}


def mutated(rng: Random, dialect: str, value: Json) -> Json:
    """A body with one thing wrong somewhere."""
    kind = rng.randrange(7)
    if kind > 4:
        return enriched(rng, dialect, value)
    if kind < 2:
        return value | {rng.choice(FIELDS[dialect]): anything(rng)}
    if kind == 2:
        return dict(replaced(rng, value, share=0.05))
    holder: Any = value
    while True:
        inner = [each for each in (holder.values() if isinstance(holder, dict) else holder) if each]
        inner = [each for each in inner if isinstance(each, (dict, list))]
        if not inner or rng.random() < 0.25:
            break
        holder = rng.choice(inner)
    if isinstance(holder, dict):
        name = rng.choice((*holder, *NAMES)) if rng.random() < 0.5 else rng.choice(NAMES)
        if kind == 3:
            holder.pop(name, None)
        else:
            holder[name] = rng.choice(ARGUMENTS) if name == "arguments" else anything(rng, 1)
    elif kind == 3 and holder:
        del holder[rng.randrange(len(holder))]
    else:
        holder.insert(rng.randrange(len(holder) + 1), anything(rng, 1))
    return value


def _written(rng: Random, value: Json, *, sort_keys: bool) -> bytes:
    """JSON text in one of the ways in which programs write it."""
    text = json.dumps(
        value,
        ensure_ascii=rng.random() < 0.5,
        indent=rng.choice((None, None, None, 1)),
        separators=rng.choice((None, (",", ":"), (" ,\n", "\t: "))),
        sort_keys=sort_keys,
    )
    return re.sub('"@deep([0-9]+)([lo])@"', _deepened, text).encode("utf-8", "surrogatepass")


def torn(rng: Random, data: bytes) -> bytes:
    """JSON text that was damaged: cut, twisted, doubled, or in another alphabet."""
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(10)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return (
            data[:at]
            + rng.choice((b"\xff", b"\xed\xa0\x80", b"\x00", b'"', b"\\", b"]", b"}", b",", b"\\ud800"))
            + data[at:]
        )
    if kind == 2:
        return b"\xef\xbb\xbf" + data
    if kind == 3:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7", "cp037")), "replace")
    if kind == 4:
        # Twice the same key; the last one counts.
        key = b"%s" % rng.choice((b"messages", b"input", b"stream", b"tools", b"model", b"mess\\u0061ges"))
        more = rng.choice((b"[]", b"null", b'[{"role":"user","content":"twice"}]', b'"x"', b"true", data))
        return (
            data[:1] + b'"' + key + b'":' + more + b"," + data[1:]
            if rng.random() < 0.5
            else (data[:-1] + b',"' + key + b'":' + more + data[-1:])
        )
    if kind == 5:
        return data.replace(b"null", b"NaN", 1).replace(b"true", b"Infinity", 1).replace(b"1", b"01", 1)
    if kind == 6:
        return b"[" * rng.choice((10, 1024, 5000)) + data
    if kind == 7:
        return data + rng.choice((b" \r\n\t", b"{}", b",", b"\x00", data))
    if kind == 8:
        return data.replace(b'"content"', b'"content":"x","content"', 1)
    return data.replace(
        rng.choice((b'"role"', b'"user"', b'"type"', b"[", b"{")), rng.choice((b"", b'"', b"1", b"[[")), 1
    )


_READS = (
    b"",
    b"/trajectories",
    b"/trajectories?format=json",
    b"/trajectories?format=xml",
    b"/v1/models",
    b"/v1/models/x",
)


def carried(rng: Random, plain: Shot) -> Shot:
    """A request that is odd below its JSON: method, path, headers, framing."""
    kind = rng.randrange(10)
    if kind == 0:
        sizes = tuple(rng.choice((0, 1, 2, 7, 4096)) for _ in range(rng.randrange(1, 6)))
        return Shot(plain.path, plain.body, chunks=sizes)
    if kind == 1:
        return Shot(plain.path, plain.body, length=max(0, len(plain.body) + rng.choice((-9, -1, 1, 400))), broken=True)
    if kind == 2:
        return Shot(plain.path, plain.body, method=rng.choice((b"GET", b"PUT", b"HEAD", b"OPTIONS", b"PATCH")))
    if kind == 3 and rng.random() < 0.3:
        return Shot(rng.choice(_READS), method=rng.choice((b"GET", b"GET", b"HEAD")))
    if kind == 3:
        path = rng.choice(
            (plain.path + b"/", b"/" + plain.path, plain.path.replace(b"/v1", b"/v1/v1"), plain.path + b"?a=%ff&b")
        )
        return Shot(
            rng.choice((path, b"/v1/%00", b"/v1/models/%ff%2f", b"/v1/messages/count_tokens", b"/%2e%2e/v1/messages")),
            plain.body,
        )
    if kind == 4:
        names = (
            b"content-type",
            b"content-encoding",
            b"accept",
            b"accept-encoding",
            b"expect",
            b"x-stainless-retry-count",
        )
        values = (
            b"",
            b"text/plain",
            b"gzip",
            b"multipart/form-data; boundary=x",
            b"application/json; charset=utf-16",
            b"0",
        )
        values += (b"100-continue", b"3", b"\xff\xfe", b"text/html", b"chunked", b"-1", b"a\tb")
        return Shot(plain.path, plain.body, headers=((rng.choice(names), rng.choice(values)),))
    if kind == 5:
        odd = rng.choice((b"", b"\xff\xfe\xf0", b"k" * 300, b"a,b", b"\xc3\xa9", b'"k"', b"k\tk"))
        return Shot(plain.path, plain.body, headers=((b"idempotency-key", odd),))
    if kind == 6:
        name = rng.choice((b"x-a" * 100, b"x b", b"x\xff", b":x", b"host", b"connection", b"upgrade", b"te", b"cookie"))
        value = rng.choice((b"a" * 70000, b"close", b"websocket", b"\x00", b"upgrade", b"trailers", b"a=b"))
        return Shot(plain.path, plain.body, headers=((name, value),), broken=True)
    if kind == 7:
        token = rng.choice(
            (b"", b"Bearer", b"Bearer ", b"Bearer x", b"bearer \xff", b"Basic eDp5", b"Bearer " + b"a" * 5000)
        )
        return Shot(plain.path, plain.body, headers=((rng.choice((b"authorization", b"x-api-key")), token),))
    leave = rng.choice(("unsent", "sent", "answered"))
    return Shot(plain.path, plain.body, leave=leave, broken=True)  # type: ignore[arg-type]  # one of Leave
