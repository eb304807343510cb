"""Write a task as a directory: Harbor's files beside ``swe.json``, and the instruction.

The instruction says what goes wrong as the failing tests show it and never where: no line of the patch stands in
it. Depends on ``task`` and ``patches``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tollway.envs.swe import patches, site
from tollway.envs.swe.task import Sdist, SweTask

__all__ = ["instruction", "leaks", "write_task"]

MAX_SHOWN = 5


def instruction(task: SweTask, notes: Mapping[str, str]) -> str:
    """What the agent is told: which behaviour is wrong, shown by tests and what they said."""
    name = task.source.name if hasattr(task.source, "name") else task.source.repo
    tests = list(task.fail_to_pass)
    first = tests[0].partition("::")[0]
    lines = [
        f"The Python library in this directory, {name}, misbehaves: a change broke something that worked before.",
        "",
        f"{'This test fails' if len(tests) == 1 else 'These tests fail'} and should pass:",
        "",
    ]
    shown = [one for one in tests if notes.get(one)] or tests
    lines += [f"- {one}" for one in tests]
    said = []
    for one in shown[:MAX_SHOWN]:
        text = "\n".join(notes.get(one, "").strip().splitlines()[:12])[:800]
        text = re.sub(r" at 0x[0-9a-f]+", " at 0x...", text)  # it differs from run to run
        if text and not leaks(text, task):
            said += [f"{one}:", *(f"    {line}" for line in text.splitlines()), ""]
    if said:
        lines += ["", "What they say:", "", *said]
    where = ", ".join(f"{one}/" for one in task.packages) + ", ".join(task.modules if not task.packages else ())
    lines += [
        "",
        f"Find the cause in the library's own code ({where}) and repair it, so that these tests pass and all others"
        " still do. Do not change tests: they are restored before your work is judged, and only Python files of the"
        " library are taken.",
        "",
        f"Run tests with: {test_command(task, [first])}",
    ]
    text = "\n".join(lines).rstrip() + "\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


def leaks(text: str, task: SweTask) -> bool:
    """Whether ``text`` shows a line of the patch or names a place in the library's sources."""
    touched = [line.strip() for one in task.fix for hunk in one.hunks for tag, line in hunk.lines if tag != " "]
    files = [one.path for one in task.fix if one.path not in task.modules]  # where there is but one, it is no secret
    return any(len(line) >= 6 and not line.isidentifier() and line in text for line in touched) or any(
        one in text for one in files
    )


def test_command(task: SweTask, files: Sequence[str]) -> str:
    """How the agent runs tests; the environment sets PYTHONPATH."""
    if task.framework == "unittest":
        modules = [one.removesuffix(".py").replace("/", ".") for one in files]
        return shlex.join(["python3", "-m", "unittest", *modules])
    return shlex.join(["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files])


def write_task(task: SweTask, notes: Mapping[str, str], into: Path, *, said: str = "") -> Path:
    """Write the directory of a task, named by its id, under ``into``; ``said`` is an instruction made elsewhere."""
    folder = into / task.instance_id
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    tree = json.loads(task.model_dump_json(by_alias=True, exclude_defaults=True))
    tree = {"schema": task.form, **tree}
    _write(folder / "swe.json", json.dumps(tree, indent=1, ensure_ascii=False) + "\n")
    _write(folder / "instruction.md", said.rstrip() + "\n" if said else instruction(task, notes))
    _write(folder / "task.toml", _toml(task))
    _write(folder / "environment" / "Dockerfile", _dockerfile(task))
    _write(folder / "environment" / "bug.patch", task.bug_patch)
    _write(folder / "solution" / "fix.patch", patches.render(task.fix))
    _write(
        folder / "solution" / "solve.sh", "#!/bin/sh\nset -eu\ncd /workspace\npatch -p1 < /solution/fix.patch\n", 0o755
    )
    _write(folder / "tests" / "test.sh", _TEST_SCRIPT, 0o755)
    _write(folder / "tests" / "wanted.json", json.dumps([*task.fail_to_pass, *task.pass_to_pass], indent=0) + "\n")
    return folder


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _toml(task: SweTask) -> str:
    return f"""\
schema_version = "1.4"

[metadata]
name = {json.dumps(task.instance_id)}
category = "swe"
tags = ["swe", "python"]

[agent]
timeout_sec = 1800.0

[verifier]
timeout_sec = {task.timeouts.total_s}

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 1024
"""


def _dockerfile(task: SweTask) -> str:
    """For runners that build images: the same tree and packages."""
    if not isinstance(task.source, Sdist):
        said = "the source of this task is no download; run it with: tollway eval --env swe"
        return f"FROM python:3.11-slim\nRUN echo '{said}' >&2 && exit 1\n"
    source = task.source
    wanted = " ".join(f"{one.name}=={one.version}" for one in site.packages_for(task.requires))
    return f"""\
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends patch && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --target /opt/site {wanted}
WORKDIR /workspace
RUN pip download --no-deps --no-binary :all: -d /tmp/sdist {source.name}=={source.version} \\
 && echo "{source.sha256}  $(ls /tmp/sdist/*)" | sha256sum -c - \\
 && tar -xzf /tmp/sdist/* --strip-components=1 -C /workspace && rm -r /tmp/sdist
COPY bug.patch /tmp/bug.patch
RUN patch -p1 < /tmp/bug.patch && rm /tmp/bug.patch
ENV PYTHONPATH={":".join(["/workspace" if one == "." else f"/workspace/{one}" for one in task.roots])}:/opt/site
ENV PYTHONDONTWRITEBYTECODE=1
"""


_TEST_SCRIPT = """\
#!/bin/sh
# Reward 1 when every listed test passes. Runners that read swe.json grade in a fresh sandbox instead.
cd /workspace
python3 - <<'END_OF_PROGRAM'
import json, pathlib, subprocess, sys
wanted = set(json.loads(pathlib.Path("/tests/wanted.json").read_text()))
files = sorted({one.partition("::")[0] for one in wanted})
command = [sys.executable, "-m", "pytest", "-q", "-rA", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider"]
out = subprocess.run([*command, *files], capture_output=True, text=True).stdout
passed = {line[7:] for line in out.splitlines() if line.startswith("PASSED ")}
folder = pathlib.Path("/logs/verifier")
folder.mkdir(parents=True, exist_ok=True)
(folder / "reward.json").write_text(json.dumps({"reward": float(wanted <= passed)}))
END_OF_PROGRAM
"""
