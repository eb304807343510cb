"""Grading as the format has it: tests/test.sh runs, and the reward is what it wrote.

Rewards that lay there before are removed first; reward.json goes before reward.txt; only finite numbers count.
Whatever is missing or malformed is 0: in a shared machine the agent could have made it so. With a machine of its
own the verifier sees the declared artifacts and nothing else of the agent's. Depends on ``envs.base`` and siblings.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tollway.envs.base import Grader, Task, Verdict, Work
from tollway.envs.harbor.stage import Stage, filtered, machine_of, pack
from tollway.envs.harbor.task import HarborTask
from tollway.errors import EpisodeFailed
from tollway.sandboxes.base import ExecResult

__all__ = ["SeparateVerifier", "SharedVerifier", "read_rewards"]

_MARK = "reward found at"
_REWARD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedVerifier(Grader):
    """test.sh in the agent's machine. The format asks for it; the agent may have prepared that place."""

    in_agents_sandbox: ClassVar[bool] = True
    task: HarborTask

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Run the tests where the agent worked."""
        if work.sandbox is None:
            raise EpisodeFailed(f"{task.task_id} is graded in the agent's sandbox, which is gone")
        stage = await Stage.on(work.sandbox, self.task.agent)
        return await _verdict(stage, self.task)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateVerifier(Grader):
    """test.sh in a machine of its own, with the agent's artifacts."""

    task: HarborTask
    pids: int = 256

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Make the machine, lay out the artifacts, run the tests, end the machine."""
        place = self.task.verifier
        if place is None:
            raise EpisodeFailed(f"{task.task_id} names no machine for its verifier")
        spec = machine_of(place, self.pids).spec(
            ttl_s=600.0 + self.task.file.verifier.timeout_sec, labels={"task": task.task_id, "role": "grader"}
        )
        sandbox = await work.provider.create(spec)
        try:
            stage = await Stage.on(sandbox, place)
            await stage.prepare()
            for source, archive in work.submission.items():
                if kept := filtered(archive):
                    await stage.lay(posixpath.dirname(stage.real(source)), kept)
            return await _verdict(stage, self.task)
        finally:
            await sandbox.kill()


async def _verdict(stage: Stage, task: HarborTask) -> Verdict:
    """Remove stale rewards, lay the tests, run them, read the reward."""
    tests, logs = stage.real("/tests"), stage.real("/logs/verifier")
    ready = "reward.json reward.txt"
    program = f'rm -rf "$1" && mkdir -p "$1" "$2" && cd "$2" && rm -rf {ready}'
    await stage.must(["/bin/sh", "-c", program, "clear", tests, logs], "clear the place of the tests")
    await stage.lay("/", pack([(task.tests, tests)]))
    if stage.root is not None and task.file.verifier.user is not None:
        await stage.must(["chmod", "-R", "a+rwX", logs], "let the verifier's user write its reward")
    user = task.file.verifier.user
    await stage.must(["chmod", "a+rx", f"{tests}/test.sh"], "make tests/test.sh a program")
    run_tests = 'cd "$1" && exec /tests/test.sh'
    done = await stage.run(
        ["/bin/sh", "-c", run_tests, "test", stage.place.workdir],
        timeout_s=task.file.verifier.timeout_sec,
        env=task.verifier_env,
        user=str(user) if user is not None else stage.root,
    )
    log = done.stdout + (b"\n[stderr]\n" + done.stderr if done.stderr else b"")
    if done.timed_out:
        return Verdict(
            reward=0.0, reason=f"tests/test.sh took longer than {task.file.verifier.timeout_sec:g} s", log=log
        )
    found = await stage.run(["/bin/sh", "-c", _READ, "read", logs], timeout_s=60.0, user=stage.root)
    return _read(found, done, log)


_READ = (
    'cd "$1" || exit 1; for name in reward.json reward.txt; do '
    f'if [ -f "$name" ] && [ ! -L "$name" ]; then echo "{_MARK} $name"; head -c {_REWARD_BYTES} "$name"; exit 0; fi; '
    "done; exit 44"
)


def _read(found: ExecResult, tests: ExecResult, log: bytes) -> Verdict:
    said = found.stdout.decode("utf-8", "replace")
    head, _, body = said.partition("\n")
    if found.exit_code != 0 or not head.startswith(_MARK):
        reason = f"tests/test.sh left no reward (exit code {tests.exit_code})"
        return Verdict(reward=0.0, reason=reason, facts={"no_reward": 1.0}, log=log)
    try:
        rewards = read_rewards(head.rpartition(" ")[2], body)
    except ValueError as error:
        return Verdict(reward=0.0, reason=str(error), facts={"no_reward": 1.0}, log=log)
    facts = {f"reward_{name}": value for name, value in rewards.items() if name != "reward"}
    return Verdict(reward=rewards["reward"], reason="by tests/test.sh", facts={**facts, "no_reward": 0.0}, log=log)


def read_rewards(name: str, text: str) -> Mapping[str, float]:
    """The rewards in a file, "reward" among them. Raises ``ValueError`` for anything but finite numbers.

    >>> read_rewards("reward.txt", "0.5"), read_rewards("reward.json", '{"reward": 1, "style": 0.5}')
    ({'reward': 0.5}, {'reward': 1.0, 'style': 0.5})
    """
    if name == "reward.txt":
        try:
            values: dict[str, object] = {"reward": float(text)}
        except ValueError:
            raise ValueError(f"reward.txt holds {text.strip()[:80]!r}, want a number") from None
    else:
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"reward.json is no JSON: {text.strip()[:80]!r}") from None
        values = {str(key): value for key, value in raw.items()} if isinstance(raw, dict) else {"reward": raw}
    rewards = {}
    for key, value in values.items():
        if not isinstance(value, (bool, int, float)) or not math.isfinite(value) or abs(value) > 1e9:
            raise ValueError(f"{name}: {key} is {str(value)[:80]}, want a finite number")
        rewards[key] = float(value)
    if "reward" not in rewards:
        if len(rewards) != 1:
            raise ValueError(f'{name} has no "reward" among {sorted(rewards)}')
        rewards["reward"] = next(iter(rewards.values()))
    return rewards
