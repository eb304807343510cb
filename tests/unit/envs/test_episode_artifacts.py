"""What an episode leaves on disk: whole folders, safe names, bounded sizes, and never at the cost of the episode."""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from pathlib import Path

import pytest
from episode_stage import Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.envs import changes as changes_module
from tollway.envs.artifacts import folder_name
from tollway.envs.base import AgentRun, Machine, Task
from tollway.envs.changes import changes, file_diff
from tollway.errors import ConfigError, SandboxGone
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.session_server.columns import unpack_rows


async def test_a_folder_has_the_verdict_the_trajectory_the_logs_and_the_changes(tmp_path: Path) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        stage = Stage(provider, artifacts=str(tmp_path / "kept"))
        episode = await stage.episode()
        assert episode.folder is not None
        assert episode.folder.parent == tmp_path / "kept"
        record = json.loads((episode.folder / "episode.json").read_text())
        assert record["task"] == "counting/0"
        assert record["session"] == episode.session_id
        assert record["reward"] == 1.0
        assert record["verdict"] == {"reward": 1.0, "reason": "judged", "flags": []}
        assert set(record["seconds"]) == {"wait", "open", "set-up", "agent", "collect", "grade", "record", "total"}
        assert record["collected"] == {"a.txt": 4}
        assert record["weight_versions"] == [3]
        assert record["cached_tokens"] is None
        assert sorted([*record["files"], "episode.json"]) == sorted(os.listdir(episode.folder))
        assert (episode.folder / "agent.log").read_bytes() == b"agent says hello"
        assert (episode.folder / "grading.log").read_bytes() == b"graded"
        assert (episode.folder / "changes.diff").read_bytes() == b"--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-one\n+two\n"
        (row,) = unpack_rows((episode.folder / "trajectory.safetensors").read_bytes())
        assert row.token_ids.tolist() == [1, 2]
        assert row.reward == 1.0
        assert [entry.name for entry in (tmp_path / "kept").iterdir()] == [episode.folder.name]


async def test_a_failed_episode_keeps_its_errors_and_what_was_recorded(tmp_path: Path) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        stage = Stage(provider, artifacts=str(tmp_path), attempts=2)
        stage.sessions.trajectories = stage.sessions_rows  # type: ignore[method-assign]
        stage.counts.breaks["grade"] = SandboxGone("evicted")
        episode = await stage.episode()
        assert episode.folder is not None
        record = json.loads((episode.folder / "episode.json").read_text())
        assert (record["reward"], record["error"], record["ended_in"]) == (None, "sandbox_gone: evicted", "grade")
        assert record["earlier_errors"] == ["sandbox_gone: evicted"]
        assert record["attempt"] == 2
        assert record["verdict"] is None
        assert "trajectory.safetensors" in record["files"]
        assert "changes.diff" in record["files"]
        await stage.assert_clean()


