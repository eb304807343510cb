"""Scripted, noisy episodes for a warm start: they teach the form of an episode, not the right edits.

Every tool text is what the same call shows in a real episode: check texts come from one real sandbox run per
distinct task (before and after the right edit), edit texts from the rule itself, whose match tests prove
equal to sed's; a wrong edit leaves the check's text as it was, which tests prove too. Depends on siblings
and ``sandboxes.base``.
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
from dataclasses import dataclass, replace

from tollway.envs.config import DemonstrationConfig
from tollway.envs.micro_swe.environment import CHECK_COMMAND, TOOLS, check_text, task_of
from tollway.envs.micro_swe.projects import Project, project_at
from tollway.envs.micro_swe.rules import APPLIED, NO_SITE, RULES, edit_command
from tollway.errors import SandboxError
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.sandboxes.base import SandboxProvider, SandboxSpec

__all__ = ["DEFAULT_RECIPE", "GIVES_UP", "Demonstration", "demonstrations"]

_ORDER = 1 << 32
"""Added to the seed, so that demonstrations and training draw different tasks."""
DEFAULT_RECIPE = DemonstrationConfig()
_CUT = "--"
GIVES_UP = "done"
"""Plain text of an episode that ends without a submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One whole conversation."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    task_id: str
    right: bool
    """Whether the edit in it is the right one."""


@dataclass(frozen=True, slots=True)
class _Texts:
    before: str
    repaired: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    rule: str
    run_first: bool
    run_again: bool
    quits: bool


async def demonstrations(
    provider: SandboxProvider,
    count: int,
    *,
    seed: int = 0,
    recipe: DemonstrationConfig = DEFAULT_RECIPE,
) -> list[Demonstration]:
    """``count`` episodes over ``recipe.distinct_tasks`` training tasks, each of which costs one sandbox run.

    An episode perhaps runs the check, applies the right rule or any of the eight, perhaps runs again, and
    submits or gives up, by the probabilities of ``recipe``. Deterministic in ``seed``. Its tasks come from
    an order of their own, so that no demonstration is of a task that training will see.
    """
    projects = [project_at(seed + _ORDER, "train", index) for index in range(min(count, recipe.distinct_tasks))]
    try:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(_texts(provider, project)) for project in projects]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    texts = [run.result() for run in runs]
    rng = random.Random(f"{seed}/demonstrations")
    made = []
    for _ in range(count):
        index = rng.randrange(len(projects))
        project = projects[index]
        script = _Script(
            rule=project.rule if rng.random() < recipe.p_right else rng.choice(sorted(RULES)),
            run_first=rng.random() < recipe.p_run,
            run_again=rng.random() < recipe.p_run_again,
            quits=rng.random() < recipe.p_quit,
        )
        messages = _episode(project, texts[index], script)
        made.append(
            Demonstration(
                messages=messages, tools=TOOLS, task_id=f"demo/{seed}/{index}", right=script.rule == project.rule
            )
        )
    return made


def _episode(project: Project, texts: _Texts, script: _Script) -> tuple[Message, ...]:
    messages = list(task_of(project, "").messages)

    def step(name: str, arguments: dict[str, str], answer: str | None) -> None:
        call = ToolCall(id=f"call_{len(messages)}", name=name, arguments=json.dumps(arguments))
        messages.append(Message(role="assistant", tool_calls=(call,)))
        if answer is not None:
            messages.append(Message(role="tool", content=answer, tool_call_id=call.id))

    if script.run_first:
        step("run", {}, texts.before)
    found = RULES[script.rule].finds_site(project.files[project.path])
    step("edit", {"rule": script.rule}, APPLIED if found else NO_SITE)
    if script.run_again:
        step("run", {}, texts.repaired if script.rule == project.rule else texts.before)
    if script.quits:
        messages.append(Message(role="assistant", content=GIVES_UP))
    else:
        step("submit", {}, None)
    return tuple(messages)


async def _texts(provider: SandboxProvider, project: Project) -> _Texts:
    """Run the check, the right edit and the check again, in one sandbox and one shell."""
    check = shlex.join(CHECK_COMMAND)
    edit = shlex.join(edit_command(RULES[project.rule], project.path))
    spec = SandboxSpec(ttl_s=300.0, labels={"role": "demonstration"}, files=task_of(project, "").files)
    sandbox = await provider.create(spec)
    try:
        done = await sandbox.exec(f"{check}; echo {_CUT}; {edit} > /dev/null; {check}", timeout_s=60.0)
    finally:
        await sandbox.kill()
    before, _, after = done.stdout.partition(f"{_CUT}\n".encode())
    texts = _Texts(check_text(replace(done, stdout=before)), check_text(replace(done, stdout=after)))
    if not texts.before.startswith(project.kind) or texts.repaired != "ok":
        raise SandboxError(
            f"the check of a {project.kind} project says {texts.before!r}, repaired {texts.repaired!r} "
            f"(stderr {done.stderr[:200]!r}); is the sandbox's /usr/bin/python3 usable?"
        )
    return texts
