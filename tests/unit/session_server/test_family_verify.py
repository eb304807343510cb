"""The proof itself: every fault that it is there for makes it fail, and the commands say so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import vocabularies

from tollway.cli import main
from tollway.errors import ConfigError
from tollway.messages import Message, ToolSpec
from tollway.records import Ids
from tollway.session_server.families.base import (
    DEFAULT_OPTIONS,
    ParsedReply,
    PathTail,
    RenderOptions,
    StreamDelta,
    StreamParser,
)
from tollway.session_server.families.compact import CompactFamily
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.families.verify import open_family, verify_family
from tollway.session_server.families.vocabularies import real_vocabulary


class Wrapped(RenderersFamily):
    """Qwen3 over the small vocabulary, to be broken in one place."""

    def __init__(self, name: str = "qwen3") -> None:
        good = vocabularies.small_family(name)
        self.__dict__.update(good.__dict__)


class Merges(Wrapped):
    """Encodes the reply again before it looks what follows."""

    def extend(self, tail: PathTail, *rest: Any, **options: Any) -> Ids | None:
        text = self.tokenizer.decode(tail.sampled.tolist())
        added = super().extend(tail, *rest, **options)
        again = self.tokenizer.encode(text)
        return added if added is None or again == tail.sampled.tolist() else added[1:]


class NeverCloses(Wrapped):
    """Appends to a cut reply as if it had ended."""

    def extend(self, tail: PathTail, *rest: Any, **options: Any) -> Ids | None:
        ended = PathTail(tail.prompt_end, np.append(tail.sampled, self.stop_ids[0]).astype(np.int32), "stop")
        return super().extend(ended if tail.sampled[-1] not in self.stop_ids else tail, *rest, **options)


class OneByOne(Wrapped):
    """Renders appended messages one by one."""

    def extend(
        self,
        tail: PathTail,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: RenderOptions = DEFAULT_OPTIONS,
        *,
        history: Sequence[Message] = (),
    ) -> Ids | None:
        if len(messages) < 2:
            return super().extend(tail, messages, tools, options)
        parts = []
        for message in messages:
            added = super().extend(tail, [message], tools, options)
            assert added is not None
            parts.append(added)
        return np.concatenate(parts)


class Trusting(Wrapped):
    """Lets foreign text through as the template's own."""

    def __init__(self) -> None:
        super().__init__()
        from tollway.session_server.families.foreign import ForeignText

        self._foreign = ForeignText(str)


class DropsSystem(Wrapped):
    """Leaves messages out whose role it does not like."""

    def render_prompt(self, messages: Sequence[Message], *rest: Any, **options: Any) -> Ids:
        return super().render_prompt([each for each in messages if each.role != "developer"], *rest, **options)


class Believes(Wrapped):
    """Takes calls to any tool."""

    def parse(self, sampled: Ids, tools: Sequence[ToolSpec], **options: Any) -> ParsedReply:
        return super().parse(sampled, [ToolSpec(name=name) for name in ("run", "edit", "nope")], **options)


class Hasty(Wrapped):
    """Streams what may still become something else."""

    def stream(self, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: Sequence[str] = ()) -> StreamParser:
        family = self

        class Parser(StreamParser):
            def __init__(self) -> None:
                self.sent = ""

            def feed(self, ids: Sequence[int]) -> list[StreamDelta]:
                text = family.tokenizer.decode([token for token in ids if token not in family.stop_ids])
                self.sent += text
                return [StreamDelta(content=text)] if text else []

            def finish(self, reply: ParsedReply) -> list[StreamDelta]:
                return [StreamDelta(call=call) for call in reply.calls]

        return Parser()


class TwoBeginnings(Wrapped):
    """Adds what the template has written already."""

    def render_prompt(self, messages: Sequence[Message], *rest: Any, **options: Any) -> Ids:
        ids = super().render_prompt(messages, *rest, **options)
        return np.concatenate([ids[:1], ids])


class NoSwitch(Wrapped):
    """Has a thinking switch that does nothing."""

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions = DEFAULT_OPTIONS
    ) -> Ids:
        return super().render_prompt(messages, tools, DEFAULT_OPTIONS)

    def extend(
        self,
        tail: PathTail,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: RenderOptions = DEFAULT_OPTIONS,
        *,
        history: Sequence[Message] = (),
    ) -> Ids | None:
        return super().extend(tail, messages, tools, DEFAULT_OPTIONS)


class Strips(Wrapped):
    """Drops text that is no call."""

    def parse(self, sampled: Ids, tools: Sequence[ToolSpec], **options: Any) -> ParsedReply:
        reply = super().parse(sampled, tools, **options)
        return ParsedReply(reply.content.partition("<tool_call>")[0], reply.reasoning, reply.calls)


