"""The generated projects are what they claim: real bugs, one right edit each, nothing that gives it away."""

from __future__ import annotations

import asyncio
import random
import shlex

import pytest

from tollway.envs.base import Work
from tollway.envs.config import EnvConfig
from tollway.envs.grading import HiddenCalls
from tollway.envs.micro_swe.bugs import KINDS
from tollway.envs.micro_swe.environment import CHECK_COMMAND, MicroSwe, check_text, task_of
from tollway.envs.micro_swe.names import POOLS
from tollway.envs.micro_swe.projects import SHAPES, Project, build, project_at
from tollway.envs.micro_swe.rules import NO_SITE, RULES, edit_command, edit_text
from tollway.sandboxes.base import ExecResult, SandboxSpec
from tollway.sandboxes.local import LocalProvider

_CUT = "<cut>"


def _grader(project: Project) -> HiddenCalls:
    return HiddenCalls(module=project.module, function=project.function, cases=project.hidden)


async def _run_every_rule(provider: LocalProvider, project: Project) -> dict[str, tuple[str, str, str]]:
    """(check before, edit text, check after) of each rule on its own copy of the project, in one sandbox."""
    check = shlex.join(CHECK_COMMAND)
    script = ["cp -r . /tmp/clean"]
    for name, rule in RULES.items():
        edit = shlex.join(edit_command(rule, project.path))
        script += [f"cp -r /tmp/clean {name} && cd {name}", f"{check}; echo '{_CUT}'"]
        script += [f"{edit} | tr '\\n' ' '; echo; echo '{_CUT}'", f"{check}; echo '{_CUT}'; cd .."]
    files = task_of(project, "t").files
    sandbox = await provider.create(SandboxSpec(ttl_s=60, labels={"test": "rules"}, files=files))
    try:
        done = await sandbox.exec("\n".join(script), timeout_s=40)
    finally:
        await sandbox.kill()
    parts = done.stdout.decode().split(f"{_CUT}\n")
    assert len(parts) == 3 * len(RULES) + 1, done

    def shown(text: str) -> str:
        return check_text(ExecResult(exit_code=1, stdout=text.encode()))

    return {
        name: (shown(parts[3 * at]), edit_text(parts[3 * at + 1].strip().encode()), shown(parts[3 * at + 2]))
        for at, name in enumerate(RULES)
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
async def test_only_the_right_rule_makes_visible_and_hidden_checks_pass(
    local: LocalProvider, kind: str, shape: str
) -> None:
    project = build(kind, shape, "train", random.Random(f"{kind}/{shape}"))
    task = task_of(project, "t")
    source = project.files[project.path]
    bug_line = next(at for at, line in enumerate(source.split("\n"), 1) if RULES[project.rule].finds_site(line))
    texts = await _run_every_rule(local, project)

    async def reward(text: str) -> float:
        submission = {path: task.files[path] for path in task.sources} | {project.path: text.encode()}
        return (await _grader(project).grade(task, Work(submission=submission, provider=local))).reward

    rewards = await asyncio.gather(reward(source), *(reward(rule.rewrite(source)) for rule in RULES.values()))
    assert rewards[0] == 0.0
    for (name, rule), got in zip(RULES.items(), rewards[1:], strict=True):
        before, edited, after = texts[name]
        assert before.startswith(f"{kind} at {project.path}:")
        assert abs(int(before.rpartition(":")[2]) - bug_line) <= 1
        assert edited == ("applied" if rule.finds_site(source) else NO_SITE)
        assert (name == project.rule) == (got == 1.0), name
        # A wrong edit changes neither the error nor its place: what demonstrations rely on.
        assert after == ("ok" if name == project.rule else before), name


def test_every_block_of_32_tasks_holds_each_kind_in_each_shape_once() -> None:
    for split in POOLS:
        for block in range(3):
            projects = [project_at(7, split, 32 * block + place) for place in range(32)]
            assert len({(project.kind, project.shape) for project in projects}) == 32


def test_tasks_are_reproducible_and_differ_by_seed_and_index() -> None:
    one, two = MicroSwe(EnvConfig(seed=3)), MicroSwe(EnvConfig(seed=3))
    assert [one.task(at) for at in range(40)] == [two.task(at) for at in range(40)]
    texts = {tuple(sorted(project_at(3, "train", at).files.items())) for at in range(300)}
    assert len(texts) > 290
    assert project_at(3, "train", 0) != project_at(4, "train", 0)


def test_train_and_heldout_share_no_name_and_no_constant() -> None:
    train, heldout = POOLS["train"], POOLS["heldout"]
    for field in ("modules", "functions", "helpers", "tables", "words", "variables", "constants"):
        assert not set(getattr(train, field)) & set(getattr(heldout, field)), field


def test_the_prompt_says_nothing_about_the_kind_of_bug() -> None:
    kinds: dict[str, set[str]] = {}
    for at in range(6000):
        project = project_at(0, "train", at)
        if project.shape != "library":
            kinds.setdefault(task_of(project, "t").messages[0].content, set()).add(project.kind)
    assert kinds
    assert all(len(found) == len(KINDS) for found in kinds.values())


def test_hidden_inputs_are_not_all_among_the_visible_ones() -> None:
    for at in range(64):
        project = project_at(1, "train", at)
        visible = project.files["check.py"]
        assert any(repr(args) not in visible for args, _ in project.hidden)
        for args, want in project.hidden:
            assert eval(repr((args, want))) == (args, want)


def test_sources_are_small_and_names_do_not_shadow_the_standard_library() -> None:
    import sys

    for split, pool in POOLS.items():
        assert not {*pool.modules, "lib", "check"} & sys.stdlib_module_names
        lines = [project_at(0, split, at).files[project_at(0, split, at).path].count("\n") for at in range(200)]
        assert min(lines) >= 8
        assert max(lines) <= 32
