"""Family ``auto``: which family a model directory belongs to, or a refusal.

The chat template of the directory is the witness: a family is chosen when it renders conversations as
that template does. A model type decides only for models that have no template. Depends on
``catalogue`` and ``jinja``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from tollway.errors import BadRequest, ConfigError
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.session_server.families.base import RenderOptions
from tollway.session_server.families.catalogue import family_kinds, renderers_family
from tollway.session_server.families.jinja import ChatTemplate, directory_template
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.tokens import ControlTokenizer, load_tokenizer

__all__ = ["detect_family"]

logger = logging.getLogger(__name__)
_WITHOUT_TEMPLATE = {"deepseek_v4": "deepseek-v4"}
"""Model types that ship no chat template."""
_TOOL = ToolSpec(
    name="run",
    description="Runs it.",
    parameters='{"type": "object", "properties": {"cmd": {"type": "string"}, "env": {"type": "object"}}}',
)
_CALL = ToolCall("functions.run:0", "run", '{"cmd": "ls", "env": {"a": [1, true, "x"]}, "force": true, "rest": null}')
_SYSTEM, _USER = Message(role="system", content="Be brief."), Message(role="user", content="List it.")
_ASKED = [_SYSTEM, _USER, Message(role="assistant", reasoning="Hm.", content="I do.", tool_calls=(_CALL,))]
_DONE = Message(role="tool", content="a.txt", tool_call_id=_CALL.id, name="run")
_TOLD, _THANKS = Message(role="assistant", content="One file."), Message(role="user", content="Thanks.")
_CONVERSATIONS: tuple[tuple[Sequence[Message], Sequence[ToolSpec]], ...] = (
    ([_USER], ()),
    ([_SYSTEM, _USER], ()),
    ([_USER], (_TOOL,)),
    ([*_ASKED, _DONE], (_TOOL,)),
    ([*_ASKED, _DONE, _TOLD, _THANKS], (_TOOL,)),
)


def detect_family(tokenizer: Path | None) -> str:
    """Name of the family whose rendering equals that of the model directory's own chat template.

    Raises ``ConfigError`` when there is none, more than one, or nothing to compare with.
    """
    if tokenizer is None or not tokenizer.is_dir():
        raise ConfigError('server.family="auto" needs server.tokenizer to be a model directory; name the family')
    kind = _model_type(tokenizer)
    try:
        template = directory_template(tokenizer)
    except ConfigError as error:
        if kind in _WITHOUT_TEMPLATE:
            return _WITHOUT_TEMPLATE[kind]
        raise ConfigError(f'server.family="auto": {error}; model_type {kind!r} alone decides nothing') from error
    control = load_tokenizer(tokenizer)
    names = [name for name in family_kinds() if _renders_alike(name, control, template)]
    if len(names) == 1:
        logger.info("%s is of family %s", tokenizer, names[0])
        return names[0]
    found = f"several families render like it: {', '.join(names)}" if names else "no family renders like its template"
    raise ConfigError(
        f'server.family="auto": {tokenizer} (model_type {kind!r}): {found}; name one, or use jinja for the template'
    )


def _renders_alike(name: str, control: ControlTokenizer, template: ChatTemplate) -> bool:
    """Whether the family and the template agree on every conversation."""
    try:
        family = renderers_family(name, control)
    except ConfigError:
        return False
    return any(
        all(_same(family, template, conversation, tools, thinking) for conversation, tools in _CONVERSATIONS)
        for thinking in ((True, False) if family.switch else (None,))
    )


def _same(
    family: RenderersFamily,
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    thinking: bool | None,
) -> bool:
    """Whether both give the same text and control ids; a conversation that both refuse is no difference.

    Ids are not compared one by one: some families cut a written reply before its first call, which a model never saw.
    """
    control = family.tokenizer
    foreign = template.foreign(control)
    try:
        text = template.text(foreign.messages(messages), foreign.tools(tools), opening=True, thinking=None)
        wanted: str | None = control.decode(control.encode(text))
    except Exception:
        # Templates refuse what they cannot render with all kinds of errors.
        wanted = None
    try:
        found: str | None = control.decode(
            family.render_prompt(messages, tools, RenderOptions(thinking=thinking)).tolist()
        )
    except BadRequest:
        found = None
    return wanted == found


def _model_type(directory: Path) -> str:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
