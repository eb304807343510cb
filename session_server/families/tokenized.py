"""What all families over a real vocabulary share: roles that a template can take, constraints, thinking marks.

A template that drops a message says nothing: what it does with each role is tried once, and a role that it
would lose is refused by name. Depends on ``foreign``, ``formats`` and ``tokens``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tollway.errors import BadRequest
from tollway.messages import Message, ToolSpec
from tollway.records import Ids
from tollway.session_server.families.base import Family
from tollway.session_server.families.foreign import merge_leading_system
from tollway.session_server.families.formats import Opening, ToolFormat, force_call, force_content
from tollway.session_server.tokens import ControlTokenizer

if TYPE_CHECKING:
    from tollway.session_server.request import ToolChoice

__all__ = ["TokenizedFamily"]


class TokenizedFamily(Family):
    """A family over one ``ControlTokenizer``."""

    source: str
    """Where its template comes from, for listings."""
    switch: bool
    """Whether a request may turn thinking on and off."""
    _takes_system = _late_system = True
    _single_system = False

    def __init__(self, name: str, tokenizer: ControlTokenizer, form: ToolFormat | None) -> None:
        self.name = name
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer = tokenizer
        self.tool_format = form
        self.think = form.think if form is not None else None
        call_end = tokenizer.control.get(form.call_end) if form is not None else None
        self.call_end_ids = () if call_end is None else (call_end,)

    @abstractmethod
    def shown(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """What the template makes of messages, with nothing checked; raises whatever the template raises."""

    def token_bytes(self, token: int) -> bytes:
        """See ``Family``."""
        return self.tokenizer.token_bytes(token)

    def tool_constraint(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, *, parallel: bool, prompt_end: Ids | None = None
    ) -> dict[str, object] | None:
        """See ``Family``. ``auto`` is free text with one call at most, for formats whose calls end in no one id."""
        if self.tool_format is None:
            return None
        opening = self._opening(prompt_end)
        return force_call(self.tool_format, tools, choice, parallel=parallel, opening=opening)

    def content_constraint(self, schema: str, *, prompt_end: Ids | None = None) -> dict[str, object]:
        """See ``Family``."""
        return force_content(self.tool_format, schema, opening=self._opening(prompt_end))

    def opened(self, prompt_end: list[int]) -> bool:
        """Whether a prompt ends inside thinking."""
        return self.think is not None and self.tokenizer.decode(prompt_end[-8:]).rstrip().endswith(self.think[0])

    def _opening(self, prompt_end: Ids | None) -> Opening:
        if self.think is None or prompt_end is None:
            return "free"
        end = prompt_end[-8:].tolist()
        if self.opened(end):
            return "open"
        return "closed" if self.tokenizer.decode(end).rstrip().endswith(self.think[1]) else "free"

    def _learn_roles(self) -> None:
        """Try what the template does with system messages; called once it can render."""
        self._takes_system = self._keeps("system", "user")
        self._late_system = self._keeps("user", "assistant", "system", "user") and self._opens_behind_system()
        self._single_system = not self._keeps("system", "system", "user")

    def _opens_behind_system(self) -> bool:
        """Whether a prompt that ends with a system message still opens the reply."""
        asked = [Message(role="user", content="probe0"), Message(role="assistant", content="probe1")]
        last = (Message(role="user", content="probe2"), Message(role="system", content="probe2"))
        one, other = (self.shown([*asked, message], ()).rpartition("probe2")[2] for message in last)
        return one[-8:] == other[-8:]

    def _accepted(self, messages: Sequence[Message], *, later: bool = False) -> Sequence[Message]:
        """Messages in a form that the template loses none of; ``later``: earlier ones stand before them.

        Raises ``BadRequest`` that names the role.
        """
        if self._single_system and not later:
            messages = merge_leading_system(messages)
        for at, message in enumerate(messages):
            if message.role not in ("system", "developer"):
                continue
            if not self._takes_system:
                raise BadRequest(f"{self.name} takes no {message.role} messages; {_INSTEAD}", param="messages")
            if (at or later) and not self._late_system:
                raise BadRequest(
                    f"{self.name} takes {message.role} messages at the beginning of a conversation only; {_INSTEAD}",
                    param="messages",
                )
        return messages

    def _keeps(self, *roles: str) -> bool:
        """Whether the template shows every message of such a conversation, with tools and without."""
        texts = [f"probe{at}" for at in range(len(roles))]
        probe = [
            Message(role=role, content=text)  # type: ignore[arg-type]  # a literal that mypy sees as str
            for role, text in zip(roles, texts, strict=True)
        ]
        for tools in ((), (ToolSpec(name="probe", parameters='{"type": "object", "properties": {}}'),)):
            try:
                shown = self.shown(probe, tools)
            except Exception:
                # Templates refuse what they cannot render with all kinds of errors.
                return False
            if not all(text in shown for text in texts):
                return False
        return True


_INSTEAD = "send this one as a user message"
