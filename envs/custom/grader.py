"""Calls a function of the user's own as a grader, and finds out at start what would fail at the first episode.

A fault of that function ends the episode as a failure of infrastructure, never as a reward of 0: a broken
grader must not teach anything. Depends on ``envs.base`` and ``attempt``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint

from tollway.envs.base import Grader, Task, Verdict, Work
from tollway.envs.custom.attempt import Attempt
from tollway.envs.custom.config import CustomConfig
from tollway.errors import ConfigError, EpisodeFailed

__all__ = ["CustomGrader", "load_grader"]

Function = Callable[[Attempt], object]


def load_grader(name: str, config: CustomConfig) -> Grader | CustomGrader:
    """What ``module:name`` stands for: a function of one ``Attempt``, or a ``Grader`` class without arguments.

    Raises ``ConfigError`` for what cannot be imported or called.
    """
    key = f"env.grader={name!r}"
    try:
        found = EntryPoint("grader", name, "tollway.graders").load()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}: cannot load it: {error}; want 'judge' or module:name on the Python path") from error
    if isinstance(found, type) and issubclass(found, Grader):
        try:
            return found()
        except TypeError as error:
            raise ConfigError(f"{key}: a Grader class is made without arguments: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key} is a {type(found).__name__}, want a function of one Attempt")
    try:
        inspect.signature(found).bind(Attempt(task_id=""))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} must take one Attempt: {error}") from error
    return CustomGrader(found, name, config)


class CustomGrader(Grader):
    """One function, async or not; a function that is not runs in a thread with a deadline."""

    def __init__(self, function: Function, name: str, config: CustomConfig) -> None:
        self._function, self._name, self._config = function, name, config
        self._places = asyncio.Semaphore(config.threads)
        self.reference: Callable[[Task], str | None] = lambda task: None
        """How the environment's known answer is found."""

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Call the function. Raises ``EpisodeFailed`` when it raises, is late or gives no usable number."""
        attempt = Attempt(
            task_id=task.task_id,
            messages=task.messages,
            answer=work.run.answer,
            files=work.submission,
            reference=self.reference(task),
            submitted=work.run.submitted,
            finish=work.run.finish,
            turns=work.run.turns,
        )
        return await self.judge(attempt)

    async def check(self, task: Task) -> None:
        """A dry run on an attempt that did nothing. Raises ``ConfigError`` when it fails."""
        attempt = Attempt(task_id=task.task_id, messages=task.messages, reference=self.reference(task))
        try:
            await self.judge(attempt)
        except EpisodeFailed as error:
            raise ConfigError(
                f"env.grader: the dry run on {task.task_id} with an empty answer failed: {error}"
            ) from error

    async def judge(self, attempt: Attempt) -> Verdict:
        """The function's verdict on ``attempt``, checked."""
        limit = self._config.deadline_s
        try:
            async with asyncio.timeout(limit) as deadline:
                if inspect.iscoroutinefunction(self._function):
                    said = await self._function(attempt)
                else:
                    said = await self._threaded(attempt)
                if inspect.isawaitable(said):
                    said = await said
        except Exception as error:
            # The user's code may raise anything; none of it is a grade.
            if isinstance(error, TimeoutError) and deadline.expired():
                raise EpisodeFailed(f"grader {self._name} took longer than env.custom.deadline_s = {limit}") from None
            raise EpisodeFailed(f"grader {self._name} raised {type(error).__name__}: {error}") from error
        return self._verdict(said)

    def _verdict(self, said: object) -> Verdict:
        verdict = said if isinstance(said, Verdict) else None
        reward = verdict.reward if verdict is not None else said
        low, high = self._config.lowest, self._config.highest
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EpisodeFailed(f"grader {self._name} gave {reward!r}, want a finite number or a Verdict")
        if not low <= reward <= high:
            raise EpisodeFailed(
                f"grader {self._name} gave {reward}, outside of {low} to {high}; set env.custom.lowest and highest"
            )
        return verdict or Verdict(reward=float(reward), reason=f"by {self._name}")

    async def _threaded(self, attempt: Attempt) -> object:
        """In a daemon thread: one that never ends is given up, and stops neither the loop nor the process's end."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[object] = loop.create_future()
        await self._places.acquire()

        def settle(result: object, error: BaseException | None) -> None:
            self._places.release()
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        def work() -> None:
            try:
                result, error = self._function(attempt), None
            except Exception as raised:
                result, error = None, raised
            except BaseException as raised:  # SystemExit in a thread would only be lost
                result, error = None, RuntimeError(f"{type(raised).__name__}: {raised}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, name=f"grader {self._name}", daemon=True).start()
        return await done
