"""Any chat template: the fallback for models that no family of the library covers.

Owns rendering with the environment that ``transformers`` uses and the proof of an extension: the whole
conversation is rendered with and without the new messages, and what is new is appended only when nothing
before it has changed. So a turn costs O(conversation), and a template that rewrites its history branches.
Depends on ``jinja2`` (imported lazily), ``foreign`` and ``textcalls``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tollway.errors import BadRequest, ConfigError
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Ids
from tollway.session_server.families.base import (
    DEFAULT_OPTIONS,
    ParsedReply,
    PathTail,
    RenderOptions,
    StreamParser,
    cut_at_stop,
)
from tollway.session_server.families.foreign import ForeignText
from tollway.session_server.families.formats import TEXT_TOOL_FORMATS
from tollway.session_server.families.stream import ReplyStream
from tollway.session_server.families.textcalls import TEXT_FORMATS, TextFormat, TextReader
from tollway.session_server.families.tokenized import TokenizedFamily
from tollway.session_server.tokens import ControlTokenizer, load_tokenizer

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

__all__ = ["ChatTemplate", "JinjaFamily", "directory_template", "load_jinja_family"]

_PROBE = ToolSpec(
    name="probe_tool",
    parameters='{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}',
)
_PROBE_CALL = ToolCall("call00000", "probe_tool", '{"a": "v", "b": 3}')


class ChatTemplate:
    """A compiled template and what it is rendered with."""

    def __init__(self, source: str, *, values: Mapping[str, object]) -> None:
        """``values``: ``bos_token`` and the like. Raises ``ConfigError`` for a template that does not compile."""
        try:
            from jinja2 import TemplateError

            self._template = _environment().from_string(source)
        except ImportError as error:
            raise ConfigError("family jinja needs `pip install tollway[renderers]`") from error
        except TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._values = dict(values)

    def text(
        self,
        messages: list[dict[str, object]],
        tools: list[dict[str, object]] | None,
        *,
        opening: bool,
        thinking: bool | None,
    ) -> str:
        """The rendered conversation. Raises whatever the template raises."""
        extra: dict[str, object] = {} if thinking is None else {"enable_thinking": thinking}
        return self._template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=opening, **self._values, **extra
        )

    def foreign(self, tokenizer: ControlTokenizer) -> ForeignText:
        """Messages in the form that this template takes. Raises ``ConfigError`` when it shows no text in any."""
        said = [Message(role="user", content="probe0"), Message(role="assistant", tool_calls=(_PROBE_CALL,))]
        plain = [said[0], Message(role="assistant", content="probe1")]
        forms = [ForeignText(tokenizer.guard, objects=objects) for objects in (True, False)]
        forms.append(ForeignText(tokenizer.guard, objects=True, parts=True))
        for messages in (said, plain):
            for form in forms:
                try:
                    text = self.text(form.messages(messages), None, opening=False, thinking=None)
                except Exception:  # noqa: S112  # templates refuse what they cannot render with all kinds of errors
                    continue
                if "probe0" in text and (messages is said or "probe1" in text):
                    return form
        raise ConfigError("this chat template shows no text of a user message and a reply")


class JinjaFamily(TokenizedFamily):
    """One chat template over one tokenizer."""

    needs_history = True
    source = "jinja"

    def __init__(
        self,
        tokenizer: ControlTokenizer,
        template: ChatTemplate,
        *,
        name: str = "jinja",
        calls: str = "",
        stop_ids: Sequence[int] = (),
        thinking: bool = True,
    ) -> None:
        """``calls``: one of ``TEXT_FORMATS``, ``none``, or empty to find out; ``stop_ids``: beside the found one."""
        self._template = template
        self.tokenizer = tokenizer
        self._foreign = template.foreign(tokenizer)
        self._thinks = "<think>" in template.source or "</think>" in template.source
        self.switch = self._has_switch()
        self._thinking = thinking if self.switch else None
        self.name = name
        self.stop_ids = self._find_stops(stop_ids)
        self._calls = self._find_calls(calls)
        super().__init__(name, tokenizer, TEXT_TOOL_FORMATS.get(self._calls.name) if self._calls is not None else None)
        self.think = ("<think>", "</think>") if self._thinks else None
        self._learn_roles()

    # -- rendering ---------------------------------------------------------------------------------

    def shown(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """See ``TokenizedFamily``."""
        return self.tokenizer.unguard(self._text(messages, tools, opening=True, thinking=self._thinking))

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions = DEFAULT_OPTIONS
    ) -> Ids:
        """See ``Family``."""
        return np.array(self._encoded(self._checked(messages, tools, options, opening=True)), np.int32)

    def extend(
        self,
        tail: PathTail,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: RenderOptions = DEFAULT_OPTIONS,
        *,
        history: Sequence[Message] = (),
    ) -> Ids | None:
        """See ``Family``: what follows the last reply's end, when all before it is rendered as it was."""
        self._accepted(messages, later=True)
        if not history or history[-1].role != "assistant":
            return None
        before = self._checked(history, tools, options, opening=False)
        end = self._turn_end(before)
        if end is None:
            return None
        token, at = end
        if tail.sampled.size and int(tail.sampled[-1]) in self.stop_ids and int(tail.sampled[-1]) != token:
            # The reply ended with another id than the template would have put there.
            return None
        whole = self._checked([*history, *messages], tools, options, opening=True)
        if not whole.startswith(before[:at]):
            return None
        return np.array([*self._close(tail, token), *self._encoded(whole[at:])], np.int32)

    def _checked(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions, *, opening: bool
    ) -> str:
        if tools and self._calls is None:
            raise BadRequest(
                f"{self.name}: no known format reads this template's tool calls; "
                f"leave the tools out, or name one: {', '.join(f'jinja:{each}' for each in TEXT_FORMATS)}",
                param="tools",
            )
        if options.thinking is not None and not self.switch:
            raise BadRequest(f"{self.name} has no thinking switch", param="chat_template_kwargs")
        thinking = self._thinking if options.thinking is None else options.thinking
        try:
            return self._text(self._accepted(messages), tools, opening=opening, thinking=thinking)
        except BadRequest:
            raise
        except Exception as error:
            # Templates refuse what they cannot render with all kinds of errors.
            raise BadRequest(f"{self.name} cannot render these messages: {error}", param="messages") from error

    def _encoded(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise BadRequest(f"a message holds half a character: {error}", param="messages") from error

    def _text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, opening: bool, thinking: bool | None
    ) -> str:
        return self._template.text(
            self._foreign.messages(messages), self._foreign.tools(tools), opening=opening, thinking=thinking
        )

    def _turn_end(self, text: str) -> tuple[int, int] | None:
        """(the id that ends the last reply, where its string ends) in a conversation that ends with that reply."""
        last = next(iter(deque(self.tokenizer.control_spans(text), maxlen=1)), None)
        if last is None or last[0] not in self.stop_ids or text[last[1] :].strip():
            return None
        return last

    def _close(self, tail: PathTail, end: int) -> list[int]:
        """Ids that end a reply which did not end itself: thinking first, then the turn."""
        sampled: list[int] = tail.sampled.tolist()
        if sampled and sampled[-1] in self.stop_ids:
            return []
        thinking = self._thinks and self._reader((), tail.prompt_end).read(sampled).channel == "reasoning"
        return [*(self.tokenizer.encode("</think>") if thinking else ()), end]

    # -- replies -----------------------------------------------------------------------------------

    def parse(
        self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: str | None = None
    ) -> ParsedReply:
        """See ``Family``. A malformed call, or one to a tool that was not offered, stays in the content."""
        reply = self._reader(tools, prompt_end).whole(sampled.tolist())
        return ParsedReply(cut_at_stop(reply.content, stop), reply.reasoning, reply.calls)

    def stream(self, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: Sequence[str] = ()) -> StreamParser:
        """See ``Family``."""
        return ReplyStream(self._reader(tools, prompt_end), tuple(stop))

    def _reader(self, tools: Sequence[ToolSpec], prompt_end: Ids) -> TextReader:
        return TextReader(
            self.tokenizer,
            self._calls,
            tools,
            ends=self.stop_ids,
            thinks=self._thinks,
            opened=self.opened(prompt_end.tolist()),
        )

    # -- what the template is like -----------------------------------------------------------------

    def _has_switch(self) -> bool:
        """Whether ``enable_thinking`` makes a difference."""
        if "enable_thinking" not in self._template.source:
            return False
        said = [Message(role="user", content="probe0"), Message(role="assistant", content="probe1", reasoning="probe2")]
        on, off = (
            [self._text(messages, (), opening=True, thinking=wanted) for messages in (said[:1], said)]
            for wanted in (True, False)
        )
        return on != off

    def _find_calls(self, name: str) -> TextFormat | None:
        """The named format, or the first one that reads back a call which the template has written."""
        if name in ("none", *TEXT_FORMATS):
            return TEXT_FORMATS.get(name)
        if name:
            raise ConfigError(f"unknown tool-call format {name!r}; known: none, {', '.join(TEXT_FORMATS)}")
        ask = [Message(role="user", content="probe0")]
        said = Message(role="assistant", tool_calls=(_PROBE_CALL,))
        result = Message(role="tool", content="probe1", tool_call_id=_PROBE_CALL.id, name=_PROBE.name)
        try:
            asked = self._text(ask, (_PROBE,), opening=True, thinking=self._thinking)
            written = self._text([*ask, said], (_PROBE,), opening=False, thinking=self._thinking)
            answered = self._text([*ask, said, result], (_PROBE,), opening=True, thinking=self._thinking)
        except Exception:  # as in _checked
            return None
        if _PROBE.name not in asked or "probe1" not in answered:
            return None
        start = _common(asked, written)
        reply = self.tokenizer.encode(written[start:])
        opened = start == len(asked) and asked.rstrip().endswith("<think>")
        wanted = [(_PROBE.name, json.loads(_PROBE_CALL.arguments))]
        for form in TEXT_FORMATS.values():
            reader = TextReader(self.tokenizer, form, (_PROBE,), ends=self.stop_ids, thinks=self._thinks, opened=opened)
            found = [(call.name, json.loads(call.arguments)) for call in reader.whole(reply).calls]
            if found == wanted:
                return form
        return None

    def _find_stops(self, known: Sequence[int]) -> tuple[int, ...]:
        """The control id that ends a reply in the template, and those that the model directory names."""
        said = [Message(role="user", content="probe0"), Message(role="assistant", content="probe1")]
        try:
            text = self._text(said, (), opening=False, thinking=self._thinking)
        except Exception as error:  # as in _checked
            raise ConfigError(f"{self.name}: the template cannot render a user message and a reply: {error}") from error
        ends = [token for token, _ in self.tokenizer.control_spans(text[text.rfind("probe1") :])]
        stops = dict.fromkeys((*ends[:1], *known))
        if not stops:
            raise ConfigError(
                f"{self.name}: nothing ends a reply in this template, and the model directory names no eos token"
            )
        return tuple(stops)


