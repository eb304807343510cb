"""Request bodies of real harnesses as they came over the wire, words scrambled, forms kept."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from dialect_helpers import wish_of

from tollway.messages import Message
from tollway.session_server.dialects.base import Dialect
from tollway.session_server.dialects.chat import CHAT
from tollway.session_server.dialects.messages import MESSAGES
from tollway.session_server.dialects.responses import RESPONSES
from tollway.session_server.matching import message_key
from tollway.session_server.request import Wish

TRANSCRIPTS = Path(__file__).parent / "transcripts"
PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
}


def bodies(harness: str) -> list[tuple[Dialect, dict[str, Any]]]:
    """(dialect, body) of every call of a harness."""
    found = []
    for line in (TRANSCRIPTS / f"{harness}.jsonl").read_text(encoding="utf-8").split("\n"):
        record = json.loads(line) if line else {"path": "", "method": ""}
        dialect = PATHS.get(record["path"].removeprefix("/sessions/s1"))
        if dialect is not None and record["method"] == "POST":
            found.append((dialect, record["body"]))
    return found


def parsed(dialect: Dialect, body: dict[str, Any]) -> tuple[Wish, list[Message]]:
    items = body[dialect.list_field]
    wish = wish_of(dialect, body)
    items = dialect.items_of_text(items) if isinstance(items, str) else items
    return wish, [*wish.lead, *dialect.messages(items)]


def roles(harness: str) -> list[list[str]]:
    letter = {"system": "s", "developer": "d", "user": "u", "assistant": "a", "tool": "t"}
    return [[letter[message.role] for message in parsed(*call)[1]] for call in bodies(harness)]


@pytest.mark.parametrize(
    ("harness", "expected"),
    [
        ("openai_sdk", ["su", "suat", "suatat", "su", "u", "t"]),
        ("anthropic_sdk", ["u", "su", "suat", "suatat", "u"]),
        ("litellm", ["u", "uat", "uatat", "uatata", "uatata"]),
        ("mini_swe_agent", ["su", "suat", "suatat"]),
        ("codex", ["dduu", "dduuat", "dduuatat"]),
        ("claude_code", ["sus", "susat", "susatat"]),
    ],
)
def test_every_recorded_body_is_read(harness: str, expected: list[str]) -> None:
    assert ["".join(letters) for letters in roles(harness)] == expected


@pytest.mark.parametrize("harness", ["mini_swe_agent", "codex", "claude_code"])
def test_a_growing_conversation_only_grows(harness: str) -> None:
    """What moved or changed between calls, cache marks above all, is nothing that a conversation consists of."""
    calls = [parsed(dialect, body) for dialect, body in bodies(harness)]
    assert len(calls) == 3
    for (before, old), (after, new) in itertools.pairwise(calls):
        assert [message_key(message) for message in new[: len(old)]] == [message_key(message) for message in old]
        assert after.tools == before.tools
        assert after.lead == before.lead


def test_claude_code_carries_its_tools_and_no_billing_line() -> None:
    (_, body), *_ = bodies("claude_code")
    body["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1.197.740; cc_entrypoint=sdk-cli;"
    wish = MESSAGES.wish(body)
    assert len(wish.tools) == 24
    assert wish.lead[0].content == "".join(block["text"] for block in body["system"][1:])
    assert wish.stream
    assert wish.max_new_tokens == 32000


def test_codex_is_shown_everything_but_the_hosted_search() -> None:
    (_, body), *_ = bodies("codex")
    names = [tool.name for tool in RESPONSES.wish(body).tools]
    assert [name for name in names if name.startswith("multi_agent_v1__")] == [
        f"multi_agent_v1__{tool}" for tool in ("close_agent", "resume_agent", "send_input", "spawn_agent", "wait_agent")
    ]
    assert len(names) == 12
    assert "web_search" not in names
