"""``tollway sandbox``: check, list, reap and run, as a shell sees them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tollway.cli import main
from tollway.errors import BadRequest, CapabilityMissing, SandboxError, SandboxUnavailable
from tollway.sandboxes.base import Sandbox, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeCloud, FakeProvider, Machine, Process
from tollway.sandboxes.local import LocalProvider
from tollway.sandboxes.owner import ATTEMPT, OWNER, Owner, created_at, owner_mark, owner_of
from tollway.sandboxes.probe import probe
from tollway.sandboxes.reap import reap

_PROBE = probe()
needs_local = pytest.mark.skipif(not _PROBE.available, reason=_PROBE.reason or "this machine runs local sandboxes")


class Shared(FakeProvider):
    """Every object of this class talks to the same service."""

    cloud_of_all = FakeCloud()

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config, cloud=self.cloud_of_all)


class Broken(FakeProvider):
    """Loses exit codes."""

    def __init__(self, config: SandboxConfig) -> None:
        async def always_zero(process: Process) -> int:
            return 0

        super().__init__(config, programs={"sh": always_zero})


NAME = f"{__name__}:Shared"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Shared.__module__])
    Shared.cloud_of_all = FakeCloud()


def _dead_owner() -> str:
    process = subprocess.Popen(
        [sys.executable, "-c", "from tollway.sandboxes.owner import *; print(owner_mark())"],
        stdout=subprocess.PIPE,
        text=True,
    )
    mark, _ = process.communicate(timeout=30)
    return mark.strip()


def _leave(labels: Mapping[str, str]) -> str:
    """A sandbox at the service whose owner does nothing about it any more."""
    return Shared.cloud_of_all.rent(SandboxSpec(ttl_s=3600, labels=labels), Machine())


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


# -- owners ---------------------------------------------------------------------------------------------


def test_an_owner_label_names_a_process_for_good() -> None:
    mark = owner_mark()
    owner = owner_of({OWNER: mark})
    assert owner is not None
    assert owner.is_here
    assert not owner.is_dead
    assert owner.pid == os.getpid()
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,63}", mark)
    # The pid of a dead process may be somebody else's by now: its start tells.
    assert Owner(owner.host, owner.pid, owner.started + 1).is_dead
    dead = owner_of({OWNER: _dead_owner()})
    assert dead is not None
    assert dead.is_dead
    elsewhere = Owner("another-host", 1, 1)
    assert not elsewhere.is_here
    assert not elsewhere.is_dead


@pytest.mark.parametrize("mark", ["", "x", "h_1_2_zzzzzzzz", "h_x_2_00000000", "a b_1_2_00000000", "h_1_2_00000000_"])
def test_labels_of_others_name_no_owner(mark: str) -> None:
    assert owner_of({OWNER: mark}) is None
    assert owner_of({}) is None
    assert created_at({ATTEMPT: "x-1"}) is None
    assert created_at({}) is None


# -- list and reap ---------------------------------------------------------------------------------------


def test_leftovers_of_dead_owners_are_found_and_ended_and_nobody_elses(capsys: pytest.CaptureFixture[str]) -> None:
    dead = _leave({OWNER: _dead_owner(), ATTEMPT: f"{int(time.time()) - 100}-00", "task": "a"})
    alive = _leave({OWNER: owner_mark(), "task": "b"})
    elsewhere = _leave({OWNER: "another-host_1_2_0123abcd", "task": "a"})
    foreign = _leave({"made-by": "hand"})
    assert main(["sandbox", "list", "--provider", NAME]) == 0
    said = _said(capsys)
    for name, state in ((dead, "dead"), (alive, "alive"), (elsewhere, "elsewhere"), (foreign, "unknown")):
        assert re.search(rf"^{name}  owner {state}  ", said, re.MULTILINE), said
    assert "age 10" in said
    assert main(["sandbox", "reap", "--provider", NAME, "--json"]) == 0
    assert [each["id"] for each in json.loads(_said(capsys))] == [dead]
    assert set(Shared.cloud_of_all.rented) == {alive, elsewhere, foreign}
    assert main(["sandbox", "reap", "--provider", NAME, "--label", "task=a"]) == 0
    assert set(Shared.cloud_of_all.rented) == {alive, foreign}


def test_age_ends_whatever_is_older_and_known_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    old = _leave({ATTEMPT: f"{int(time.time()) - 1000}-00", OWNER: owner_mark()})
    young = _leave({ATTEMPT: f"{int(time.time()) - 10}-00"})
    ageless = _leave({"made-by": "hand"})
    assert main(["sandbox", "reap", "--provider", NAME, "--older-than", "500"]) == 0
    assert old not in Shared.cloud_of_all.rented
    assert {young, ageless} <= set(Shared.cloud_of_all.rented)


def test_what_a_killed_trainer_left_is_there_until_it_is_reaped(capsys: pytest.CaptureFixture[str]) -> None:
    mark = _dead_owner()
    left = [_leave({OWNER: mark}) for _ in range(30)]
    assert main(["sandbox", "list", "--provider", NAME, "--json"]) == 0
    assert {each["id"] for each in json.loads(_said(capsys))} == set(left)
    assert main(["sandbox", "reap", "--provider", NAME]) == 0
    assert Shared.cloud_of_all.rented == {}
    assert "30 ended" in _said(capsys)


async def test_a_leftover_that_cannot_be_ended_is_told() -> None:
    cloud = FakeCloud()
    cloud.rent(SandboxSpec(ttl_s=60, labels={OWNER: _dead_owner()}), Machine())
    async with FakeProvider(SandboxConfig(kill_timeout_s=0.05), cloud=cloud) as provider:
        provider.faults.stuck_kills = 100
        (left,) = await reap(provider)
        assert left.error is not None
        assert "not deleted" in left.error
        provider.faults.stuck_kills = 0
    with pytest.raises(BadRequest):
        await reap(provider, older_than_s=-1)


def test_providers_that_keep_nothing_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "list", "--provider", "local"]) == 1
    assert CapabilityMissing.code in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--label", "x"], ["--label", "=x"], ["--set", "sandbox.max_live=0"]])
def test_wrong_calls_are_told(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    assert main(["sandbox", "list", "--provider", NAME, *wrong]) == 2
    assert capsys.readouterr().err


# -- check ----------------------------------------------------------------------------------------------


def test_check_prints_one_line_per_promise_and_names_a_fake(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "output_is_bytes", "--only", "others_can_attach"]
    assert main(["sandbox", "check", "fake", *only]) == 0
    said = _said(capsys)
    assert len(re.findall(r"^ok   .*(output_is_bytes|others_can_attach)", said, re.MULTILINE)) == 2
    assert "FAKE" in said
    assert "2 promises kept, 0 broken, 0 not claimed" in said


def test_check_fails_for_a_broken_promise(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "exit_codes_are_results", "--only", "sandboxes_do_not_share_files"]
    assert main(["sandbox", "check", f"{__name__}:Broken", "--json", *only]) == 1
    report = json.loads(_said(capsys))
    assert (report["passed"], report["failed"]) == (1, 1)
    assert report["stand_in"]
    broken = next(each for each in report["checks"] if each["error"])
    assert broken["name"] == "exit_codes_are_results"
    assert "code 3" in broken["error"]
    assert main(["sandbox", "check", "fake", "--only", "no_such_check"]) == 2
    assert main(["sandbox", "check", "no-such-provider"]) == 2


class Absent(FakeProvider):
    """Cannot run here."""

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxUnavailable("set MINE_API_KEY")


def test_check_says_at_once_where_a_provider_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check", f"{__name__}:Absent"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "set MINE_API_KEY" in captured.err


# -- run ------------------------------------------------------------------------------------------------


@needs_local
def test_run_is_the_command_in_a_fresh_sandbox(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"of the tree\n")
    assert main(["sandbox", "run", "--provider", "local", "--tree", str(tmp_path), "--", "cat", "f"]) == 0
    assert capfdbinary.readouterr().out == b"of the tree\n"
    assert main(["sandbox", "run", "--set", "sandbox.provider=local", r"printf '\226'; echo err >&2; exit 3"]) == 3
    captured = capfdbinary.readouterr()
    assert (captured.out, captured.err) == (b"\x96", b"err\n")
    assert main(["sandbox", "run", "--provider", "local", "--timeout", "0.5", "--", "sleep", "60"]) == 124
    assert b"0.5 s" in capfdbinary.readouterr().err
    (tmp_path / "new").mkdir()
    assert main(["sandbox", "run", "--provider", "local", "--tree", str(tmp_path / "f"), "true"]) == 1


@needs_local
def test_run_has_no_network_unless_asked(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        command = ["--", "/usr/bin/python3", "-c", code]
        assert main(["sandbox", "run", "--provider", "local", *command]) == 1
        assert b"refused" in capfdbinary.readouterr().err
        assert main(["sandbox", "run", "--provider", "local", "--network", *command]) == 0


@needs_local
async def test_a_provider_without_host_files_gets_trees_by_upload(tmp_path: Path) -> None:
    class Remote(LocalProvider):
        """The local provider, as far away as a remote one."""

        caps = frozenset({"stderr"})

        async def _create(self, spec: SandboxSpec) -> Sandbox:
            return await super()._create(
                SandboxSpec(ttl_s=spec.ttl_s, labels=spec.labels, files=spec.files)  # it never hears of trees
            )

    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "big").write_bytes(os.urandom(9 << 20))
    (tmp_path / "pkg" / "run").write_bytes(b"#!/bin/sh\necho ran\n")
    (tmp_path / "pkg" / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("pkg/run")
    async with Remote(SandboxConfig()) as provider:
        sandbox = await provider.create(SandboxSpec(ttl_s=60, labels={"a": "b"}))
        await sandbox.put_tree(tmp_path)
        done = await sandbox.exec("./link && wc -c < pkg/big && ls -A", timeout_s=30)
        assert done.stdout.split() == [b"ran", b"9437184", b"link", b"pkg"], done
        await sandbox.get_tree("pkg", tmp_path / "back")
        assert (tmp_path / "back" / "big").read_bytes() == (tmp_path / "pkg" / "big").read_bytes()
        with pytest.raises(SandboxError):
            await sandbox.put_tree(tmp_path / "pkg", "/usr/not-writable")


def test_a_loop_that_is_closed_early_is_no_problem() -> None:
    async def leave() -> None:
        provider = FakeProvider(SandboxConfig())
        await provider.create(SandboxSpec(ttl_s=60, labels={"a": "b"}))

    asyncio.run(leave())