def load_jinja_family(
    name: str, *, tokenizer: Path | None, chat_template: Path | None = None, thinking: bool = True
) -> JinjaFamily:
    """Family ``jinja`` or ``jinja:FORMAT`` over a model directory, or a tokenizer and a template file.

    Raises ``ConfigError``.
    """
    if tokenizer is None:
        raise ConfigError("family jinja needs server.tokenizer: a model directory or a tokenizer.json")
    directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
    settings = _json_file(directory / "tokenizer_config.json")
    source = _template_source(directory, settings, chat_template)
    control = load_tokenizer(tokenizer)
    template = ChatTemplate(source, values=_named_tokens(settings))
    stops = _json_file(directory / "generation_config.json").get("eos_token_id", [])
    known = [each for each in (stops if isinstance(stops, list) else [stops]) if isinstance(each, int)]
    eos = control.control.get(_named_tokens(settings).get("eos_token", ""))
    known += [] if eos is None else [eos]
    calls = name.partition(":")[2]
    return JinjaFamily(control, template, name=name, calls=calls, stop_ids=known, thinking=thinking)


def directory_template(directory: Path) -> ChatTemplate:
    """The template that a model directory brings. Raises ``ConfigError``."""
    settings = _json_file(directory / "tokenizer_config.json")
    return ChatTemplate(_template_source(directory, settings, None), values=_named_tokens(settings))


