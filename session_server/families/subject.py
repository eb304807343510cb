"""A family on trial: its specimens, what it makes of them, and how a verdict is said.

Depends on ``specimens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from tollway.messages import Message, ToolSpec
from tollway.session_server.families.base import Family, ParsedReply, PathTail, RenderOptions
from tollway.session_server.families.specimens import CALLS, RESULTS, TAILS, USER, Reply, Specimens, array
from tollway.session_server.families.tokenized import TokenizedFamily

__all__ = ["Check", "Failed", "NotApplicable", "Subject", "text_of"]

Check = Callable[["Subject"], str]
"""Returns what was found; raises ``Failed`` or ``NotApplicable``."""


class Failed(Exception):
    """A check did not hold; the message has the ids."""


class NotApplicable(Exception):
    """This family or vocabulary has no such case; the message says why."""


class Subject:
    """The family under test with its specimens."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.specimens = Specimens(family)
        self.plain = self._made("plain", Message(role="assistant", content="ok then"), TAILS[0][1])
        self.call = self._made("call", Message(role="assistant", tool_calls=CALLS[:1]), RESULTS[:1])

    def _made(self, label: str, message: Message, new: Sequence[Message]) -> tuple[Reply, list[int]] | None:
        return self.specimens.reply(label, message, new)

    def both_called(self) -> tuple[Reply, list[int]]:
        """A reply with two calls and what follows it."""
        made = self._made("calls", Message(role="assistant", tool_calls=CALLS), RESULTS)
        if made is None or not self.specimens.tools:
            raise NotApplicable("this family takes no two calls in a reply")
        return made

    @property
    def tokenized(self) -> TokenizedFamily:
        """The family, when it has a tokenizer that can be asked."""
        if not isinstance(self.family, TokenizedFamily):
            raise NotApplicable("this family has no tokenizer of text")
        return self.family

    def answered(self) -> tuple[Reply, list[int]]:
        """The plain reply and what follows it."""
        if self.plain is None:
            raise Failed("the family cannot render a user message, a reply and another user message")
        return self.plain

    def called(self) -> tuple[Reply, list[int]]:
        """The reply with one call and what follows it."""
        if self.call is None or not self.specimens.tools:
            raise NotApplicable("this family takes no tools")
        return self.call

    def extend(
        self,
        sampled: Sequence[int],
        new: Sequence[Message],
        *,
        reply: Message,
        finish: Literal["stop", "length"] = "stop",
        options: RenderOptions | None = None,
    ) -> list[int] | None:
        """Ids behind a reply, ``None`` for a branch."""
        added = self.family.extend(
            PathTail(self.specimens.end, array(sampled), finish), new, self.specimens.tools, options or RenderOptions(),
            history=[USER, reply],
        )  # fmt: skip
        return None if added is None else added.tolist()

    def close_of(self, added: list[int], rest: list[int], end: int) -> list[int]:
        """What an extension put before ``rest``: it has to end the turn."""
        close = added[: len(added) - len(rest)]
        if added[len(close) :] != rest:
            raise Failed(f"{added} does not end with the {rest} of a whole rendering")
        if not close or not set(close) & {end, *self.family.stop_ids}:
            raise Failed(f"{added} does not close the reply")
        return close

    def same_suffix(self, sampled: Sequence[int], canonical: Sequence[int]) -> str:
        """Sampled ids that text would not encode to must not change what follows them."""
        plain, _ = self.answered()
        head = self.specimens.thought
        end = plain.sampled[-1]
        new = TAILS[0][1]
        one = self.extend([*head, *sampled, end], new, reply=plain.message)
        two = self.extend([*head, *canonical, end], new, reply=plain.message)
        if one != two:
            raise Failed(f"behind {list(sampled)} come {one}, behind {list(canonical)} come {two}")
        kept = "kept" if list(sampled) != list(canonical) else "the same ids in this vocabulary"
        return f"{list(sampled)} {kept}" + (", a branch" if one is None else "")

    def read(self, ids: Sequence[int], tools: Sequence[ToolSpec] | None = None, stop: str | None = None) -> ParsedReply:
        """The verdict on a reply to this prompt."""
        tools = self.specimens.tools if tools is None else tools
        return self.family.parse(array(ids), tools, prompt_end=self.specimens.end, stop=stop)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text."""
        family = self.tokenized
        return family.tokenizer.encode(family.tokenizer.guard(text))


def text_of(family: Family, ids: Sequence[int]) -> str:
    """Text of ids, control strings included."""
    return b"".join(map(family.token_bytes, ids)).decode(errors="replace")
