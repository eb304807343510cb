"""Model families of the ``renderers`` library behind our interface.

Owns the translation both ways: guarded messages in, checked verdicts out. An extension is taken only when
it provably leaves every earlier id alone; anything the library cannot append is a branch. The library is
imported on first use, it takes seconds. Depends on ``renderers``, ``foreign``, ``formats`` and ``stream``.
"""

from __future__ import annotations

import itertools
import logging
import typing
from collections.abc import Mapping, Sequence

import numpy as np

from tollway.errors import BadRequest
from tollway.messages import Message, ToolSpec
from tollway.records import Ids
from tollway.session_server.families.base import (
    DEFAULT_OPTIONS,
    ParsedCall,
    ParsedReply,
    PathTail,
    RenderOptions,
    StreamParser,
    arguments_text,
    cut_at_stop,
)
from tollway.session_server.families.folding import FoldingTokenizer
from tollway.session_server.families.foreign import ForeignText, plain_tools
from tollway.session_server.families.formats import TOOL_FORMATS
from tollway.session_server.families.stream import Channel, Markers, PartialReader, PartialReply, ReplyStream
from tollway.session_server.families.tokenized import TokenizedFamily

__all__ = ["Renderer", "RenderersFamily", "ReplyReader"]

logger = logging.getLogger(__name__)
_TEXT_MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    *("<｜DSML｜toolcalls>", "<｜DSML｜tool>", "<｜DSML｜invoke", "</｜DSML｜invoke>"),
)
"""Markers that some vocabularies spell with ordinary ids; where they are control ids, spelling them means nothing."""
_THINK = {"hy3": ("<think:opensource>", "</think:opensource>"), "gemma4": ("<|channel>", "<channel|>")}
"""Thinking of families whose calls have no known grammar."""
_HEADERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "inkling": (
        "<|message_model|>",
        ("<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
    ),
    "gpt-oss": ("<|start|>", ("<|message|>",)),
}
"""What opens and what closes the header of a part of a reply."""
_REOPENS = {"gemma4": "<|channel>", "inkling": "<|content_thinking|>"}
"""What may begin thinking again behind an answer, where the parser then forgets the answer."""
_OPENS_NEXT = {"<|user|>": "user", "<|observation|>": "tool"}
"""Ids that end a reply by opening the next turn, and the role of that turn."""
_AFTER_END = {"laguna-m.1": "\n", "laguna-xs.2": "\n"}
"""What stands behind ``</assistant>`` in the template and is missing in the library's extensions."""
_DSML_RESULTS = "</tool_result>\n\n<tool_result>"
"""What DeepSeek-V4's template writes between two tool results."""


_SAMPLE = 64


