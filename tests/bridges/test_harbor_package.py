"""What we take for a Harbor task is one for the harbor package, field by field, and what it refuses we refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tollway.envs.harbor.config import HarborConfig
from tollway.envs.harbor.schema import parse
from tollway.envs.harbor.task import read_task, task_directories
from tollway.errors import ConfigError

pytestmark = [pytest.mark.all, pytest.mark.slow(120)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "harbor" / "tasks"
Bridge = Callable[[str], Path]

LOADER = """
import json, sys, warnings
warnings.simplefilter("ignore")
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_task_verifier_mode
found = []
for folder in json.load(sys.stdin):
    try:
        task = Task(folder)
        found.append({
            "valid": Task.is_valid_dir(folder), "instruction": task.instruction,
            "config": task.config.model_dump(mode="json"), "mode": resolve_task_verifier_mode(task.config).value,
        })
    except Exception as error:
        found.append({"error": f"{type(error).__name__}: {error}"})
print(json.dumps(found))
"""
FIELDS = """
import json
from harbor.models.task import config
names = ("TaskConfig", "EnvironmentConfig", "AgentConfig", "VerifierConfig", "SolutionConfig", "StepConfig",
         "PackageInfo", "ArtifactConfig", "HealthcheckConfig", "MCPServerConfig", "VerifierCollectConfig", "TpuSpec")
print(json.dumps({name: sorted(getattr(config, name).model_fields) for name in names}))
"""


def _run(python: Path, program: str, sent: object = None) -> object:
    done = subprocess.run(
        [python, "-c", program], input=json.dumps(sent), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_the_example_tasks_load_in_the_real_package_and_say_the_same_there(bridge: Bridge) -> None:
    folders = task_directories(EXAMPLES)
    found = _run(bridge("harbor"), LOADER, [str(folder) for folder in folders])
    assert isinstance(found, list)
    for folder, theirs in zip(folders, found, strict=True):
        ours = read_task(folder, HarborConfig(), {})
        assert theirs["valid"] is True, theirs
        assert theirs["instruction"].strip() == ours.instruction.strip()
        assert theirs["mode"] == ("separate" if ours.file.verifier.separate else "shared")
        config = theirs["config"]
        assert config["schema_version"] == ours.file.schema_version
        assert config["agent"]["timeout_sec"] == ours.file.agent.timeout_sec
        assert config["verifier"]["timeout_sec"] == ours.file.verifier.timeout_sec
        for field in ("cpus", "memory_mb", "storage_mb", "network_mode", "env", "workdir", "docker_image"):
            assert config["environment"][field] == getattr(ours.file.environment, field), field


def test_we_know_every_key_that_the_package_knows(bridge: Bridge) -> None:
    from tollway.envs.harbor import schema

    ours = {
        "TaskConfig": schema.TaskFile, "EnvironmentConfig": schema.EnvironmentPart, "AgentConfig": schema.AgentPart,
        "VerifierConfig": schema.VerifierPart, "SolutionConfig": schema.SolutionPart, "StepConfig": schema.StepPart,
        "PackageInfo": schema.PackagePart, "ArtifactConfig": schema.ArtifactPart,
        "HealthcheckConfig": schema.HealthcheckPart, "MCPServerConfig": schema.McpServerPart,
        "VerifierCollectConfig": schema.CollectPart, "TpuSpec": schema.TpuPart,
    }  # fmt: skip
    theirs = _run(bridge("harbor"), FIELDS)
    assert isinstance(theirs, dict)
    for name, fields in theirs.items():
        missing = set(fields) - set(ours[name].model_fields) - {"allow_internet"}  # read as network_mode
        assert not missing, (name, missing)


@pytest.mark.parametrize(
    "text",
    [
        'schema_version = "1.4"\n[agent]\ntimeout_sec = 1.5\nuser = "me"\n[environment]\nmemory = "2G"\ncpus = 0.5\n',
        'version = "1.0"\n[environment]\nallow_internet = false\n',
        '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\ncpus = 2\n',
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]\n',
        '[task]\nname = "org/name"\n[[verifier.collect]]\ncommand = "true"\n',
        '[environment]\nnetwork_mode = "open"\n',
        '[environment]\nallowed_hosts = ["a.example"]\n',
        '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 2\n',
        '[task]\nname = "nameless"\n',
        'artifacts = ["/app/../x"]\n',
        '[environment]\nmemory = "lots"\n',
        "[agent\n",
    ],
)
def test_both_take_or_both_refuse_a_task_file(bridge: Bridge, tmp_path: Path, text: str) -> None:
    folder = Path(shutil.copytree(EXAMPLES / "hello-file", tmp_path / "task"))
    (folder / "task.toml").write_text(text)
    (theirs,) = _run(bridge("harbor"), LOADER, [str(folder)])  # type: ignore[misc]
    if "error" in theirs:
        with pytest.raises(ConfigError):
            parse(text, "task.toml")
        return
    ours = parse(text, "task.toml")
    environment = theirs["config"]["environment"]
    assert environment["memory_mb"] == ours.environment.memory_mb
    assert environment["network_mode"] == (ours.environment.network_mode or "public")


def test_the_packages_own_template_is_read_and_named_for_what_it_lacks(bridge: Bridge, tmp_path: Path) -> None:
    program = "import json, harbor, pathlib; print(json.dumps(str(pathlib.Path(harbor.__file__).parent)))"
    source = Path(str(_run(bridge("harbor"), program))) / "cli" / "template-task"
    folder = Path(shutil.copytree(source, tmp_path / "template"))
    (folder / "instruction.md").write_text("Do it.")
    task = read_task(folder, HarborConfig(), {})
    assert (task.agent.workdir, task.agent.image, task.verifier) == ("/app", None, None)
