"""Asks a model for a verdict. A judge that gives none is an infrastructure failure, never a reward of 0.

Each question has a session of its own, pinned to the judge's model, closed or deleted whatever happens; it is
no part of the episode and nothing of it is trained on. Depends on ``envs.base`` and the record types of
``session_server.client``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence

from tollway.envs.base import Grader, Sessions, Task, Verdict, Work
from tollway.envs.cutting import cut_characters
from tollway.envs.judge.config import JudgeConfig
from tollway.envs.judge.prompts import AGAIN, RULES, SHIPPED, fenced, fill, read_verdict
from tollway.errors import ConfigError, EpisodeFailed, TollwayError
from tollway.messages import Message
from tollway.records import Sampling
from tollway.session_server.client import ChatReply, Session, SessionOptions

__all__ = ["JudgeGrader"]

logger = logging.getLogger(__name__)
_CLOSE_S = 30.0


class JudgeGrader(Grader):
    """The verdict of ``config.model`` on the last reply and the submitted files."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._template = SHIPPED[config.verdict] if config.prompt is None else _read(config)
        self.reference: Callable[[Task], str | None] = lambda task: None
        """How the environment's known answer is found."""

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Ask once, or once in each order. Raises ``EpisodeFailed`` when there is no verdict."""
        if work.sessions is None:
            raise EpisodeFailed("the judge needs a session server; run it in an episode")
        reference = self.reference(task)
        if self._config.verdict == "prefer" and reference is None:
            raise EpisodeFailed(f'env.judge.verdict = "prefer" compares with a reference, and {task.task_id} has none')
        orders = (True, False) if self._config.both_orders and reference is not None else (True,)
        values = [await self._verdict(task, work, work.sessions, reference, first) for first in orders]
        reward = sum(values) / len(values)
        facts = {"judge_orders_agree": float(values[0] == values[1])} if len(values) > 1 else {}
        return Verdict(
            reward=reward, reason=f"the judge said {', '.join(f'{value:g}' for value in values)}", facts=facts
        )

    async def _verdict(
        self, task: Task, work: Work, sessions: Sessions, reference: str | None, answer_first: bool
    ) -> float:
        """One conversation with the judge, about the answer as first or as second block."""
        config = self._config
        messages = [Message(role="user", content=self._question(task, work, reference, answer_first))]
        session = await sessions.create(
            task_id=task.task_id,
            sampling=Sampling(temperature=config.temperature, max_new_tokens=config.max_new_tokens),
            metadata={"role": "judge"},
            wait_s=config.timeout_s,
            options=SessionOptions(model=config.model),
        )
        kept = False
        try:
            for _ in range(config.asks):
                reply = await self._ask(sessions, session, messages)
                value = read_verdict(config.verdict, reply.message.content, most=config.score_max)
                if value is not None:
                    kept = True
                    return 1.0 - value if config.verdict == "prefer" and not answer_first else value
                messages += [reply.message, Message(role="user", content=AGAIN + self._rule())]
            raise EpisodeFailed(
                f"the judge gave no verdict in {config.asks} replies; the last one ends with "
                f"{reply.message.content[-80:]!r}"
            )
        finally:
            await _end(sessions.close if kept else sessions.delete, session.session_id)

    async def _ask(self, sessions: Sessions, session: Session, messages: Sequence[Message]) -> ChatReply:
        limit = self._config.timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                return await sessions.chat(session, messages)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EpisodeFailed(f"the judge took longer than env.judge.timeout_s = {limit}") from error

    def _rule(self) -> str:
        return RULES[self._config.verdict].format(most=self._config.score_max)

    def _question(self, task: Task, work: Work, reference: str | None, answer_first: bool) -> str:
        mark, most = secrets.token_hex(6), self._config.max_chars
        told = "\n\n".join(message.content for message in task.messages if message.role != "assistant")
        named = [("answer", cut_characters(work.run.answer, most))]
        if work.submission:
            shown = "\n".join(
                f"--- {path}\n{data.decode('utf-8', 'replace')}" for path, data in work.submission.items()
            )
            named[0] = ("answer", f"{named[0][1]}\n\n{cut_characters(shown, most)}")
        if reference is not None:
            named.insert(1 if answer_first else 0, ("reference", cut_characters(reference, most)))
        labels = [f"answer {letter}" for letter in "AB"] if self._config.verdict == "prefer" else [n for n, _ in named]
        blocks = {name: fenced(label, text, mark) for (name, text), label in zip(named, labels, strict=False)}
        values = {
            "task": fenced("task", cut_characters(told, most), mark),
            "blocks": "\n\n".join(blocks.values()),
            "answer": blocks["answer"],
            "reference": blocks.get("reference", ""),
            "verdict": self._rule(),
        }
        return fill(self._template, values)


async def _end(end: Callable[[str], Awaitable[None]], session_id: str) -> None:
    """A session that cannot be ended ends by its ttl: no reason to lose a verdict."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await end(session_id)
    except (TollwayError, TimeoutError) as error:
        logger.warning("the judge's session %s could not be ended: %s", session_id[:8], error)


def _read(config: JudgeConfig) -> str:
    if config.prompt is None:
        raise ConfigError("env.judge.prompt names no file")
    try:
        template = config.prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"env.judge.prompt: cannot read {config.prompt}: {error}") from error
    if "{{answer}}" not in template and "{{blocks}}" not in template:
        raise ConfigError(f"env.judge.prompt: {config.prompt} has no {{{{answer}}}} or {{{{blocks}}}} in it")
    return template