async def test_a_disk_that_takes_no_more_loses_artifacts_and_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        stage = Stage(provider, artifacts=str(tmp_path / "kept"))

        def full(*_: object, **__: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_bytes", full)
            episodes = await stage.episodes(samples=2)
        assert [each.rollout().reward for each in episodes] == [1.0, 1.0]
        assert [each.folder for each in episodes] == [None, None]
        assert stage.runner.artifacts is not None
        assert (stage.runner.artifacts.kept, stage.runner.artifacts.lost) == (0, 2)
        assert "No space left on device" in caplog.text
        assert list((tmp_path / "kept").iterdir()) == [], "nothing half-written stays"
        assert (await stage.episode()).folder is not None


async def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with FakeProvider(SandboxConfig()) as provider:
        stage = Stage(provider, artifacts=str(tmp_path / "file" / "kept"))
        episode = await stage.episode()
        assert episode.rollout().reward == 1.0
        assert episode.folder is None
        assert stage.runner.artifacts is not None
        with pytest.raises(ConfigError, match="Not a directory; name another directory"):
            stage.runner.artifacts.check()


async def test_a_folder_is_bounded_and_says_what_was_cut(tmp_path: Path) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        stage = Stage(provider, artifacts=str(tmp_path), artifact_mb=0.25)
        log = b"\xff" * 3_000_000
        stage.harness.result = AgentRun(turns=1, submitted=True, finish="submitted", log=log)
        episode = await stage.episode()
        assert episode.folder is not None
        record = json.loads((episode.folder / "episode.json").read_text())
        assert record["cut"] == ["agent.log"]
        assert sum(path.stat().st_size for path in episode.folder.iterdir()) <= 0.25 * 2**20
        assert b"bytes left out" in (episode.folder / "agent.log").read_bytes()
        # Less room than any file needs: the verdict alone is there.
        tight = Stage(provider, artifacts=str(tmp_path), artifact_mb=0.0625)
        folder = (await tight.episode()).folder
        assert folder is not None
        record = json.loads((folder / "episode.json").read_text())
        assert record["left_out"] == ["trajectory.safetensors"]
        assert record["cut"] == ["agent.log", "grading.log", "changes.diff"]


@given(task_id=st.text(max_size=300), session=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_task_id_gives_a_name_that_every_file_system_takes(task_id: str, session: str) -> None:
    name = folder_name(task_id, session)
    assert name.isascii()
    assert len(name) <= 120
    assert not set(name) & set('/\\:*?"<>|. \0')
    assert not name.startswith("-")


def test_names_of_different_tasks_differ() -> None:
    names = {folder_name(task_id, "s") for task_id in ("a/b", "a-b", "a//b", "A/b", "a/b ", "..", ".", "", "/")}
    assert len(names) == 9


# -- diffs ------------------------------------------------------------------------------------------

LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\r\n", b"\xff\n", b"\x0c\n", b"d\x85e\n"]), max_size=12)
ENDS = st.sampled_from([b"", b"end", b"\xe2\x80\xa8"])


@given(before=st.tuples(LINES, ENDS), after=st.tuples(LINES, ENDS))
@settings(max_examples=60, deadline=None)
def test_a_diff_applied_with_git_gives_the_file_back(
    before: tuple[list[bytes], bytes], after: tuple[list[bytes], bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    old, new = (b"".join(lines) + end for lines, end in (before, after))
    if old == new or not old or not new:
        return
    folder = tmp_path_factory.mktemp("patch")
    (folder / "f").write_bytes(old)
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn"],
        check=False,
        input=file_diff("f", old, new),
        cwd=folder,
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "f").read_bytes() == new


def test_new_removed_and_binary_files_are_named() -> None:
    assert file_diff("n", None, b"x\n") == b"--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"
    assert file_diff("n", b"x\n", None) == b"--- a/n\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert file_diff("n", b"a\0b", b"c") == b"Binary files a/n and b/n differ (3 bytes to 1 bytes)\n"
    assert file_diff("a\nb", b"x", b"y").startswith(b"--- a/a\\nb\n")


def test_a_diff_against_a_tree_reads_nothing_outside_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("1\n")
    (tree / "gone.py").write_text("old\n")
    task = Task(task_id="t", messages=(), sources=("a.py", "gone.py", "never.py"), machine=Machine(tree=tree))
    shown = changes(task, {"a.py": b"1\n2\n", "../secret": b"mine\n", "new.py": b"n\n"})
    assert b"-secret" not in shown
    assert b"+mine" in shown
    assert b"--- a/gone.py\n+++ /dev/null" in shown
    assert b"--- /dev/null\n+++ b/new.py" in shown
    assert b"+2" in shown


def test_a_diff_of_huge_files_takes_no_time_worth_speaking_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "_MOST_PAIRS", 100)
    old = b"".join(b"%d\n" % number for number in range(50))
    new = b"".join(b"x%d\n" % number for number in range(50))
    shown = file_diff("big", b"same\n" + old, b"same\n" + new)
    assert shown.count(b"@@ ") == 1
    assert (shown.count(b"\n-"), shown.count(b"\n+x")) == (50, 50)


async def test_no_folder_is_written_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with FakeProvider(SandboxConfig()) as provider:
        stage = Stage(provider)
        stage.sessions.faults["close"] = deque()
        assert (await stage.episode()).folder is None
    assert list(tmp_path.iterdir()) == []
