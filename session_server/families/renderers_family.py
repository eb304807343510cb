"""Model families of the ``renderers`` library behind our interface.

Owns the translation both ways: guarded messages in, checked verdicts out. An extension is taken only when
it provably leaves every earlier id alone; anything the library cannot append is a branch. The library is
imported on first use, it takes seconds. Depends on ``renderers`` and ``tokens``.
"""

from __future__ import annotations

import json
import logging
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tollway.errors import BadRequest, ConfigError
from tollway.messages import Message, ToolSpec
from tollway.records import Ids
from tollway.session_server.families.base import (
    DEFAULT_OPTIONS,
    Family,
    ParsedCall,
    ParsedReply,
    PathTail,
    RenderOptions,
    StreamDelta,
    StreamLedger,
    StreamParser,
    cut_at_stop,
    stable_text,
)
from tollway.session_server.tokens import ControlTokenizer, load_tokenizer

__all__ = ["RenderersFamily", "load_renderers_family"]

logger = logging.getLogger(__name__)
_TEXT_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Markers that some vocabularies spell with ordinary ids."""


class _Renderer(typing.Protocol):
    """What we use of a renderer of the library."""

    def render_ids(
        self, messages: list[dict[str, object]], *, tools: list[dict[str, object]] | None, add_generation_prompt: bool
    ) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None,
    ) -> typing.Any: ...  # a RenderedTokens, which the library does not type for us

    def parse_response(
        self, token_ids: list[int], *, tools: list[dict[str, object]] | None, prompt_ids: list[int] | None
    ) -> typing.Any: ...  # a ParsedResponse

    def get_stop_token_ids(self) -> list[int]: ...


class RenderersFamily(Family):
    """One renderer, with and without thinking, over one tokenizer."""

    def __init__(
        self, name: str, tokenizer: ControlTokenizer, renderers: Mapping[bool, _Renderer], *, thinking: bool
    ) -> None:
        self.name = name
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._renderers = renderers
        self._thinking = thinking if thinking in renderers else next(iter(renderers))
        self.stop_ids = tuple(self._renderers[self._thinking].get_stop_token_ids())
        self.markers = tuple(dict.fromkeys((*tokenizer.control, *_TEXT_MARKERS)))

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions = DEFAULT_OPTIONS
    ) -> Ids:
        """See ``Family``."""
        try:
            ids = self._renderer(options).render_ids(
                self._messages(messages), tools=self._tools(tools), add_generation_prompt=True
            )
        except Exception as error:
            # Templates refuse what they cannot render with all kinds of errors.
            raise BadRequest(f"{self.name} cannot render these messages: {error}", param="messages") from error
        return np.array(ids, np.int32)

    def extend(
        self,
        tail: PathTail,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: RenderOptions = DEFAULT_OPTIONS,
    ) -> Ids | None:
        """See ``Family``. The template's last ids decide, so the cost is that of the new messages."""
        prompt, sampled = tail.prompt_end.tolist(), tail.sampled.tolist()
        before = [*prompt, *sampled]
        try:
            bridge = self._renderer(options).bridge_to_next_turn(
                prompt, sampled, self._messages(messages), tools=self._tools(tools)
            )
        except Exception as error:
            # As in render_prompt; a whole render will say whether the messages are to blame.
            logger.info("%s cannot extend: %s", self.name, error)
            return None
        if bridge is None or list(bridge.token_ids[: len(before)]) != before:
            return None
        return np.array(bridge.token_ids[len(before) :], np.int32)

    def parse(
        self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: str | None = None
    ) -> ParsedReply:
        """See ``Family``.

        Calls count one by one: a malformed one, or one to a tool that was not offered, stays in the
        content as the text that the model wrote.
        """
        reply = self._verdict(sampled.tolist(), tools, prompt_end, final=True)
        return ParsedReply(cut_at_stop(reply.content, stop), reply.reasoning, reply.calls)

    def stream(self, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: Sequence[str] = ()) -> StreamParser:
        """See ``Family``."""
        return _RenderersStream(self, tuple(tools), prompt_end, tuple(stop))

    def token_bytes(self, token: int) -> bytes:
        """See ``Family``."""
        return self._tokenizer.token_bytes(token)

    def _verdict(self, ids: list[int], tools: Sequence[ToolSpec], prompt_end: Ids, *, final: bool) -> ParsedReply:
        """Parse of a whole reply, or of its beginning: then an open call is left out."""
        end = next((at for at, token in enumerate(ids) if token in self.stop_ids), len(ids))
        ids = ids[:end]
        try:
            parsed = self._renderers[self._thinking].parse_response(
                ids, tools=self._tools(tools), prompt_ids=prompt_end.tolist()
            )
        except Exception as error:
            # What a model writes must not break a turn: it becomes text.
            logger.warning("%s cannot parse a reply of %d ids: %s", self.name, len(ids), error)
            return ParsedReply(content=self._tokenizer.decode(ids).strip() if final else "")
        names = {tool.name for tool in tools}
        calls: list[ParsedCall] = []
        content = str(parsed.content)
        for attempt in parsed.tool_calls:
            if not final and str(attempt.status) == "unclosed_block":
                break
            if str(attempt.status) == "ok" and attempt.name in names and isinstance(attempt.arguments, (dict, str)):
                calls.append(ParsedCall(attempt.name, _arguments(attempt.arguments)))
                continue
            span = attempt.token_span
            raw = self._tokenizer.decode(ids[span[0] : span[1]]) if span is not None else attempt.raw
            content += raw
        reasoning = parsed.reasoning_content
        return ParsedReply(content, reasoning.strip() or None if reasoning else None, tuple(calls))

    def _renderer(self, options: RenderOptions) -> _Renderer:
        wanted = self._thinking if options.thinking is None else options.thinking
        if wanted not in self._renderers:
            raise BadRequest(f"{self.name} has no thinking switch", param="chat_template_kwargs")
        return self._renderers[wanted]

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, object]:
        guard = self._tokenizer.guard
        # Templates know no developer role; its text must not be lost.
        role = "system" if message.role == "developer" else message.role
        out: dict[str, object] = {"role": role, "content": guard(message.content)}
        if message.reasoning is not None:
            out["reasoning_content"] = guard(message.reasoning)
        if message.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": guard(call.name), "arguments": guard(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            out["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            out["name"] = guard(message.name)
        return out

    def _tools(self, tools: Sequence[ToolSpec]) -> list[dict[str, object]] | None:
        if not tools:
            return None
        out = []
        for tool in tools:
            function: dict[str, object] = {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters),
            }
            if tool.strict is not None:
                function["strict"] = tool.strict
            guarded = self._guard_all({"type": "function", "function": function})
            out.append(typing.cast("dict[str, object]", guarded))
        return out

    def _guard_all(self, value: object) -> object:
        if isinstance(value, str):
            return self._tokenizer.guard(value)
        if isinstance(value, dict):
            return {self._tokenizer.guard(str(key)): self._guard_all(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._guard_all(inner) for inner in value]
        return value


class _RenderersStream(StreamParser):
    """Re-parses what has arrived, at growing distances, and lets out what is stable."""

    def __init__(
        self, family: RenderersFamily, tools: tuple[ToolSpec, ...], prompt_end: Ids, stops: tuple[str, ...]
    ) -> None:
        self._family = family
        self._tools = tools
        self._prompt_end = prompt_end
        self._stops = stops
        self._ids: list[int] = []
        self._next = 1
        self._ledger = StreamLedger()

    def feed(self, ids: Sequence[int]) -> list[StreamDelta]:
        """See ``StreamParser``."""
        self._ids += ids
        if len(self._ids) < self._next:
            return []
        # The distance grows with the reply, so that all parses together stay linear in it.
        self._next = len(self._ids) + max(1, len(self._ids) // 16)
        reply = self._family._verdict(self._ids, self._tools, self._prompt_end, final=False)
        content = stable_text(self._settled(reply.content), self._stops).rstrip()
        reasoning = self._settled(reply.reasoning or "")
        if content or reply.calls:
            return self._ledger.advance(ParsedReply(content, reply.reasoning, reply.calls))
        return self._ledger.advance(ParsedReply(reasoning=reasoning))

    def finish(self, reply: ParsedReply) -> list[StreamDelta]:
        """See ``StreamParser``."""
        return self._ledger.advance(reply)

    def _settled(self, text: str) -> str:
        """Without unfinished characters, white space at the end, and the beginning of a marker."""
        text = text.rstrip("\ufffd").rstrip()
        for marker in self._family.markers:
            for size in range(min(len(marker) - 1, len(text)), 0, -1):
                if text.endswith(marker[:size]):
                    return text[:-size].rstrip()
        return text


def load_renderers_family(name: str, *, tokenizer: Path | None, thinking: bool) -> RenderersFamily:
    """Build family ``name`` of the library. Raises ``ConfigError``."""
    if tokenizer is None:
        raise ConfigError(f"model family {name!r} needs server.tokenizer: a tokenizer.json or a model directory")
    return renderers_family(name, load_tokenizer(tokenizer), thinking=thinking)


def renderers_family(name: str, tokenizer: ControlTokenizer, *, thinking: bool = True) -> RenderersFamily:
    """Family ``name`` of the library over a given tokenizer. Raises ``ConfigError``."""
    try:
        from renderers.base import create_renderer
        from renderers.configs import RendererConfig
    except ImportError as error:
        raise ConfigError(f"model family {name!r} needs `pip install tollway[renderers]`") from error
    kinds = {kind.model_fields["name"].default: kind for kind in _variants(RendererConfig)}
    kind = kinds.get(name)
    if kind is None:
        known = ", ".join(sorted(str(each) for each in kinds))
        raise ConfigError(f"unknown model family {name!r}; known: compact-bytes, {known}")
    switch = "enable_thinking" in kind.model_fields
    built: dict[bool, _Renderer] = {}
    for wanted in (True, False) if switch else (thinking,):
        fields: dict[str, object] = {"thinking_retention": "all"}
        if switch:
            fields["enable_thinking"] = wanted
        try:
            built[wanted] = create_renderer(tokenizer, kind(**fields))
        except Exception as error:
            # The library asserts and raises freely on vocabularies that are not its model's.
            raise ConfigError(f"family {name!r} does not fit tokenizer {tokenizer.name_or_path}: {error}") from error
    return RenderersFamily(name, tokenizer, built, thinking=thinking)


def _variants(annotation: object) -> list[typing.Any]:
    """Members of a (possibly annotated) union of the library's config classes."""
    args = typing.get_args(annotation)
    if not args:
        return [annotation] if hasattr(annotation, "model_fields") else []
    return [each for arg in args for each in _variants(arg)]


def _arguments(arguments: dict[str, object] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
