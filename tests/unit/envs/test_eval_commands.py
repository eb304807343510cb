"""``tollway eval`` and ``tollway episode run`` as a user calls them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tollway.cli import main
from tollway.envs.micro_swe.projects import project_at
from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.sandboxes.probe import probe
from tollway.session_server.columns import unpack_rows
from tollway.session_server.fake import FakeServer
from tollway.session_server.families.compact import ASSISTANT, CALL, END, SEP

_PROBE = probe()
pytestmark = pytest.mark.skipif(not _PROBE.available or _PROBE.python is None, reason=_PROBE.reason)
HERE = Path(__file__).resolve().parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs and may write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_reference_solution_earns_everything_and_nothing_earns_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = _json(capsys, "eval", "--harness", "gold", "--episodes", "8")
    assert (gold["reward"], gold["episodes"], gold["errors"], gold["complete"]) == (1.0, 8, 0, True)
    assert gold["cache_hit_rate"] is None
    assert {row["task"] for row in gold["tasks"]} == {f"micro-swe/heldout/0/{index}" for index in range(8)}  # type: ignore[attr-defined]
    empty = _json(capsys, "eval", "--harness", "empty", "--tasks", "0-1,5", "--samples", "2")
    assert (empty["reward"], empty["episodes"], empty["pass_at"]) == (0.0, 6, {"1": 0.0, "2": 0.0})


def test_the_tables_fit_80_columns_and_need_no_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--harness", "gold", "--episodes", "3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^reward +1\.000 \(95 % 0\.438 to 1\.000\) over 3 episodes", out, re.MULTILINE)
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_one_episode_shows_its_phases_and_keeps_its_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["episode", "run", "micro-swe/train/0/3", "--harness", "gold", "--artifacts", "kept"]) == 0
    out = capsys.readouterr().out
    assert [line.strip() for line in out.splitlines()[:6]] == [
        *("micro-swe/train/0/3", "open", "set-up", "agent", "collect", "grade")
    ]
    assert re.search(r"^reward +1\b", out, re.MULTILINE)
    (kept,) = (folder / "kept").iterdir()
    assert {"episode.json", "changes.diff"} == {path.name for path in kept.iterdir()}
    assert (kept / "changes.diff").read_text().startswith("--- a/")
    found = _json(capsys, "episode", "run", "3", "--harness", "empty")
    assert found["reward"] == 0.0
    assert Path(str(found["artifacts"])).parent == folder / "runs" / "default" / "episodes"
    assert found["collected"], "an agent that did nothing still hands in its files"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("episode", "run", "0"), "harness tool-loop calls a model: name a running server with --url"),
        (("episode", "run", "micro-swe/nope", "--harness", "gold"), "no task 'micro-swe/nope'"),
        (("episode", "run", "0", "--harness", "gld"), "env.harness='gld' is unknown; known: claude-code, "),
        (("eval", "--env", "nothing", "--harness", "gold"), "env.name='nothing' is unknown"),
        (("eval", "--url", "http://x", "--engine", "http://y"), "exclude each other"),
        (("eval", "--url", "http://127.0.0.1:1"), "set TOLLWAY_ADMIN_KEY"),
        (("eval", "--engine", "ftp://x"), "--engine: "),
        (("eval", "--harness", "gold", "--tasks", "9-1"), "want FIRST-LAST"),
        (("eval", "--harness", "gold", "--samples", "0"), "--samples and --episodes are 1 or more"),
        (("eval", "--harness", "gold", "--tasks", "1", "--episodes", "2"), "exclude each other"),
        (("eval",), "no checkpoint in"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    folder: Path,
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TOLLWAY_ADMIN_KEY", raising=False)
    assert main([*arguments, "--set", "run.dir=run"]) == 2
    assert words in capsys.readouterr().err


def test_a_failing_episode_is_a_row_and_not_the_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(HERE))
    try:
        found = _json(capsys, "eval", "--harness", "eval_harnesses:Some", "--tasks", "0-2")
    finally:
        sys.path.remove(str(HERE))
    assert (found["reward"], found["episodes"], found["errors"]) == (1.0, 2, 1)
    assert found["errors_by_code"] == {"sandbox_gone": 1}


@pytest.mark.parametrize(("name", "status"), [("Noted", 0), ("Broken", 2)])
def test_an_environment_is_opened_once_and_closed_whatever_happens(
    folder: Path, name: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    arguments = ["--env", f"eval_harnesses:{name}", "--harness", "gold", "--set", "env.release_timeout_s=0.1"]
    for command in (["eval", "--episodes", "2"], ["episode", "run", "0"]):
        assert main([*command, *arguments]) == status
        for done in ("opened", "closed"):
            (folder / done).unlink()
    assert ("the server of tasks does not start" in capsys.readouterr().err) == bool(status)


# -- as a process -------------------------------------------------------------------------------------


class Command:
    """One running ``tollway`` with what it said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out = self.err = ""
        self._reading = [asyncio.create_task(self._read("out")), asyncio.create_task(self._read("err"))]

    async def _read(self, name: str) -> None:
        stream = self.process.stdout if name == "out" else self.process.stderr
        assert stream is not None
        while chunk := await stream.read(65536):
            setattr(self, name, getattr(self, name) + chunk.decode())

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that it says."""
        async with asyncio.timeout(50):
            while not happened():
                assert self.process.returncode is None, self.err
                await asyncio.sleep(0.02)

    async def ended(self) -> int:
        """Its exit status."""
        async with asyncio.timeout(50):
            await asyncio.gather(*self._reading)
            return await self.process.wait()


@asynccontextmanager
async def _command(folder: Path, *arguments: str) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tollway", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(HERE), "TOLLWAY_ADMIN_KEY": "admin-key", "COLUMNS": "80"},
    )
    command = Command(process)
    try:
        yield command
    finally:
        if process.returncode is None:
            process.kill()
        await command.ended()


@pytest.fixture
def sandboxes() -> Iterator[Path]:
    """A place that the uids of sandboxes can reach; directories of pytest's are private."""
    with tempfile.TemporaryDirectory(prefix="tollway-eval-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_cleanly_with_what_is_known(
    folder: Path, number: signal.Signals, sandboxes: Path
) -> None:
    root = ("--set", f"sandbox.local.root={sandboxes}")
    arguments = ("eval", "--harness", "eval_harnesses:Some", "--tasks", "0-4", "--json", *root)
    async with _command(folder, *arguments) as command:
        await command.until(lambda: command.err.count("/5  ") == 3)
        command.process.send_signal(number)
        assert await command.ended() == 130
    found = json.loads(command.out)
    assert (found["planned"], found["complete"], found["reward"]) == (5, False, 1.0)
    assert (found["episodes"], found["errors_by_code"]) == (2, {"sandbox_gone": 1})
    assert "stopped" in command.err
    assert "Traceback" not in command.err
    left = [path for path in sandboxes.rglob("*") if path.name.startswith("tollway-")]
    assert [path for each in left for path in each.iterdir() if path.is_dir()] == []


