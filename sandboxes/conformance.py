"""The suite that every provider must pass, runnable by a third party unchanged.

Each check is an async function over an open provider; it raises ``Nonconformance`` with the promise that was
broken. ``run`` runs them all and reports; test suites parametrise over ``CHECKS``. Every check kills what it
creates. Only POSIX commands are used. Depends on ``base``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tollway.errors import BadRequest, CapabilityMissing, SandboxGone
from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec

__all__ = ["CHECKS", "Check", "Nonconformance", "Outcome", "run"]

Check = Callable[[SandboxProvider], Awaitable[None]]
_LABELS = {"suite": "conformance"}
_TIMEOUT_S = 60.0


class Nonconformance(Exception):
    """A promise of the protocol that the provider does not keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check."""

    name: str
    error: str | None
    """``None`` when it passed."""


async def run(provider: SandboxProvider) -> tuple[Outcome, ...]:
    """Run every check, one after the other, and say how each went. Never raises for a broken promise."""
    outcomes = []
    for check in CHECKS:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await check(provider)
            error = None
        except Exception as problem:  # whatever a provider raises is its verdict
            error = f"{type(problem).__name__}: {problem}"
        outcomes.append(Outcome(name=check.__name__, error=error))
    return tuple(outcomes)


@asynccontextmanager
async def _sandbox(
    provider: SandboxProvider, *, ttl_s: float = 60.0, files: dict[str, bytes] | None = None, **labels: str
) -> AsyncIterator[Sandbox]:
    sandbox = await provider.create(SandboxSpec(ttl_s=ttl_s, labels={**_LABELS, **labels}, files=files or {}))
    try:
        yield sandbox
    finally:
        await sandbox.kill()


def _want(holds: bool, promise: str, found: object = "") -> None:
    if not holds:
        raise Nonconformance(f"{promise}; found {found!r}")


async def exit_codes_are_results(provider: SandboxProvider) -> None:
    """0, another code, and an unknown program."""
    async with _sandbox(provider) as sandbox:
        for cmd, code in ((["true"], 0), ("exit 3", 3), (["no-such-program-here"], 127)):
            done = await sandbox.exec(cmd, timeout_s=20)
            _want(done.exit_code == code and not done.timed_out, f"{cmd} ends with code {code}", done)


async def output_is_bytes(provider: SandboxProvider) -> None:
    """Output that is no valid text arrives as it was written; stderr apart where the provider says so."""
    async with _sandbox(provider) as sandbox:
        done = await sandbox.exec(["printf", r"\226\377"], timeout_s=20)
        _want(done.stdout == b"\x96\xff", "output bytes are unchanged", done.stdout)
        done = await sandbox.exec("echo out; echo err >&2", timeout_s=20)
        split = (b"out\n", b"err\n") if "stderr" in provider.caps else (b"out\nerr\n", b"")
        _want((done.stdout, done.stderr) == split, "stderr is separate exactly if caps say so", done)


async def stdin_env_and_cwd_reach_the_command(provider: SandboxProvider) -> None:
    """What a call sets is what its command sees, for that call only."""
    async with _sandbox(provider, files={"sub/f": b"x"}) as sandbox:
        done = await sandbox.exec(["cat"], stdin=b"a\x00b", timeout_s=20)
        _want(done.stdout == b"a\x00b", "stdin reaches the command", done)
        done = await sandbox.exec(["printenv", "TOLLWAY_X"], env={"TOLLWAY_X": "a b"}, timeout_s=20)
        _want(done.stdout == b"a b\n", "env reaches the command", done)
        done = await sandbox.exec(["printenv", "TOLLWAY_X"], timeout_s=20)
        _want(done.exit_code == 1, "env of one call does not reach the next", done)
        done = await sandbox.exec(["cat", "f"], cwd="sub", timeout_s=20)
        _want(done.stdout == b"x", "cwd is relative to the workspace", done)


async def a_timeout_is_a_result(provider: SandboxProvider) -> None:
    """Partial output comes back, in time, and the sandbox works afterwards."""
    async with _sandbox(provider) as sandbox:
        done = await sandbox.exec("echo early; sleep 60", timeout_s=1.5)
        _want(done.timed_out and done.exit_code is None, "a timeout is a result without exit code", done)
        _want(done.stdout == b"early\n", "partial output is returned", done.stdout)
        done = await sandbox.exec(["echo", "alive"], timeout_s=20)
        _want(done.stdout == b"alive\n", "the sandbox is usable after a timeout", done)


async def output_is_capped(provider: SandboxProvider) -> None:
    """Endless output neither fills memory nor goes unmarked."""
    async with _sandbox(provider) as sandbox:
        done = await sandbox.exec(["yes"], timeout_s=1.0, max_output=1000)
        _want(done.truncated and done.stdout == b"y\n" * 500, "output is cut at the cap and marked", len(done.stdout))
        done = await sandbox.exec(["echo", "x"], timeout_s=20, max_output=2)
        _want(not done.truncated and done.stdout == b"x\n", "output that fits exactly is not marked", done)


async def files_go_in_and_out(provider: SandboxProvider) -> None:
    """Files of the spec, written files and a command's files are the same files."""
    async with _sandbox(provider, files={"a/b.bin": b"\x00\xff"}) as sandbox:
        _want(await sandbox.read("a/b.bin") == b"\x00\xff", "files of the spec are there")
        await sandbox.write("new/dir/c", b"one")
        await sandbox.write("new/dir/c", b"2")
        done = await sandbox.exec(["cat", "new/dir/c"], timeout_s=20)
        _want(done.stdout == b"2", "a command reads what was written last", done)
        await sandbox.exec("echo made > made", timeout_s=20)
        _want(await sandbox.read("made") == b"made\n", "a command's file can be read")