@pytest.mark.parametrize(
    ("broken", "cases"),
    [
        (Merges, {"A-1", "A-2", "A-4"}),
        (NeverCloses, {"A-6", "A-7", "append-only"}),
        (OneByOne, {"A-18", "append-only"}),
        (Trusting, {"A-17"}),
        (DropsSystem, {"roles"}),
        (Believes, {"unknown tool"}),
        (Hasty, {"streaming"}),
        (TwoBeginnings, {"A-37"}),
        (NoSwitch, {"A-11"}),
        (Strips, {"A-38", "unknown tool"}),
    ],
)
def test_a_fault_fails_its_case_with_the_ids(broken: type[Wrapped], cases: set[str]) -> None:
    results = {each.case: each for each in verify_family(broken())}
    failed = {case for case, each in results.items() if each.state == "failed"}
    assert cases <= failed, {case: results[case].note for case in cases}
    assert all(
        any(character.isdigit() for character in results[case].note) or case == "A-11" for case in cases - {"roles"}
    )


def test_a_wrong_encoder_is_found() -> None:
    family = Wrapped()
    tokenizer = family.tokenizer
    encode = tokenizer._encode_piece
    try:
        tokenizer._encode_piece = lambda text: encode(text.replace("日", "月"))
        results = {each.case: each for each in verify_family(family)}
    finally:
        tokenizer._encode_piece = encode
    assert results["encoder"].state == "failed"
    assert "日本語" in results["encoder"].note


def test_a_family_that_raises_has_failed() -> None:
    class Raises(Wrapped):
        def parse(self, sampled: Ids, tools: Sequence[ToolSpec], **options: Any) -> ParsedReply:
            raise KeyError("arguments")

    notes = {each.case: each.note for each in verify_family(Raises()) if each.state == "failed"}
    assert notes["A-32"] == "KeyError: 'arguments'"


def test_every_token_case_has_a_state_and_those_of_the_server_an_owner() -> None:
    results = verify_family(CompactFamily())
    assert [each.case for each in results[:41]] == [f"A-{row}" for row in range(1, 42)]
    assert [each for each in results if each.state == "failed"] == []
    assert all(each.note for each in results if each.state == "not applicable")
    assert "matching" in results[11].note


def test_the_command_lists_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families"]) == 0
    shown = capsys.readouterr().out
    for text in ("compact-bytes", "qwen3.5", "deepseek-v4", "jinja", "not usable by this name"):
        assert text in shown
    assert main(["families", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["qwen3"]["tools"] == "hermes"
    assert entries["qwen3"]["thinking"] == "switch"
    assert len(entries) == 33


def test_the_command_proves_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-family", "compact-bytes"]) == 0
    shown = capsys.readouterr().out
    assert "0 failed" in shown
    assert "are the server's" in shown
    assert main(["verify-family", "compact-bytes", "--json"]) == 0
    assert {each["state"] for each in json.loads(capsys.readouterr().out)} == {"passed", "not applicable"}


class Broken(CompactFamily):
    """Opened by its path; loses what it is sent."""

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer = tokenizer

    def extend(self, *arguments: Any, **options: Any) -> Ids | None:
        added = super().extend(*arguments, **options)
        return None if added is None else added[:-1]


def test_the_command_exits_non_zero_and_prints_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-family", f"{__name__}:Broken"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "A-5 what the template wants behind a sampled end behind [111, 107," in shown
    assert "a whole rendering has [258, 65" in shown


def test_a_wrong_call_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-family", "qwen3"]) == 2
    assert "server.tokenizer" in capsys.readouterr().err
    assert main(["verify-family", "no-such", "--vocabulary", "qwen3"]) == 2
    assert "unknown model family 'no-such'" in capsys.readouterr().err
    assert main(["verify-family", "qwen3", "--vocabulary", "qwen9"]) == 2
    assert "no real vocabulary 'qwen9'" in capsys.readouterr().err


@pytest.mark.slow(60)
def test_the_command_proves_a_real_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-family", "qwen3", "--vocabulary", "qwen3"]) == 0
    assert "qwen3, 151,669 ids" in capsys.readouterr().out
    assert main(["verify-family", "qwen3", "--tokenizer", str(real_vocabulary("qwen3")), "--json"]) == 0


@pytest.mark.slow(60)
def test_a_family_without_a_vocabulary_of_its_own_gets_its_control_strings() -> None:
    family = open_family("glm-5", vocabulary="qwen3")
    assert isinstance(family, RenderersFamily)
    assert family.vocab_size == 151669 + 10
    with pytest.raises(ConfigError, match="no real vocabulary"):
        open_family("glm-5", vocabulary="glm")
