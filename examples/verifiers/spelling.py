"""A verifiers taskset, written with the package's own classes: spell words backwards, or into a file.

Install it as a package in an environment that has verifiers, or name its directory in env.verifiers.path.
"""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

WORDS = ("tollway", "gateway", "harness", "sandbox", "prefix", "reward")


class SpellingData(vf.TaskData):
    """One word."""

    word: str


class SpellingTask(vf.Task[SpellingData]):
    """Scored by the reply alone."""

    @vf.reward
    async def right(self, task: SpellingData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.word[::-1])

    @vf.metric
    async def letters(self, task: SpellingData, trace: vf.Trace) -> float:
        return float(len(set(trace.last_reply) & set(task.word)) / len(set(task.word)))


class SpellingConfig(vf.TasksetConfig):
    """How many words."""

    words: int = len(WORDS)


class SpellingTaskset(vf.Taskset[SpellingTask, SpellingConfig]):
    """Words to reply backwards."""

    def load(self) -> Iterable[SpellingTask]:
        for word in WORDS[: self.config.words]:
            prompt = f"Reply with the word {word} spelled backwards, and nothing else."
            yield SpellingTask(SpellingData(prompt=prompt, name=word, word=word), self.config.task)


class FileTask(vf.Task[SpellingData]):
    """Set up and scored in the agent's sandbox."""

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("word.txt", self.data.word.encode())

    async def validate(self, runtime: vf.Runtime) -> bool:
        return (await runtime.run(["true"], {})).exit_code == 0

    @vf.reward
    async def written(self, task: SpellingData, runtime: vf.Runtime) -> float:
        try:
            found = await runtime.read("answer.txt", max_bytes=1000)
        except Exception:
            return 0.0
        return float(found.decode().strip() == task.word[::-1])


class FileTaskset(vf.Taskset[FileTask, SpellingConfig]):
    """Words to write backwards into a file."""

    def load(self) -> Iterable[FileTask]:
        for word in WORDS[: self.config.words]:
            prompt = "word.txt has a word. Write it spelled backwards into answer.txt, then submit."
            yield FileTask(SpellingData(prompt=prompt, name=word, word=word), self.config.task)


__all__ = ["SpellingTaskset"]