@pytest.mark.slow(120)
async def test_a_harness_that_ignores_everything_cannot_hold_the_command(folder: Path) -> None:
    limits = ("--set", "env.agent_timeout_s=0.2", "--set", "env.release_timeout_s=0.2")
    async with _command(folder, "eval", "--harness", "eval_harnesses:Wedged", "--tasks", "0", *limits) as command:
        assert await command.ended() == 1
    assert "no episode was graded" in command.out
    assert "took longer than 0.2 s" in command.out


def _repairs(index: int) -> Callable[[FakeRequest], FakeReply]:
    """A model that repairs task ``index`` of the training tasks: run, edit, run, submit."""
    rule = project_at(0, "train", index).rule.encode()
    turns = ([CALL, *b"run"], [CALL, *b"edit", SEP, *rule], [CALL, *b"run"], [CALL, *b"submit"])

    def script(request: FakeRequest) -> FakeReply:
        done = request.input_ids.count(ASSISTANT) - 1
        return FakeReply(ids=[*turns[min(done, 3)], END])

    return script


@pytest.mark.slow(150)  # several commands, each a new Python
async def test_an_episode_on_a_running_server_is_exact_and_a_dead_one_is_told(folder: Path) -> None:
    engine = FakeEngine(_repairs(5))
    async with engine, FakeServer(folder / "server", engines=[engine]) as server:
        async with _command(folder, "episode", "run", "5", "--url", server.url, "--json") as command:
            assert await command.ended() == 0, command.err
        found = json.loads(command.out)
        assert (found["reward"], found["calls"]) == (1.0, 4)
        assert found["cached_tokens"] is not None
        (row,) = unpack_rows((Path(found["artifacts"]) / "trajectory.safetensors").read_bytes())
        last = max(engine.replies, key=lambda rid: len(engine.sent(rid)))
        assert row.token_ids.tolist() == [*engine.sent(last), *engine.replies[last]]
        assert row.reward == 1.0
        # Harnesses without a model have their sessions there, too, when a server is named.
        async with _command(folder, "eval", "--url", server.url, "--harness", "gold", "--tasks", "5") as command:
            assert await command.ended() == 0, command.err
        assert "reward" in command.out
        fleet = ("--url", server.url, "--episodes", "2", "--json")
        async with _command(folder, "eval", *fleet, "--set", "env.split=train") as command:
            assert await command.ended() == 0, command.err
        assert json.loads(command.out)["cache_hit_rate"] > 0
    async with _command(folder, "eval", *fleet) as command:
        assert await command.ended() == 1
    assert f"no session server at {server.url}: Connection refused" in command.err


