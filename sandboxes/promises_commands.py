"""Checks of what a command gets, and what comes back of it. Only POSIX commands are used. Depends on ``promises``."""

from __future__ import annotations

import asyncio
import time

from tollway.errors import BadRequest, CapabilityMissing
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.sandboxes.promises import EXEC_S, Check, opened, refuses, want

__all__ = ["CHECKS"]


async def exit_codes_are_results(provider: SandboxProvider) -> None:
    """0, another code, and an unknown program are results, never errors."""
    async with opened(provider) as sandbox:
        for cmd, code in ((["true"], 0), ("exit 3", 3), (["no-such-program-here"], 127)):
            done = await sandbox.exec(cmd, timeout_s=EXEC_S)
            want(done.exit_code == code and not done.timed_out, f"{cmd} ends with code {code}", done)


async def arguments_arrive_as_they_are(provider: SandboxProvider) -> None:
    """Blanks, quotes, newlines, dollars and other scripts in arguments reach the program unchanged."""
    words = ["a  b", "it's", 'a"b', "$HOME", "`id`", "new\nline", "*", "-n", "", "grüße", "\\"]
    async with opened(provider) as sandbox:
        done = await sandbox.exec(["printf", "%s|", *words], timeout_s=EXEC_S)
        want(done.stdout == "".join(f"{word}|" for word in words).encode(), "arguments are not interpreted", done)


async def output_is_bytes(provider: SandboxProvider) -> None:
    """Output that is no valid text arrives as it was written; stderr apart where the provider says so."""
    every = "".join(f"\\{byte:03o}" for byte in range(256))
    async with opened(provider) as sandbox:
        done = await sandbox.exec(["printf", r"\226\377"], timeout_s=EXEC_S)
        want(done.stdout == b"\x96\xff", "output bytes are unchanged", done.stdout)
        done = await sandbox.exec(["printf", every], timeout_s=EXEC_S)
        want(done.stdout == bytes(range(256)), "all 256 bytes are unchanged", done.stdout)
        done = await sandbox.exec("echo out; echo err >&2", timeout_s=EXEC_S)
        split = (b"out\n", b"err\n") if "stderr" in provider.caps else (b"out\nerr\n", b"")
        want((done.stdout, done.stderr) == split, "stderr is separate exactly if caps say so", done)


async def stdin_env_and_cwd_reach_the_command(provider: SandboxProvider) -> None:
    """What a call sets is what its command sees, for that call only."""
    async with opened(provider, files={"sub/f": b"x"}, env={"TOLLWAY_SPEC": "s"}) as sandbox:
        done = await sandbox.exec(["cat"], stdin=b"a\x00b", timeout_s=EXEC_S)
        want(done.stdout == b"a\x00b", "stdin reaches the command", done)
        done = await sandbox.exec(["cat"], timeout_s=EXEC_S)
        want((done.exit_code, done.stdout) == (0, b""), "without stdin a command reads an end of file", done)
        done = await sandbox.exec(["printenv", "TOLLWAY_X"], env={"TOLLWAY_X": "a b\n$c"}, timeout_s=EXEC_S)
        want(done.stdout == b"a b\n$c\n", "env reaches the command", done)
        done = await sandbox.exec(["printenv", "TOLLWAY_X"], timeout_s=EXEC_S)
        want(done.exit_code == 1, "env of one call does not reach the next", done)
        done = await sandbox.exec(["printenv", "TOLLWAY_SPEC"], timeout_s=EXEC_S)
        want(done.stdout == b"s\n", "env of the spec reaches every command", done)
        done = await sandbox.exec(["cat", "f"], cwd="sub", timeout_s=EXEC_S)
        want(done.stdout == b"x", "cwd is relative to the workspace", done)


async def large_stdin_arrives(provider: SandboxProvider) -> None:
    """A mebibyte of input reaches a command whole."""
    async with opened(provider) as sandbox:
        done = await sandbox.exec(["wc", "-c"], stdin=b"\x00\xff" * (1 << 19), timeout_s=EXEC_S)
        want(done.stdout.split() == [b"1048576"], "all of stdin arrives", done)


async def wrong_calls_are_refused(provider: SandboxProvider) -> None:
    """A directory that is not there, and commands that cannot be, never run anywhere else or as something else."""
    async with opened(provider) as sandbox:
        try:
            done = await sandbox.exec(["pwd"], cwd="no/such/directory", timeout_s=EXEC_S)
        except BadRequest:
            pass
        else:
            want(done.exit_code != 0, "a missing cwd is BadRequest or a failed command", done)
        for call in (
            sandbox.exec(["true"], env={"A=B": "x"}, timeout_s=EXEC_S),
            sandbox.exec(["a\0b"], timeout_s=EXEC_S),
            sandbox.exec([], timeout_s=EXEC_S),
        ):
            await refuses(call, BadRequest, "a command that cannot be is BadRequest")
        if "user" not in provider.caps:
            call = sandbox.exec(["true"], user="nobody", timeout_s=EXEC_S)
            await refuses(call, CapabilityMissing, "user without the capability raises CapabilityMissing")


