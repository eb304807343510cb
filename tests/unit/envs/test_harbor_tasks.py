"""Harbor task directories: read strictly, refused by name, laid out, solved and graded in real sandboxes."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tollway.envs.base import AgentRun, Machine, Work
from tollway.envs.config import EnvConfig
from tollway.envs.harbor.config import HarborConfig
from tollway.envs.harbor.dockerfile import read_dockerfile
from tollway.envs.harbor.environment import Harbor
from tollway.envs.harbor.schema import parse
from tollway.envs.harbor.stage import filtered, machine_of
from tollway.envs.harbor.task import Unsupported, read_task
from tollway.envs.harbor.verify import read_rewards
from tollway.errors import BadImage, CapabilityMissing, ConfigError, EpisodeFailed, NotFound
from tollway.messages import ToolCall
from tollway.sandboxes.base import Sandbox
from tollway.sandboxes.local import LocalProvider

EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor" / "tasks"


def _copy(tmp_path: Path, name: str = "hello-file") -> Path:
    return Path(shutil.copytree(EXAMPLES / name, tmp_path / name))


def _append(folder: Path, text: str, file: str = "task.toml") -> None:
    path = folder / file
    path.write_text(path.read_text() + text)


def _environment(folder: Path, **fields: object) -> Harbor:
    return Harbor(EnvConfig.model_validate({"name": "harbor", "harbor": {"tasks": str(folder), **fields}}))


async def _sandbox(local: LocalProvider, machine: Machine | None) -> Sandbox:
    assert machine is not None
    return await local.create(machine.spec(ttl_s=60, labels={"test": "harbor"}))


async def _grade(environment: Harbor, local: LocalProvider, name: str, *commands: str) -> tuple[float, str]:
    """Reward and reason after an agent ran ``commands``; "solve" stands for the reference solution."""
    task = environment.find(name)
    sandbox = await _sandbox(local, task.machine)
    tools = environment.toolset(task, sandbox)
    await tools.open()
    for command in commands:
        if command == "solve":
            await environment.solve(task, sandbox)
        else:
            await sandbox.exec(command, timeout_s=30)
    submission = await environment.collect(task, sandbox)
    grader = environment.grader(task)
    run = AgentRun(turns=1, submitted=True, finish="submitted")
    work = Work(submission=submission, provider=local, run=run, sandbox=sandbox)
    if not grader.in_agents_sandbox:
        await sandbox.kill()
        work = replace(work, sandbox=None)
    verdict = await grader.grade(task, work)
    await sandbox.kill()
    assert local.live == 0
    return verdict.reward, verdict.reason


async def test_the_reference_solution_earns_everything_and_doing_nothing_earns_nothing(local: LocalProvider) -> None:
    environment = _environment(EXAMPLES)
    for name in ("hello-file", "sum-csv"):
        assert (await _grade(environment, local, name, "solve"))[0] == 1.0
        assert (await _grade(environment, local, name))[0] == 0.0


async def test_an_agent_sees_its_files_at_the_formats_paths_and_neither_tests_nor_solution(
    local: LocalProvider,
) -> None:
    environment = _environment(EXAMPLES)
    task = environment.find("harbor/sum-csv")
    assert task.messages[-1].content.startswith("The table `/app/data/sales.csv`")
    assert "canary" not in task.messages[-1].content
    assert task.limits.agent_s == 120.0
    sandbox = await _sandbox(local, task.machine)
    tools = environment.toolset(task, sandbox)
    await tools.open()
    command = (
        'realpath .; head -1 /app/data/sales.csv; wc -l < "$TABLE"; echo $LANGUAGE; ls /logs; ls /tests/ /solution/'
    )
    lines = (await tools.call(ToolCall("1", "bash", json.dumps({"command": command})))).text.split()
    assert lines[:4] == ["/workspace", "region,amount", "6", "en"]
    assert lines[4:7] == ["agent", "artifacts", "verifier"]
    assert " ".join(lines[7:]).count("No such file") == 2
    assert (await tools.call(ToolCall("2", "read", '{"path": "data/sales.csv"}'))).text.startswith("     1\tregion")
    await sandbox.kill()


async def test_a_reward_that_lay_there_before_the_tests_does_not_count(tmp_path: Path, local: LocalProvider) -> None:
    folder = _copy(tmp_path)
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\nexit 3\n")
    forge = "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json"
    reward, reason = await _grade(_environment(folder), local, "hello-file", forge)
    assert (reward, reason) == (0.0, "tests/test.sh left no reward (exit code 3)")


async def test_tests_that_an_agent_laid_down_are_gone_before_the_real_ones_run(
    tmp_path: Path, local: LocalProvider
) -> None:
    folder = _copy(tmp_path)
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\nls /tests | wc -l > /logs/verifier/reward.txt\n")
    plant = "mkdir -p /workspace/.harbor/tests && touch /workspace/.harbor/tests/conftest.py"
    assert await _grade(_environment(folder), local, "hello-file", plant) == (1.0, "by tests/test.sh")


async def test_tests_that_never_end_earn_nothing(tmp_path: Path, local: LocalProvider) -> None:
    folder = _copy(tmp_path)
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\nsleep 60\n")
    text = (folder / "task.toml").read_text().replace("timeout_sec = 60.0", "timeout_sec = 0.3")
    (folder / "task.toml").write_text(text)
    assert (await _grade(_environment(folder), local, "hello-file"))[0] == 0.0


async def test_a_separate_verifier_gets_artifacts_and_nothing_else_of_the_agents(local: LocalProvider) -> None:
    environment = _environment(EXAMPLES)
    # Code that the tests would import, were they run where the agent worked.
    sabotage = "echo 'import os; os._exit(0)' > /app/json.py; mkdir -p /workspace/.harbor/tests"
    assert (await _grade(environment, local, "sum-csv", "solve", sabotage))[0] == 1.0
    link = "ln -sf /workspace/.harbor/tests/check.py /app/answer.json"
    assert (await _grade(environment, local, "sum-csv", link))[0] == 0.0
    folder = "rm -f /app/answer.json; mkdir /app/answer.json; mkfifo /app/answer.json/x"
    assert (await _grade(environment, local, "sum-csv", folder))[0] == 0.0


async def test_what_an_artifact_excludes_stays_behind(tmp_path: Path, local: LocalProvider) -> None:
    folder = _copy(tmp_path, "sum-csv")
    text = (folder / "task.toml").read_text()
    assert 'artifacts = ["/app/answer.json"]' in text
    (folder / "task.toml").write_text(
        text.replace('["/app/answer.json"]', '[{ source = "/app/out", exclude = ["*.log", "out/cache"] }]')
    )
    environment = _environment(folder)
    task = environment.task(0)
    sandbox = await _sandbox(local, task.machine)
    await environment.toolset(task, sandbox).open()
    await sandbox.exec("mkdir -p out/cache && touch out/kept out/a.log out/cache/x 'out/b c.log'", timeout_s=30)
    archive = (await environment.collect(task, sandbox))["/app/out"]
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        assert sorted(found.getnames()) == ["./out", "./out/kept"]
    await sandbox.kill()


async def test_a_solution_that_fails_or_is_missing_says_so(tmp_path: Path, local: LocalProvider) -> None:
    folder = _copy(tmp_path)
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\necho broken >&2\nexit 9\n")
    with pytest.raises(EpisodeFailed, match="ended with 9: broken"):
        await _grade(_environment(folder), local, "hello-file", "solve")
    shutil.rmtree(folder / "solution")
    with pytest.raises(CapabilityMissing, match=r"no solution/solve\.sh"):
        await _grade(_environment(folder), local, "hello-file", "solve")


async def test_an_image_is_refused_by_name_where_there_are_none(tmp_path: Path, local: LocalProvider) -> None:
    folder = _copy(tmp_path)
    _append(folder, 'docker_image = "org/image:1"\n')
    task = _environment(folder).task(0)
    with pytest.raises(BadImage, match="org/image:1"):
        await _sandbox(local, task.machine)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpus = 2\n", "environment.gpus = 2"),
        ('os = "windows"\n', "environment.os = 'windows'"),
        ('[[environment.mcp_servers]]\nname = "m"\nurl = "http://m"\n', "environment.mcp_servers"),
        ('[[steps]]\nname = "one"\n', r"\[\[steps\]\]"),
        ('[[verifier.collect]]\ncommand = "true"\nservice = "db"\n', "'db' needs Docker Compose"),
    ],
)
def test_what_no_provider_of_ours_has_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    folder = _copy(tmp_path)
    _append(folder, text)
    with pytest.raises(ConfigError, match=complaint):
        _environment(folder)


def test_tasks_that_cannot_run_may_be_left_out_but_never_all_of_them(tmp_path: Path) -> None:
    _append(_copy(tmp_path), "gpus = 1\n")
    with pytest.raises(ConfigError, match="1 of 1 Harbor tasks"):
        _environment(tmp_path, skip_unsupported=True)
    _copy(tmp_path, "sum-csv")
    with pytest.raises(ConfigError, match="1 of 2 Harbor tasks"):
        _environment(tmp_path)
    assert _environment(tmp_path, skip_unsupported=True).size == 1


def test_a_dockerfile_with_a_build_needs_a_ready_image(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    (folder / "environment" / "Dockerfile").write_text("FROM debian:12\nRUN apt-get update\nWORKDIR /srv\n")
    with pytest.raises(Unsupported, match="line 2: RUN needs a build"):
        read_task(folder, HarborConfig(), {})
    built = read_task(folder, HarborConfig(images={"hello-file": "mine:1"}), {})
    assert (built.agent.image, machine_of(built.agent, 8).options) == ("mine:1", {})
    assert read_task(folder, HarborConfig(images={"*": "all:1"}), {}).agent.image == "all:1"
    (folder / "environment" / "Dockerfile").write_text("FROM debian:12\nWORKDIR /srv\nCOPY NOTES.txt /etc/\n")
    with pytest.raises(Unsupported, match="outside of the working directory /srv"):
        read_task(folder, HarborConfig(), {})
    based = read_task(folder, HarborConfig(base_images=True), {})
    assert (based.agent.image, based.agent.workdir) == ("debian:12", "/srv")
    assert [target for _, target in based.agent.files] == ["/etc/NOTES.txt"]


def test_the_network_is_what_the_task_declares_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    text = (folder / "task.toml").read_text()
    for line, network, wanted in (
        ('network_mode = "no-network"', "default", "none"),
        ('network_mode = "public"', "declared", "public"),
        ('network_mode = "public"', "none", "none"),
        ("", "declared", "none"),
        ("", "default", "public"),
        ('network_mode = "allowlist"\nallowed_hosts = ["a.example"]', "declared", ("a.example",)),
    ):
        (folder / "task.toml").write_text(text.replace('network_mode = "no-network"', line))
        config = HarborConfig.model_validate({"network": network})
        assert read_task(folder, config, {}).agent.network == wanted


def test_variables_of_ours_reach_a_task_only_by_name(tmp_path: Path) -> None:
    folder = _copy(tmp_path, "sum-csv")
    text = (folder / "task.toml").read_text()
    assert read_task(folder, HarborConfig(), {"TOLLWAY_EXAMPLE_GREETING": "x"}).verifier_env == {"GREETING": "hello"}
    allowed = HarborConfig(pass_env=("TOLLWAY_EXAMPLE_GREETING",))
    assert read_task(folder, allowed, {"TOLLWAY_EXAMPLE_GREETING": "x"}).verifier_env == {"GREETING": "x"}
    (folder / "task.toml").write_text(text.replace(":-hello", ""))
    with pytest.raises(ConfigError, match=r"list it in env\.harbor\.pass_env"):
        read_task(folder, HarborConfig(), {"TOLLWAY_EXAMPLE_GREETING": "x"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "not valid TOML"),
        ('schema_version = "9"', "schema '9' is unknown"),
        ("[agent]\ntimeout = 5", "agent.timeout: no key of this format"),
        ("[agent]\ntimeout_sec = -5", "agent.timeout_sec"),
        ('[environment]\nnetwork_mode = "open"', "environment.network_mode"),
        ('[environment]\nallowed_hosts = ["a"]', "needs network_mode"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1', "exclude each other"),
        ('[task]\nname = "no-slash"', "task.name"),
        ('artifacts = ["/app/../etc"]', "artifacts"),
        ('[environment]\nmemory = "lots"', "'2G' or '512M'"),
    ],
)
def test_a_wrong_task_file_is_refused_with_its_key(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "task.toml")
    assert complaint in str(caught.value)


def test_older_spellings_are_read() -> None:
    file = parse(
        'version = "1.0"\n[metadata]\nanything = { deep = [1] }\n'
        '[environment]\nmemory = "2G"\nstorage = "10G"\nallow_internet = false',
        "task.toml",
    )
    assert (file.schema_version, file.environment.memory_mb, file.environment.storage_mb) == ("1.0", 2048, 10240)
    assert file.environment.network_mode == "no-network"


def test_a_link_that_leaves_the_task_is_refused(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    (folder / "tests" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="leaves the task directory"):
        _environment(folder)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"tests/test\.sh is missing"):
        _environment(folder)
    (folder / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"instruction\.md is missing"):
        _environment(folder)
    for path, complaint in ((tmp_path / "nowhere", "no directory"), (folder / "tests", r"no task\.toml")):
        with pytest.raises(ConfigError, match=complaint):
            _environment(path)
    with pytest.raises(ConfigError, match="is not set"):
        Harbor(EnvConfig(name="harbor"))
    with pytest.raises(NotFound, match="harbor/hello-file"):
        _environment(EXAMPLES / "hello-file").find("other")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reward.txt", "nan"), ("reward.txt", ""), ("reward.txt", "1 2"), ("reward.txt", "inf"),
        ("reward.json", '{"reward": NaN}'), ("reward.json", '{"reward": 1e999}'), ("reward.json", '{"reward": "1"}'),
        ("reward.json", '{"a": 1, "b": 2}'), ("reward.json", "[1]"), ("reward.json", ""), ("reward.json", "{"),
        ("reward.json", "{}"),
    ],
)  # fmt: skip
def test_only_finite_numbers_are_rewards(name: str, text: str) -> None:
    with pytest.raises(ValueError, match="reward"):
        read_rewards(name, text)


def test_a_dockerfile_is_read_as_far_as_it_copies() -> None:
    recipe = read_dockerfile(
        "# c\nFROM --platform=linux/amd64 python:3.12-slim AS base\nWORKDIR /a\nWORKDIR b\nENV X=1 Y='two words'\n"
        'ENV OLD style value\nCOPY --chown=a:b one.txt two.txt ./\nCOPY ["three four", "/a/b/5"]\nUSER nobody\nCMD x\n'
    )
    assert (recipe.base, recipe.workdir, recipe.problem) == ("python:3.12-slim", "/a/b", "")
    assert recipe.env == {"X": "1", "Y": "two words", "OLD": "style value"}
    assert [(copy.sources, copy.target) for copy in recipe.copies] == [
        (("one.txt", "two.txt"), "/a/b/"),
        (("three four",), "/a/b/5"),
    ]
    for line, problem in {
        "COPY --from=x /a /b": "--from=x",
        "ADD http://x /b": "not in environment/",
        "COPY ../x /b": "not in environment/",
        "COPY *.txt /b": "patterns",
        "RUN \\\n true": "line 2: RUN",
        "FROM y": "second stage",
        "ARG A": "ARG",
    }.items():
        assert problem in read_dockerfile(f"FROM x\n{line}\n").problem
    assert read_dockerfile("WORKDIR /x").problem


def test_an_agents_archive_keeps_plain_files_only() -> None:
    assert filtered(b"no tar at all") == b""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in (
            ("good/run.sh", tarfile.REGTYPE),
            ("/etc/absolute", tarfile.REGTYPE),
            ("good/../../up", tarfile.REGTYPE),
            ("good/link", tarfile.SYMTYPE),
            ("good/hard", tarfile.LNKTYPE),
            ("good/pipe", tarfile.FIFOTYPE),
            ("good/device", tarfile.CHRTYPE),
            ("good", tarfile.DIRTYPE),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid, entry.linkname = kind, 0o4755, 7, "/etc/passwd"
            entry.size = 2 if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(b"hi") if entry.size else None)
    with tarfile.open(fileobj=io.BytesIO(filtered(buffer.getvalue()))) as kept:
        members = [(member.name, member.mode, member.uid) for member in kept]
    assert members == [("good/run.sh", 0o755, 0), ("good", 0o755, 0)]