@pytest.mark.slow(120)
async def test_engines_are_started_for_an_evaluation_and_end_with_it(folder: Path) -> None:
    """A model of random weights says nothing useful, and says it through the real path."""
    fresh = ("model.fresh.vocab_size=272", "model.fresh.num_hidden_layers=1", "trainer.max_new_tokens=4")
    settings = [part for each in ("run.dir=run", *fresh) for part in ("--set", each)]
    async with _command(
        folder, "eval", "--start-engines", "1", "--episodes", "2", "--json", *settings, "--set", "env.artifacts=kept"
    ) as command:
        assert await command.ended() == 0, command.err
    found = json.loads(command.out)
    assert (found["episodes"], found["errors"], found["artifacts_lost"]) == (2, 0, 0)
    assert found["sampled_tokens"] >= 2
    assert len(list((folder / "kept").iterdir())) == 2
    for log in ("engine.log", "server.log"):
        assert "Finished server process" in (folder / "run" / "logs" / log).read_text(), "it was ended, not killed"


@pytest.mark.slow(120)
async def test_a_server_that_dies_in_the_middle_ends_an_evaluation_with_what_is_known(folder: Path) -> None:
    """Two tasks are done when the server goes; the third finds nobody."""
    engine = FakeEngine()
    waiting = asyncio.Event()

    def script(request: FakeRequest) -> FakeReply:
        if request.number < 2:
            return FakeReply(ids=[*b"no", END])
        waiting.set()
        return FakeReply(ids=[*b"no", END], delay_s=30)

    engine.script = script
    async with engine:
        async with FakeServer(folder / "server", engines=[engine]) as server:
            command_line = ("eval", "--url", server.url, "--episodes", "4", "--json", "--set", "env.max_episodes=1")
            process = _command(folder, *command_line)
            command = await process.__aenter__()
            await asyncio.wait_for(waiting.wait(), 50)
        # The server is gone, in the middle of a call.
        try:
            assert await command.ended() == 1, command.err
        finally:
            await process.__aexit__(None, None, None)
    assert "component_lost" in command.err
    assert f"no session server at {server.url}" in command.err
    found = json.loads(command.out)
    assert (found["episodes"], found["complete"]) == (2, False)