async def a_timeout_is_a_result(provider: SandboxProvider) -> None:
    """Partial output comes back, in time, and the sandbox works afterwards."""
    async with opened(provider) as sandbox:
        done = await sandbox.exec("echo early; sleep 600", timeout_s=1.5)
        want(done.timed_out and done.exit_code is None, "a timeout is a result without exit code", done)
        want(done.stdout == b"early\n", "partial output is returned", done.stdout)
        done = await sandbox.exec(["echo", "alive"], timeout_s=EXEC_S)
        want(done.stdout == b"alive\n", "the sandbox is usable after a timeout", done)


async def nothing_survives_a_timeout(provider: SandboxProvider) -> None:
    """What a command started in the background ends with it when it times out."""
    async with opened(provider) as sandbox:
        done = await sandbox.exec("(sleep 1; echo x > survivor) & sleep 600", timeout_s=0.3)
        want(done.timed_out, "a command that sleeps times out", done)
        await _no_survivor(sandbox, done.duration_s, "a background process ends with its command's timeout")


async def background_processes_do_not_disturb(provider: SandboxProvider) -> None:
    """What a command leaves in the background ends with it or lives on, as the provider likes; the call is whole."""
    async with opened(provider) as sandbox:
        async with asyncio.timeout(EXEC_S):
            done = await sandbox.exec("sleep 1 & echo done", timeout_s=EXEC_S * 2)
        want((done.exit_code, done.stdout) == (0, b"done\n"), "the command's own end and output count", done)
        done = await sandbox.exec(["echo", "next"], timeout_s=EXEC_S)
        want(done.stdout == b"next\n", "the next command is undisturbed", done)


async def _no_survivor(sandbox: Sandbox, duration_s: float, promise: str) -> None:
    """``survivor`` is written a second after a command began, unless who writes it was ended."""
    if duration_s > 0.8:
        return  # on a machine as slow as this, it was written in time
    await asyncio.sleep(1.3)
    done = await sandbox.exec(["cat", "survivor"], timeout_s=EXEC_S)
    want(done.exit_code != 0, promise, done)


async def output_is_capped(provider: SandboxProvider) -> None:
    """Endless and huge output neither fills memory nor goes unmarked."""
    async with opened(provider) as sandbox:
        done = await sandbox.exec(["yes"], timeout_s=1.0, max_output=1000)
        want(done.truncated and done.stdout == b"y\n" * 500, "output is cut at the cap and marked", len(done.stdout))
        done = await sandbox.exec(["echo", "x"], timeout_s=EXEC_S, max_output=2)
        want(not done.truncated and done.stdout == b"x\n", "output that fits exactly is not marked", done)
        most = provider.config.max_output_bytes
        done = await sandbox.exec(["head", "-c", f"{most + 1000}", "/dev/zero"], timeout_s=EXEC_S)
        want(done.stdout == bytes(most) and done.truncated, "sandbox.max_output_bytes holds", len(done.stdout))
        want(done.exit_code == 0, "a command whose output is cut ends as if it were not", done.exit_code)


async def commands_run_side_by_side(provider: SandboxProvider) -> None:
    """Several commands of one sandbox at once do not mix."""
    async with opened(provider) as sandbox:
        running = [sandbox.exec(f"sleep 0.2; echo {n}", timeout_s=EXEC_S) for n in range(5)]
        outputs = [done.stdout for done in await asyncio.gather(*running)]
        want(outputs == [f"{n}\n".encode() for n in range(5)], "each call gets its own output", outputs)


async def cancelling_a_command_leaves_the_sandbox(provider: SandboxProvider) -> None:
    """The caller gets its cancellation, the command ends, and the sandbox goes on."""
    async with opened(provider) as sandbox:
        started = time.monotonic()
        running = asyncio.create_task(sandbox.exec("sleep 1; echo x > survivor", timeout_s=600))
        await asyncio.sleep(0.3)
        running.cancel()
        async with asyncio.timeout(EXEC_S):
            await asyncio.gather(running, return_exceptions=True)
        want(running.cancelled(), "the cancellation arrives", running)
        ended_s = time.monotonic() - started
        done = await sandbox.exec(["echo", "on"], timeout_s=EXEC_S)
        want(done.stdout == b"on\n", "the sandbox works after a cancelled command", done)
        await _no_survivor(sandbox, ended_s, "a cancelled command does not go on")


CHECKS: tuple[Check, ...] = (
    exit_codes_are_results,
    arguments_arrive_as_they_are,
    output_is_bytes,
    stdin_env_and_cwd_reach_the_command,
    large_stdin_arrives,
    wrong_calls_are_refused,
    a_timeout_is_a_result,
    nothing_survives_a_timeout,
    background_processes_do_not_disturb,
    output_is_capped,
    commands_run_side_by_side,
    cancelling_a_command_leaves_the_sandbox,
)
