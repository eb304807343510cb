"""Token identity: the cases that need a template or a vocabulary of their own.

Every case runs through a whole server; the engine's log and the export are what counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from dialect_helpers import TOKENIZER
from dialect_helpers import text as ids
from server_helpers import RUN, ask, post, reasons, rows, say, user
from tokenizers import Tokenizer, processors

from tollway.errors import ContextLengthExceeded
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.session_server.fake import FakeServer
from tollway.session_server.families.base import Family
from tollway.session_server.families.catalogue import renderers_family
from tollway.session_server.families.compact import CompactFamily
from tollway.session_server.families.jinja import ChatTemplate, JinjaFamily
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.families.vocabularies import with_control_strings
from tollway.session_server.tokens import ControlTokenizer, load_tokenizer


@asynccontextmanager
async def serving(folder: Path, family: Family, **settings: object) -> AsyncIterator[FakeServer]:
    async with FakeServer(folder, family=family, settings=settings) as server:
        yield server


def fresh_vocabulary() -> Tokenizer:
    """The small vocabulary as an object that a test may change."""
    return Tokenizer.from_str(vocabularies.small().to_str())


# -- replies -----------------------------------------------------------------------------------------


async def test_a_reply_that_opened_another_turn_than_the_next_one_is_left_behind_whole(tmp_path: Path) -> None:
    """Row 8: GLM stops at the id that opens a tool result; a user message comes."""
    family = vocabularies.small_family("glm-4.5")
    opens = family.tokenizer.control["<|observation|>"]
    async with serving(tmp_path, family) as server:
        sampled = [*family.tokenizer.encode("\n<think></think>\nok"), opens]
        server.engine.script = say(sampled)
        session = await server.client.create()
        reply = await ask(server, session, [user("go")])
        await ask(server, session, [user("go"), reply, user("on")])
        assert reasons(server) == ["root", "rerendered"]
        assert opens not in server.engine.requests[1].input_ids
        one, other = await rows(server, session)
        assert one.token_ids[-len(sampled) :].tolist() == sampled
        assert one.logprobs.size == one.token_ids.size
        assert np.isfinite(one.logprobs[one.loss_mask == 1]).all()
        assert one.loss_mask.sum() == other.loss_mask.sum() == len(sampled)
        # The turn that it opened may come, too.
        result = {"role": "tool", "tool_call_id": "c", "content": "8"}
        await ask(server, session, [user("go"), reply, result])
        third = server.engine.requests[2].input_ids
        assert third[: one.token_ids.size] == one.token_ids.tolist()
        assert third[one.token_ids.size] != opens


# -- templates --------------------------------------------------------------------------------------

OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
STRIPPING = (
    "{% set users = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set users.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > users.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + OPENING
)
"""Thinking shows until a user message follows."""
QUERYING = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}" + OPENING
)
"""Needs a user message."""


def jinja(source: str) -> JinjaFamily:
    return JinjaFamily(TOKENIZER, ChatTemplate(source, values={}))


async def test_a_template_that_drops_old_thinking_branches_and_changes_no_id(tmp_path: Path) -> None:
    """Row 9 as the template has it: every exported row is what the engine received."""
    async with serving(tmp_path, jinja(STRIPPING)) as server:
        server.engine.script = say(ids("<think>r</think>a<|im_end|>"))
        session = await server.client.create()
        reply = await ask(server, session, [user("go")])
        assert (reply["reasoning_content"], reply["content"]) == ("r", "a")
        await ask(server, session, [user("go"), reply, user("on")])
        assert reasons(server) == ["root", "rerendered"]
        first, second = server.engine.requests
        assert "<think>" not in TOKENIZER.decode(second.input_ids)
        one, other = await rows(server, session)
        assert one.token_ids.tolist() == [*first.input_ids, *ids("<think>r</think>a<|im_end|>")]
        assert other.token_ids[: len(second.input_ids)].tolist() == second.input_ids
        assert one.loss_mask.sum() == other.loss_mask.sum() == len(ids("<think>r</think>a<|im_end|>"))


async def test_an_empty_thought_that_was_sent_stays_in_the_history(qwen_server: FakeServer) -> None:
    """Row 10: the template shows it while it is last only; here its bytes are unchanged."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    qwen_server.engine.script = say(ids("ok<|im_end|>"))
    session = await qwen_server.client.create()
    reply = await ask(qwen_server, session, [user("go")], **off)
    await ask(qwen_server, session, [user("go"), reply, user("on")], **off)
    first, second = qwen_server.engine.requests
    assert TOKENIZER.decode(first.input_ids).endswith("<think>\n\n</think>\n\n")
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert len(await rows(qwen_server, session)) == 1