class Renderer(typing.Protocol):
    """What we use of a renderer of the library."""

    def render_ids(
        self, messages: list[dict[str, object]], *, tools: list[dict[str, object]] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Ids of a whole conversation."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None,
    ) -> typing.Any:  # a RenderedTokens, which the library does not type for us
        """Earlier ids and those of the new messages, or ``None``."""

    def parse_response(
        self, token_ids: list[int], *, tools: list[dict[str, object]] | None, prompt_ids: list[int] | None
    ) -> typing.Any:  # a ParsedResponse
        """Content, reasoning and every attempt at a call."""

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a reply."""


class RenderersFamily(TokenizedFamily):
    """One renderer, with and without thinking, over one tokenizer."""

    def __init__(
        self,
        name: str,
        folding: FoldingTokenizer,
        renderers: Mapping[bool, Renderer],
        *,
        thinking: bool,
        guarded: bool = True,
    ) -> None:
        """``guarded``: foreign text reaches the tokenizer through us; else the renderer keeps it apart itself."""
        tokenizer = folding.inner
        super().__init__(name, tokenizer, TOOL_FORMATS.get(name))
        self._folding = folding
        if self.tool_format is None:
            self.think = _THINK.get(name)
        self.source = "renderers"
        self.switch = len(renderers) == 2
        self._renderers = renderers
        self._thinking = thinking if thinking in renderers else next(iter(renderers))
        self._foreign = ForeignText(tokenizer.guard if guarded else str)
        self.stop_ids = tuple(self._renderers[self._thinking].get_stop_token_ids())
        self.markers = Markers(text for text in _TEXT_MARKERS if text not in tokenizer.control)
        # Gemma's parser takes an open thought back in some replies: it shows once it is closed.
        self.late_thinking = name == "gemma4"
        opens, closes = _HEADERS.get(name, ("", ()))
        self.header = (tokenizer.control.get(opens, -1), frozenset(tokenizer.control.get(text, -1) for text in closes))
        self.probe = tokenizer.encode("x")
        self._strings = {number: text for text, number in tokenizer.control.items()}
        self._after_end = tokenizer.encode(_AFTER_END.get(name, ""))
        self._learn_roles()
        folding.enabled = self._folds()

    def _folds(self) -> bool:
        """Whether this renderer gives the same ids when the middles of long texts are kept from it."""
        text = "a b\nc, " * _SAMPLE
        messages = [Message(role="user", content=text)]
        results = [Message(role="tool", content=text, tool_call_id="call_1"), Message(role="user", content=text)]
        found: list[list[object]] = []
        for folded in (True, False):
            self._folding.enabled = folded
            whole = self.render_prompt(messages, ())
            end = np.array([*self.tokenizer.encode("yes"), *self.stop_ids[:1]], np.int32)
            tail = PathTail(whole[-_SAMPLE:], end, "stop")
            more = [self.extend(tail, new, ()) for new in (results[:1], results[1:])]
            found.append([ids.tolist() if ids is not None else None for ids in (whole, *more)])
        return found[0] == found[1]

    def shown(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """See ``TokenizedFamily``."""
        dicts = self._foreign.messages(messages)
        renderer = self._renderers[self._thinking]
        return self.tokenizer.decode(
            renderer.render_ids(dicts, tools=self._foreign.tools(tools), add_generation_prompt=True)
        )

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions = DEFAULT_OPTIONS
    ) -> Ids:
        """See ``Family``."""
        messages = self._accepted(messages)
        renderer = self._renderer(options)
        dicts, listed = self._foreign.messages(messages), self._foreign.tools(tools)
        try:
            with self._folding.folding():
                ids = self._folding.unfold(renderer.render_ids(dicts, tools=listed, add_generation_prompt=True))
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
        *,
        history: Sequence[Message] = (),
    ) -> Ids | None:
        """See ``Family``. The template's last ids decide, so the cost is that of the new messages."""
        messages = self._accepted(messages, later=True)
        renderer = self._renderer(options)
        prompt, sampled = tail.prompt_end.tolist(), tail.sampled.tolist()
        expected = _OPENS_NEXT.get(self._strings.get(sampled[-1], "")) if sampled else None
        if expected is not None and messages and messages[0].role != expected:
            # The reply ended by opening a turn that does not come: in this context the id would be wrong.
            return None
        closing = self._section_close(sampled)
        try:
            dicts = self._foreign.messages(messages)
            if self.name == "deepseek-v4":
                dicts = _one_result(dicts)
            added = self._bridge(renderer, prompt, [*sampled, *closing], dicts, tools)
            if added is None and sampled and sampled[-1] in self.stop_ids:
                # The reply ended inside its thinking: behind a sampled end nothing can be closed any more.
                think_end = self.tokenizer.control.get("</think>")
                if think_end is not None:
                    added = self._bridge(renderer, prompt, [*sampled[:-1], think_end, sampled[-1]], dicts, tools)
        except Exception as error:
            # As in render_prompt; a whole render will say whether the messages are to blame.
            logger.info("%s cannot extend: %s", self.name, error)
            return None
        if added is None:
            return None
        if sampled and self._strings.get(sampled[-1]) == "</assistant>":
            closing = self._after_end
        return np.array([*closing, *added], np.int32)

    def _bridge(
        self,
        renderer: Renderer,
        prompt: list[int],
        sampled: list[int],
        dicts: list[dict[str, object]],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        before = [*prompt, *sampled]
        with self._folding.folding():
            bridge = renderer.bridge_to_next_turn(prompt, sampled, dicts, tools=self._foreign.tools(tools))
            if bridge is None or list(bridge.token_ids[: len(before)]) != before:
                return None
            return self._folding.unfold(bridge.token_ids[len(before) :])

    def parse(
        self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: str | None = None
    ) -> ParsedReply:
        """See ``Family``.

        Calls count one by one: a malformed one, or one to a tool that was not offered, stays in the
        content as the text that the model wrote.
        """
        reply = ReplyReader(self, tools, prompt_end).whole(sampled.tolist())
        return ParsedReply(cut_at_stop(reply.content, stop), reply.reasoning, reply.calls)

    def stream(self, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: Sequence[str] = ()) -> StreamParser:
        """See ``Family``."""
        return ReplyStream(ReplyReader(self, tools, prompt_end), tuple(stop))

    def renderer_for(self, prompt_end: list[int], ids: list[int]) -> Renderer:
        """The renderer whose mode a reply is in: some take every reply for thinking when theirs is on."""
        if not self.switch or self.think is None:
            return self._renderers[self._thinking]
        if self.opened(prompt_end):
            return self._renderers[True]
        begin = self.tokenizer.control.get(self.think[0])
        first = next((token for token in ids if self.token_bytes(token).strip()), None)
        return self._renderers[begin is None or first == begin]

    def controls_in(self, ids: list[int]) -> list[str]:
        """Strings of the control ids among ``ids``, but for those around thinking, which replies talk about."""
        found = (self._strings[token] for token in self.tokenizer.control_ids.intersection(ids))
        return [text for text in found if text not in (self.think or ())]

    def _section_close(self, sampled: list[int]) -> list[int]:
        """What closes the section of calls when generation was stopped at the end of its first call."""
        if not sampled or self.tool_format is None or sampled[-1] not in self.call_end_ids:
            return []
        return self.tokenizer.encode(self.tool_format.after) if self.tool_format.after.strip() else []

    def _renderer(self, options: RenderOptions) -> Renderer:
        wanted = self._thinking if options.thinking is None else options.thinking
        if wanted not in self._renderers:
            raise BadRequest(f"{self.name} has no thinking switch", param="chat_template_kwargs")
        return self._renderers[wanted]


class ReplyReader(PartialReader):
    """Reads the replies to one prompt through the library."""

    def __init__(self, family: RenderersFamily, tools: Sequence[ToolSpec], prompt_end: Ids) -> None:
        self._family = family
        self._tools = plain_tools(tools)
        self._names = {tool.name for tool in tools}
        self._prompt_end: list[int] = prompt_end.tolist()
        self.markers = family.markers
        self.control_ids = family.tokenizer.control_ids
        # Harmony's stop behind a call closes it: the parser wants to see it.
        self.ends = frozenset(family.stop_ids) - {family.tokenizer.control.get("<|call|>", -1)}
        self.probe = family.probe

    def text(self, ids: list[int]) -> bytes:
        """See ``PartialReader``."""
        return b"".join(map(self._family.tokenizer.token_bytes, ids))

    def waits(self, content: str) -> bool:
        """See ``PartialReader``: bare JSON may be a call."""
        form = self._family.tool_format
        return form is not None and form.single and bool(self._names) and content.lstrip()[:1] in ("", "{", "<")

    def whole(self, ids: list[int]) -> ParsedReply:
        """The verdict on a finished reply: an attempt that is no call is the text that the model wrote."""
        ids = self._before_end(ids)
        parsed = self._parse(ids)
        if parsed is None:
            logger.warning("%s cannot parse a reply of %d ids; it becomes text", self._family.name, len(ids))
            return ParsedReply(self._family.tokenizer.decode(ids).strip())
        calls: list[ParsedCall] = []
        content = str(parsed.content).strip()
        for attempt in parsed.tool_calls:
            if (call := self._call(attempt)) is not None:
                calls.append(call)
                continue
            span = attempt.token_span
            content += self._family.tokenizer.decode(ids[span[0] : span[1]]) if span is not None else attempt.raw
        for text in self._behind_calls(ids, [attempt.token_span for attempt in parsed.tool_calls]):
            content += text if text.strip() not in content else ""
        return ParsedReply(content.rstrip(), _stripped(parsed.reasoning_content), tuple(calls))

    def _behind_calls(self, ids: list[int], spans: Sequence[tuple[int, int] | None]) -> list[str]:
        """Texts between calls and behind the last one, which parsers of some families drop."""
        known = sorted(span for span in spans if span is not None)
        found = []
        for (_, start), (end, _) in itertools.pairwise([*known, (len(ids), len(ids))]):
            gap = [token for token in ids[start:end] if token not in self.control_ids]
            text = self._family.tokenizer.decode(gap)
            if text.strip():
                found.append(text.rstrip())
        return found

    def read(self, ids: list[int]) -> PartialReply:
        """See ``PartialReader``. Left out is what the library takes back when more arrives."""
        whole = self._before_end(ids)
        ids = self._before_header(whole)
        parsed = self._parse(ids)
        if parsed is None:
            return PartialReply(ParsedReply(), "unknown")
        said = str(parsed.content).strip(), (parsed.reasoning_content or "").strip()
        present = self._family.controls_in(ids)
        content, reasoning = (_before_any(text, present) for text in said)
        channel: Channel = "unknown"
        if (content, reasoning) == said and len(ids) == len(whole):
            channel = _channel(parsed)
        if parsed.reasoning_complete is False and self._family.late_thinking:
            return PartialReply(ParsedReply(), "unknown")
        if parsed.reasoning_complete is False and content:
            reasoning = ""  # it began again behind an answer: a matter of the verdict on the whole
        if parsed.tool_calls and self._may_still_think(ids, parsed.reasoning_content):
            return PartialReply(ParsedReply(reasoning=_stripped(reasoning)), "unknown")
        calls = tuple(call for attempt in parsed.tool_calls if (call := self._call(attempt)) is not None)
        return PartialReply(ParsedReply(content, _stripped(reasoning), calls), channel)

    def _parse(self, ids: list[int]) -> typing.Any:
        family = self._family
        if family.name == "llama-3":
            # Its parser drops whatever stands before a header that a model may write itself.
            ids = [token for token in ids if token != family.tokenizer.control.get("<|end_header_id|>")]
        try:
            renderer = family.renderer_for(self._prompt_end, ids)
            parsed = renderer.parse_response(ids, tools=self._tools, prompt_ids=self._prompt_end)
            reopens = family.tokenizer.control.get(_REOPENS.get(family.name, ""))
            at = len(ids)
            while parsed.reasoning_complete is False and reopens in ids[:at]:
                at -= 1 + ids[:at][::-1].index(reopens)
                earlier = renderer.parse_response(ids[:at], tools=self._tools, prompt_ids=self._prompt_end)
                if earlier.reasoning_complete and (earlier.content or earlier.tool_calls):
                    earlier.reasoning_content, earlier.reasoning_complete = parsed.reasoning_content, False
                    return earlier
            return parsed
        except Exception as error:
            # What a model writes must not break a turn. A stream asks often: the verdict on the whole warns.
            logger.debug("%s cannot parse %d ids: %r", family.name, len(ids), error)
            return None

    def _call(self, attempt: typing.Any) -> ParsedCall | None:
        """The call that an attempt is, if it is well-formed and names a tool that was offered."""
        if str(attempt.status) != "ok" or attempt.name not in self._names:
            return None
        arguments = attempt.arguments
        if isinstance(arguments, dict):
            try:
                arguments = arguments_text(arguments)
            except ValueError:
                return None
        return ParsedCall(attempt.name, arguments) if isinstance(arguments, str) else None

    def _before_end(self, ids: list[int]) -> list[int]:
        return ids[: min(map(ids.index, self.ends.intersection(ids)), default=len(ids))]

    def _before_header(self, ids: list[int]) -> list[int]:
        """Without a header that is not finished: its text would pass for content."""
        opens, closes = self._family.header
        for at in range(len(ids) - 1, -1, -1) if closes else ():
            if ids[at] in closes:
                return ids
            if ids[at] == opens:
                return ids[:at]
        return [] if closes and self._prompt_end[-1:] == [opens] else ids

    def _may_still_think(self, ids: list[int], reasoning: str | None) -> bool:
        """Whether thinking that a call seems to have ended may be closed explicitly: then there was no call."""
        family, think = self._family, self._family.think
        if think is None:
            return False
        begin, end = (family.tokenizer.control.get(text) for text in think)
        text = "" if begin is not None and end is not None else family.tokenizer.decode(ids)
        if end in ids or (end is None and think[1] in text):
            return False
        return reasoning is not None or begin in ids or think[0] in text or family.opened(self._prompt_end)


def _one_result(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Neighbouring tool results as one, joined as the template joins them.

    DeepSeek-V4's renderer refuses to append several at once, since the reference sorts them by the call they
    answer; here they stand in the order of the request.
    """
    out: list[dict[str, object]] = []
    for message in messages:
        if out and message["role"] == "tool" and out[-1]["role"] == "tool":
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}{_DSML_RESULTS}{message['content']}"}
        else:
            out.append(message)
    return out


def _channel(parsed: typing.Any) -> Channel:
    if parsed.tool_calls:
        return "call" if str(parsed.tool_calls[-1].status) == "unclosed_block" else "unknown"
    return "unknown" if parsed.reasoning_complete is None else "content" if parsed.reasoning_complete else "reasoning"


def _stripped(text: str | None) -> str | None:
    return (text or "").strip() or None


def _before_any(text: str, strings: Sequence[str]) -> str:
    """``text`` up to the first of ``strings``: control ids that show in text are not understood yet."""
    at = min((at for at in map(text.find, strings) if at >= 0), default=len(text))
    return text if at == len(text) else text[:at].rstrip()
