"""What a family is proved with: conversations, replies in its own format, and texts that hurt.

Replies are cut out of the family's own rendering, so every format is exercised without being known here.
Depends on ``base`` only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tollway.errors import BadRequest
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Ids
from tollway.session_server.families.base import Family
from tollway.session_server.families.tokenized import TokenizedFamily

__all__ = ["CALLS", "RESULTS", "TAILS", "TOOLS", "USER", "Reply", "Specimens", "array", "nasty_texts"]

TOOLS = (
    ToolSpec(
        name="run",
        description="Runs a command.",
        parameters='{"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}}',
    ),
    ToolSpec(name="edit", parameters='{"type": "object", "properties": {"path": {"type": "string"}}}'),
)
CALLS = (
    ToolCall("functions.run:0", "run", '{"cmd": "ls -la", "n": 3}'),
    ToolCall("functions.edit:1", "edit", '{"path": "a.py"}'),
)
USER = Message(role="user", content="Please look.")
RESULTS = (
    Message(role="tool", content="first result", tool_call_id=CALLS[0].id, name="run"),
    Message(role="tool", content="second result", tool_call_id=CALLS[1].id, name="edit"),
)
_NEXT = Message(role="user", content="And now?")
_SYSTEM = Message(role="system", content="Be brief.")
_DEVELOPER = Message(role="developer", content="Be polite.")
TAILS: tuple[tuple[str, tuple[Message, ...]], ...] = (
    ("user", (_NEXT,)),
    ("user user", (_NEXT, Message(role="user", content="Well?"))),
    ("system", (_SYSTEM,)),
    ("developer user", (_DEVELOPER, _NEXT)),
)
"""What may follow a plain reply."""


def array(ids: Sequence[int]) -> Ids:
    """Ids as the families take them."""
    return np.array(ids, np.int32)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply as a model would have written it."""

    label: str
    message: Message
    sampled: tuple[int, ...]
    """Its ids with the one that ends it."""


class Specimens:
    """Conversations of one family."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.tools: tuple[ToolSpec, ...] = TOOLS
        """Empty when the family refuses tools."""
        try:
            self.prompt = family.render_prompt([USER], TOOLS)
        except BadRequest:
            self.tools = ()
            self.prompt = family.render_prompt([USER], ())
        self.end = self.prompt[-64:]
        self.thought = self._thought()

    def whole(self, reply: Message, new: Sequence[Message]) -> list[int]:
        """The conversation rendered from nothing."""
        ids: list[int] = self.family.render_prompt([USER, reply, *new], self.tools).tolist()
        return ids

    def written(self, message: Message, new: Sequence[Message]) -> tuple[list[int], list[int]] | None:
        """(ids of the reply up to its end, ids behind it) in the whole rendering; ``None`` when it is refused."""
        try:
            whole = self.whole(message, new)
        except BadRequest:
            return None
        prompt = self.prompt.tolist()
        start = next((at for at, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
        ends = [at for at in range(start, len(whole)) if whole[at] in self.family.stop_ids]
        if not ends:
            return None
        return whole[start : ends[0] + 1], whole[ends[0] + 1 :]

    def reply(self, label: str, message: Message, new: Sequence[Message]) -> tuple[Reply, list[int]] | None:
        """The reply behind this prompt, thinking that the prompt has opened included, and the ids that must follow."""
        found = self.written(message, new)
        if found is None:
            return None
        sampled, rest = found
        return Reply(label, message, (*self._before_answer(sampled), *sampled)), rest

    def _before_answer(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Thinking, unless the rendering of the reply carries on what the prompt has opened."""
        if not self.thought:
            return ()
        close = self.thought[-1]
        return () if close in answer else self.thought

    def _thought(self) -> tuple[int, ...]:
        """Ids that finish thinking which the prompt has begun."""
        family = self.family
        if not isinstance(family, TokenizedFamily) or family.think is None or not family.opened(self.end.tolist()):
            return ()
        close = family.tokenizer.control.get(family.think[1])
        return (
            *family.tokenizer.encode("hm"),
            *((close,) if close is not None else family.tokenizer.encode("</think>")),
        )


_PIECES: tuple[str, ...] = (
    *("<", "|", "im_", "end", ">", "think", "/", "[", "]", "{", '"', "\\", "\n", "\r\n", " ", "\t", "tool", "_call"),
    *("é", "e\u0301", "中文", "🙂", "\ufdd0", "\u200b", "1", "23", "456", "'s", "'LL", "Ab", "cD", "\u00a0", "a", "ß"),
)


def nasty_texts(count: int, *, seed: int = 0) -> Iterator[str]:
    """Reproducible texts made of what breaks tokenizers and templates."""
    draw = random.Random(seed)
    for _ in range(count):
        yield "".join(draw.choice(_PIECES) for _ in range(draw.randrange(1, 40)))
