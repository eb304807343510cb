"""Programs for machines behind a shell, run by this machine's own shells."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path

import pytest

from tollway.errors import BadRequest, SandboxError
from tollway.sandboxes import remote_program as programs
from tollway.sandboxes.remote_program import Reply
from tollway.sandboxes.spec import Command, ExecResult

SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def command(argv: str | list[str], **more: object) -> Command:
    words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else argv
    plain = {"cwd": ".", "env": {}, "stdin": b"", "timeout_s": 20.0, "max_output": 1000, "user": None}
    return Command(argv=words, **{**plain, **more})


async def replied(shell: str, program: str) -> Reply:
    process = await asyncio.create_subprocess_exec(
        shell, "-c", program, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    output, _ = await process.communicate()
    code = process.returncode or 0
    return Reply(output, code if code >= 0 else 128 - code)


async def ran(shell: str, asked: Command, workspace: Path, **more: object) -> ExecResult:
    call = secrets.token_hex(8)
    if asked.stdin and "uploaded" not in more:
        more["uploaded"] = str(workspace / f".{call}.in")
        Path(str(more["uploaded"])).write_bytes(asked.stdin)
    program = programs.command_program(call, asked, str(workspace), **more)
    return programs.parse_result(call, await replied(shell, program), asked, 0.0)


async def test_status_streams_input_and_environment_are_exact(shell: str, tmp_path: Path) -> None:
    done = await ran(shell, command("cat; printf '\\226\\377'; echo err >&2; exit 3", stdin=b"a\0b\n"), tmp_path)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"a\0b\n\x96\xff", b"err\n")
    odd = {"A.B": "x y", "Q": "'\"$(false)\\`\n", "U": "ü"}
    done = await ran(shell, command(["env"], env=odd, max_output=1 << 20), tmp_path)
    for variable, value in odd.items():
        assert f"{variable}={value}\n".encode() in done.stdout
    done = await ran(shell, command(["printf", "%s.", "a b", "", "'", "$HOME", "ENV", "ARGV"]), tmp_path)
    assert done.stdout == b"a b..'.$HOME.ENV.ARGV."
    assert (await ran(shell, command(["no-such-program"]), tmp_path)).exit_code == 127
    assert (await ran(shell, command("kill -9 $$"), tmp_path)).exit_code == 137
    (tmp_path / "a=b").symlink_to("/bin/echo")
    assert (await ran(shell, command(["./a=b", "x"]), tmp_path)).stdout == b"x\n"


async def test_uploaded_input_is_used_and_removed(shell: str, tmp_path: Path) -> None:
    given = tmp_path / "it's input"
    given.write_bytes(bytes(range(256)) * 3)
    done = await ran(shell, command(["cat"], stdin=b"not this"), tmp_path, uploaded=str(given))
    assert done.stdout == bytes(range(256)) * 3
    assert not given.exists()


_LOOK = """
import base64, os, sys
said = sys.stdin.buffer.read()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read()
        fds = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        continue
    if said in words or base64.b64encode(said)[:-4] in words:
        print("in the arguments of", pid)
    for fd, path in fds.items():
        if path.startswith(os.getcwd()) and int(pid) != os.getpid():
            print("open in", pid, fd, path)