async def test_a_tool_result_is_appended_although_the_template_wants_a_user_message(tmp_path: Path) -> None:
    """Report A12: the suffix is the difference of whole renderings, and nothing fails."""
    family = jinja(QUERYING)
    called = ids('<tool_call>\n{"name": "run", "arguments": {"a": "1"}}\n</tool_call><|im_end|>')
    async with serving(tmp_path, family) as server:
        server.engine.script = say(called, ids("ok<|im_end|>"))
        session = await server.client.create()
        reply = await ask(server, session, [user("go")], [RUN])
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "8"}
        await ask(server, session, [user("go"), reply, result], [RUN])
        first, second = server.engine.requests
        assert second.input_ids[: len(first.input_ids) + len(called)] == first.input_ids + called
        suffix = second.input_ids[len(first.input_ids) + len(called) :]
        assert TOKENIZER.decode(suffix) == "\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"
        status, value = await post(server, session, {"messages": [{"role": "system", "content": "S"}]})
        assert (status, value["error"]["param"]) == (400, "messages")
        assert "No user query" in value["error"]["message"]


SHOWN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
IGNORING = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}" + SHOWN + "{% endif %}{% endfor %}" + OPENING
)
RAISING = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('Unexpected role') }}"
    "{% endif %}" + SHOWN + "{% endfor %}" + OPENING
)


@pytest.mark.parametrize("source", [IGNORING, RAISING], ids=["ignores", "raises"])
@pytest.mark.parametrize("role", ["developer", "system"])
async def test_a_role_that_the_template_would_lose_is_refused_by_name(tmp_path: Path, source: str, role: str) -> None:
    """Report B1."""
    async with serving(tmp_path, jinja(source)) as server:
        session = await server.client.create()
        status, value = await post(server, session, {"messages": [{"role": role, "content": "say BANANA"}, user("hi")]})
        assert status == 400
        assert role in value["error"]["message"]
        assert server.engine.requests == []


# -- what is appended -------------------------------------------------------------------------------


