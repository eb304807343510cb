"""A task for models with random weights, and a family with as many ids as their vocabulary.

Training needs groups whose attempts differ in reward, which random weights earn nowhere else: here a reply earns 1
or 0 by the parity of its text. Nothing can be learned from it, which is the point: it measures, it does not teach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tollway.envs.base import Environment, Grader, Task, ToolAnswer, Toolset, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Ids
from tollway.sandboxes.base import Sandbox
from tollway.session_server.families.base import Family, ParsedReply
from tollway.session_server.families.compact import VOCAB_SIZE, CompactFamily

__all__ = ["WIDE_VOCAB_SIZE", "Parity", "wide"]

WIDE_VOCAB_SIZE = 151_936
"""Of the Qwen3 models."""
_LETTERS = 64


class WideFamily(CompactFamily):
    """The byte family with ids beyond its own, each of which shows as a letter."""

    name = "compact-wide"
    vocab_size = WIDE_VOCAB_SIZE

    def parse(
        self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: str | None = None
    ) -> ParsedReply:
        """See ``Family``."""
        seen = np.where(sampled < VOCAB_SIZE, sampled, 48 + sampled % _LETTERS).astype(np.int32)
        return super().parse(seen, tools, prompt_end=prompt_end, stop=stop)


def wide(_tokenizer: Path | None) -> Family:
    """What ``server.family = "loop_words:wide"`` names."""
    return WideFamily()


class Parity(Environment):
    """``env.harness_options.prompt_bytes``: length of a prompt."""

    name, needs_submission = "parity", False

    def __init__(self, config: EnvConfig) -> None:
        self._bytes = int(str(config.harness_options.get("prompt_bytes", "64")))

    def task(self, index: int) -> Task:
        """See ``Environment``."""
        text = f"task {index}: " + "the quick brown fox jumps over the lazy dog " * (self._bytes // 44 + 1)
        return Task(
            task_id=f"parity/{index}", messages=(Message(role="user", content=text[: self._bytes]),), machine=None
        )

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """See ``Environment``."""
        return _NoTools()

    def grader(self, task: Task) -> Grader:
        """See ``Environment``."""
        return _ParityGrader()


class _NoTools(Toolset):
    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return ()

    async def call(self, call: ToolCall) -> ToolAnswer:
        return ToolAnswer("there are no tools", ends=True)

    @property
    def facts(self) -> Mapping[str, float]:
        return {}


class _ParityGrader(Grader):
    async def grade(self, task: Task, work: Work) -> Verdict:
        return Verdict(reward=float(sum(map(ord, work.run.answer)) % 2), reason="parity of the reply")