print(len(said), os.listdir("."))
"""


async def test_input_is_in_no_argument_and_no_file_while_the_command_runs(shell: str, tmp_path: Path) -> None:
    secret = secrets.token_hex(40).encode()
    done = await ran(shell, command(["python3", "-c", _LOOK], stdin=secret), tmp_path)
    assert done.stdout.decode() == "80 []\n"
    missing = str(tmp_path / "missing")
    with pytest.raises(SandboxError, match="no input"):
        await ran(shell, command(["cat"], stdin=b"x"), tmp_path, uploaded=missing)
    given = tmp_path / "given"
    given.write_bytes(b"x")
    with pytest.raises(BadRequest):
        await ran(shell, command(["cat"], stdin=b"x", cwd="nowhere"), tmp_path, uploaded=str(given))
    assert not given.exists()


async def test_output_is_cut_at_the_cap_and_only_then_marked(shell: str, tmp_path: Path) -> None:
    done = await ran(shell, command("yes", timeout_s=0.5), tmp_path)
    assert (done.timed_out, done.truncated, done.stdout) == (True, True, b"y\n" * 500)
    done = await ran(shell, command(["echo", "x"], max_output=2), tmp_path)
    assert (done.truncated, done.stdout) == (False, b"x\n")


async def test_what_a_command_started_ends_with_it(shell: str, tmp_path: Path) -> None:
    mark = f"5{secrets.randbelow(10**6):06d}"
    hide = f"setsid sleep {mark} & nohup sleep {mark} >/dev/null 2>&1 & trap '' TERM HUP; (setsid sleep {mark} &) ; "
    assert (await ran(shell, command(f"{hide} echo on"), tmp_path)).stdout == b"on\n"
    late = await ran(shell, command(f"{hide} echo early; sleep {mark}", timeout_s=0.5), tmp_path)
    assert (late.timed_out, late.exit_code, late.stdout) == (True, None, b"early\n")
    assert not alive(mark)


async def test_a_command_can_be_stopped_from_outside_and_before_it_begins(shell: str, tmp_path: Path) -> None:
    mark, call = f"6{secrets.randbelow(10**6):06d}", secrets.token_hex(8)
    asked = command(f"setsid sleep {mark} & sleep {mark}")
    program = programs.command_program(call, asked, str(tmp_path))
    running = asyncio.create_task(replied(shell, program))
    async with asyncio.timeout(20):
        while not alive(mark):
            await asyncio.sleep(0.02)
    await replied(shell, programs.stop_program(call))
    await running
    assert not alive(mark)

    never = secrets.token_hex(8)
    await replied(shell, programs.stop_program(never))
    made = tmp_path / "made"
    refused = await replied(shell, programs.command_program(never, command(["touch", str(made)]), str(tmp_path)))
    with pytest.raises(SandboxError, match="cannot use"):
        programs.parse_result(never, refused, asked, 0.0)
    assert not made.exists()
    shutil.rmtree(f"/tmp/.tollway-{never}")


async def test_a_command_that_is_just_beginning_is_stopped_too(shell: str, tmp_path: Path) -> None:
    call, made = secrets.token_hex(8), tmp_path / "made"
    program = programs.command_program(call, command(["sh", "-c", f"sleep 0.5; touch {made}"]), str(tmp_path))
    # Its number is not written yet, and its first process is on its way.
    for quick, late in (
        ('echo $$ >"$d/run"', '(sleep 0.4; echo $$ >"$d/run") &'),
        ("run() { exec", "run() { sleep 0.8; exec"),
    ):
        assert quick in program
        program = program.replace(quick, late)
    running = asyncio.create_task(replied(shell, program))
    async with asyncio.timeout(20):
        while not Path(f"/tmp/.tollway-{call}/e").exists():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await replied(shell, programs.stop_program(call))
    await running
    await asyncio.sleep(0.7)
    assert not made.exists()


async def test_files_go_in_and_out_in_pieces_and_never_through_links(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PIECE_BYTES", 1000)
    data, place = secrets.token_bytes(2500), str(tmp_path)
    program = programs.write_program(place, ("a b", "c'd"), 0o640, data=data, uploaded=f"{place}/.staged")
    programs.parse_write(await replied(shell, program), "a b/c'd")
    assert (tmp_path / "a b" / "c'd").read_bytes() == data
    assert (tmp_path / "a b" / "c'd").stat().st_mode & 0o777 == 0o640
    got = b""
    while len(got) < len(data):
        reply = await replied(shell, programs.read_program(place, ("a b", "c'd"), 5000, len(got)))
        piece, size = programs.parse_read(reply, "c", 5000)
        assert size == len(data)
        got += piece
    assert got == data
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "own").symlink_to("a b/c'd")
    for parts, reason in (
        (("link", "passwd"), "link"),
        (("own",), "link"),
        (("nothing",), "does not exist"),
        (("a b",), "no regular file"),
    ):
        with pytest.raises(BadRequest, match=reason):
            programs.parse_read(await replied(shell, programs.read_program(place, parts, 5000)), "x", 5000)
    with pytest.raises(BadRequest, match="more than 10 bytes"):
        programs.parse_read(await replied(shell, programs.read_program(place, ("a b", "c'd"), 10)), "x", 10)
    for parts, reason in ((("link", "x"), "link"), (("a b",), "directory"), (("a b", "c'd", "e"), "no directory")):
        program = programs.write_program(place, parts, 0o644, data=b"x", uploaded=f"{place}/.staged")
        with pytest.raises(BadRequest, match=reason):
            programs.parse_write(await replied(shell, program), "x")


async def test_a_missing_directory_is_the_callers_error(shell: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="nowhere"):
        await ran(shell, command(["true"], cwd="nowhere"), tmp_path)


def test_a_reply_is_found_in_noise_and_a_cut_one_is_infrastructure() -> None:
    asked = command(["true"])
    noisy = b"Welcome!\ntollway 11: 5 0\nb3V0Cg==\n.\n.\n"
    assert programs.parse_result("11", Reply(noisy), asked, 0.0).stdout == b"out\n"
    with pytest.raises(SandboxError, match="ended early"):
        programs.parse_result("11", Reply(noisy[:-2]), asked, 0.0)
    with pytest.raises(SandboxError, match="damaged"):
        programs.parse_result("11", Reply(noisy.replace(b"b3V0", b"b3V")), asked, 0.0)
    with pytest.raises(SandboxError, match="base64"):
        programs.parse_result("11", Reply(b"sh: base64: not found\n", 0), asked, 0.0)
    # The command killed the shell around it: that is how it ended.
    assert programs.parse_result("11", Reply(b"", 137), asked, 0.0).exit_code == 137


def alive(mark: str) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", mark.encode()]:
                return True
    return False