def diff_of_whole_renderings(family: Family, messages: list[Message], tools: list[ToolSpec], suffix: list[int]) -> None:
    """``suffix`` is what a rendering of everything has behind the last reply's end."""
    whole = family.render_prompt(messages, tools).tolist()
    end = TOKENIZER.control["<|im_end|>"]
    assert whole[-len(suffix) :] == suffix
    assert whole[-len(suffix) - 1] == end


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(("tool", "tool"), id="A1-two-results"),
        pytest.param(("tool", "tool", "user"), id="A7-results-then-user"),
        pytest.param(("tool", "tool", "system"), id="A7-results-then-system"),
        pytest.param(("user", "user"), id="two-users"),
    ],
)
async def test_what_is_appended_is_what_a_whole_rendering_has_there(
    qwen_server: FakeServer, qwen: RenderersFamily, tail: tuple[str, ...]
) -> None:
    """Reports A1 and A7: one user block for adjacent results, one opening of a reply, at the very end."""
    called = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    sampled = ids(f"{called}\n{called}<|im_end|>" if "tool" in tail else "ok<|im_end|>")
    qwen_server.engine.script = say(sampled, ids("ok<|im_end|>"))
    session = await qwen_server.client.create()
    reply = await ask(qwen_server, session, [user("go")], [RUN])
    left = [call["id"] for call in reply.get("tool_calls", [])]
    new: list[dict[str, Any]] = []
    for at, role in enumerate(tail):
        named = {"tool_call_id": left.pop(0)} if role == "tool" else {}
        new.append({"role": role, "content": f"text {at}", **named})
    await ask(qwen_server, session, [user("go"), reply, *new], [RUN])
    assert reasons(qwen_server) == ["root", "continuation"]
    first, second = qwen_server.engine.requests
    suffix = second.input_ids[len(first.input_ids) + len(sampled) :]
    calls = tuple(ToolCall(call["id"], "run", "{}") for call in reply.get("tool_calls", []))
    said = Message(role="assistant", content=reply["content"] or "", tool_calls=calls)
    added = [Message(role=each["role"], content=each["content"], tool_call_id=each.get("tool_call_id")) for each in new]
    tool = ToolSpec(name="run", parameters='{"type":"object","properties":{}}')
    diff_of_whole_renderings(qwen, [Message(role="user", content="go"), said, *added], [tool], suffix)
    text = TOKENIZER.decode(suffix)
    assert text.count("<|im_start|>assistant") == 1
    assert text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>user") == tail.count("user") + int("tool" in tail)
    results, _, rest = text.rpartition("</tool_response>")
    assert "<|im_end|>" not in results
    assert all(f"text {at}" in results + rest for at in range(len(tail)))
    (row,) = await rows(qwen_server, session)
    start, end = row.turn_spans[0].end, row.turn_spans[1].start
    assert row.token_ids[start:end].tolist() == suffix
    assert not row.loss_mask[start:end].any()


@pytest.mark.parametrize("limit", [64, 32])
async def test_settings_of_a_tokenizer_file_shorten_no_prompt(tmp_path: Path, limit: int) -> None:
    """Report A8: it says to keep the last 16 ids."""
    backend = fresh_vocabulary()
    backend.enable_truncation(16, direction="left")
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    family = renderers_family("qwen3", load_tokenizer(tmp_path))
    plain = renderers_family("qwen3", TOKENIZER)
    words = user("q w e r t z u i o p a s d f ")
    expected = plain.render_prompt([Message(role="user", content=words["content"])], ()).tolist()
    assert 40 <= len(expected) < 60
    async with serving(tmp_path, family, context_length=limit) as server:
        session = await server.client.create()
        if limit == 64:
            await ask(server, session, [words])
            assert server.engine.requests[0].input_ids == expected
            (row,) = await rows(server, session)
            assert row.token_ids[: len(expected)].tolist() == expected
        else:
            with pytest.raises(ContextLengthExceeded):
                await server.client.chat(session, [words])
            assert server.engine.requests == []


async def test_a_beginning_that_template_and_tokenizer_both_write_is_there_once(tmp_path: Path) -> None:
    """Row 37."""
    backend = with_control_strings(fresh_vocabulary(), "llama-3")
    begin = "<|begin_of_text|>"
    number = backend.token_to_id(begin)
    backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)])
    assert backend.encode("x").ids[0] == number
    family = renderers_family("llama-3", ControlTokenizer(backend, name="llama"))
    async with serving(tmp_path, family) as server:
        server.engine.script = say([*ids("ok"), backend.token_to_id("<|eot_id|>")])
        session = await server.client.create()
        reply = await ask(server, session, [user("go")])
        await ask(server, session, [user("go"), reply, user("on")])
        assert [request.input_ids.count(number) for request in server.engine.requests] == [1, 1]
        assert server.engine.requests[0].input_ids[0] == number


def test_a_mask_for_demonstrations_covers_what_a_model_would_have_sampled_wherever_it_stands() -> None:
    """Report A11: an assistant at the very beginning, and one in the middle that was cut nowhere."""
    family = CompactFamily()
    said = Message(role="assistant", content="A")
    found, mask = family.render_training([said, Message(role="user", content="user")], ())
    assert bytes(found[mask == 1].clip(0, 255).astype(np.uint8))[:1] == b"A"
    assert mask.sum() == 2
    assert not mask[4:].any()