async def reads_stay_inside(provider: SandboxProvider) -> None:
    """Missing files, parents, links out and too large files are refused as the caller's error."""
    async with _sandbox(provider, files={"big": b"12345"}) as sandbox:
        await sandbox.exec(["ln", "-s", "/etc", "w"], timeout_s=20)
        for path in ("missing", "../../etc/passwd", "w/passwd", "/etc/passwd"):
            try:
                data = await sandbox.read(path)
            except BadRequest:
                continue
            _want(False, f"reading {path!r} is refused", data[:20])
        try:
            await sandbox.read("big", max_bytes=4)
        except BadRequest:
            return
        _want(False, "a file above max_bytes is refused")


async def sandboxes_do_not_share_files(provider: SandboxProvider) -> None:
    """Two live sandboxes are two machines."""
    async with _sandbox(provider, files={"mine": b"1"}) as first, _sandbox(provider) as second:
        _want(first.id != second.id, "ids are unique", first.id)
        done = await second.exec(["cat", "mine"], timeout_s=20)
        _want(done.exit_code != 0, "another sandbox's file is not there", done)


async def list_and_attach_find_live_ones(provider: SandboxProvider) -> None:
    """Labels select, kill removes."""
    async with _sandbox(provider, mark="a") as sandbox:
        async with _sandbox(provider, mark="b"):
            found = await provider.list({"mark": "a"})
            _want([info.id for info in found] == [sandbox.id], "list selects by labels", found)
            _want(found[0].labels.get("suite") == "conformance", "labels are kept", found[0].labels)
        again = await provider.attach(sandbox.id)
        _want(again.id == sandbox.id, "attach finds a live sandbox", again.id)
    _want(await provider.list(_LABELS) == (), "killed sandboxes are not listed")


async def kill_is_final_and_idempotent(provider: SandboxProvider) -> None:
    """Twice, at the same time, and everything afterwards is SandboxGone."""
    async with _sandbox(provider) as sandbox:
        await asyncio.gather(sandbox.kill(), sandbox.kill())
        await sandbox.kill()
        for call in (
            sandbox.exec(["true"], timeout_s=5),
            sandbox.read("x"),
            sandbox.write("x", b""),
            sandbox.extend(5),
        ):
            try:
                await call
            except SandboxGone:
                continue
            _want(False, "a killed sandbox answers SandboxGone")


async def kill_ends_running_commands(provider: SandboxProvider) -> None:
    """A command in flight ends with SandboxGone, soon."""
    async with _sandbox(provider) as sandbox:
        running = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0.3)
        await sandbox.kill()
        try:
            async with asyncio.timeout(20):
                await running
        except SandboxGone:
            return
        _want(False, "a command of a killed sandbox raises SandboxGone")


async def cancelling_a_command_leaves_the_sandbox(provider: SandboxProvider) -> None:
    """The caller gets its cancellation; the sandbox goes on."""
    async with _sandbox(provider) as sandbox:
        running = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0.3)
        running.cancel()
        async with asyncio.timeout(20):
            await asyncio.gather(running, return_exceptions=True)
        _want(running.cancelled(), "the cancellation arrives", running)
        done = await sandbox.exec(["echo", "on"], timeout_s=20)
        _want(done.stdout == b"on\n", "the sandbox works after a cancelled command", done)


async def ttl_ends_it_and_extend_keeps_it(provider: SandboxProvider) -> None:
    """The reaper needs nobody's help."""
    async with _sandbox(provider, ttl_s=1.0, mark="dies") as dies, _sandbox(provider, ttl_s=1.0, mark="lives") as lives:
        await lives.extend(60)
        async with asyncio.timeout(20):
            while await provider.list({"mark": "dies"}):  # noqa: ASYNC110 - a provider has no event to wait for
                await asyncio.sleep(0.05)
        _want(len(await provider.list({"mark": "lives"})) == 1, "an extended sandbox lives on")
        try:
            await dies.exec(["true"], timeout_s=5)
        except SandboxGone:
            return
        _want(False, "a sandbox past its ttl answers SandboxGone")


async def missing_capabilities_are_typed(provider: SandboxProvider) -> None:
    """What ``caps`` does not name raises ``CapabilityMissing``, nothing else."""
    async with _sandbox(provider) as sandbox:
        optional = {"snapshot": sandbox.snapshot, "pause": sandbox.pause, "fork": sandbox.fork}
        for name, call in optional.items():
            if name in provider.caps:
                continue
            try:
                await call()
            except CapabilityMissing:
                continue
            _want(False, f"{name} without the capability raises CapabilityMissing")


CHECKS: tuple[Check, ...] = (
    exit_codes_are_results,
    output_is_bytes,
    stdin_env_and_cwd_reach_the_command,
    a_timeout_is_a_result,
    output_is_capped,
    files_go_in_and_out,
    reads_stay_inside,
    sandboxes_do_not_share_files,
    list_and_attach_find_live_ones,
    kill_is_final_and_idempotent,
    kill_ends_running_commands,
    cancelling_a_command_leaves_the_sandbox,
    ttl_ends_it_and_extend_keeps_it,
    missing_capabilities_are_typed,
)
"""All checks, in the order in which ``run`` runs them."""