def _template_source(directory: Path, settings: Mapping[str, object], chosen: Path | None) -> str:
    """The template that is asked for, or the model directory's own."""
    for file in (chosen,) if chosen is not None else (directory / "chat_template.jinja",):
        if file.is_file():
            return file.read_text(encoding="utf-8")
        if chosen is not None:
            raise ConfigError(f"server.chat_template: {chosen} is no file")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("tool_use") or named.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            f"{directory} has no chat_template.jinja and no chat_template in tokenizer_config.json; "
            "set server.chat_template"
        )
    return found


def _json_file(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _named_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """``bos_token`` and its like, which templates write."""
    out: dict[str, str] = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            out[key] = text
    return out


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _environment() -> SandboxedEnvironment:
    """What ``transformers`` renders chat templates in; the date is that of the start, prompts must not drift."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """``{% generation %}`` marks what a model writes, for masks that are not ours: its body is rendered."""

        tags = {"generation"}  # noqa: RUF012  # the library's own interface

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, **options: object) -> str:
        # HTML escapes, which Jinja's own filter makes, are for web pages.
        chosen = {key: options.get(key) for key in ("indent", "separators")}
        return json.dumps(
            value,
            ensure_ascii=bool(options.get("ensure_ascii", False)),
            sort_keys=bool(options.get("sort_keys", False)),
            **chosen,  # type: ignore[arg-type]  # a template's own choice
        )

    started = datetime.now().astimezone()
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": started.strftime}
    return environment
