"""Shell programs that run one command on a machine of which only ``/bin/sh`` and the usual utilities are known.

Services return text, merge streams or keep a command alive after its timeout. So a command runs under a small
program that separates, caps and base64-encodes its streams, takes its exact standard input, ends it on time
together with what it started, and reports in a frame that is found in whatever else a login shell prints.
What a command started is known by a variable in its environment and by its session; a program that leaves
both is not found and ends with the machine. Pure text in and out: no I/O, no provider. Depends on ``spec``.
"""

from __future__ import annotations

import base64
import binascii
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tollway.errors import BadRequest, SandboxError
from tollway.sandboxes.spec import Command, ExecResult

__all__ = [
    "PIECE_BYTES",
    "WORKSPACE_READY",
    "Reply",
    "command_program",
    "parse_read",
    "parse_result",
    "parse_write",
    "read_program",
    "stop_program",
    "write_program",
]

PIECE_BYTES = 4 << 20
"""What one reply brings of a file."""
WORKSPACE_READY = """
w=/workspace
[ -d $w ] && [ -w $w ] && exit 0
mkdir -p $w 2>/dev/null || sudo -n mkdir -p $w
[ -w $w ] || sudo -n chown "$(id -u)" $w
[ -w $w ]
"""
"""Makes /workspace on a fresh machine; its status says whether its user can write there."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back from a program."""

    output: bytes
    status: int = 0
    """Exit status of the shell that ran it, 128 + signal when it was killed, -1 when the service does not say."""


_REAP = r"""
facts() { read -r l 2>/dev/null <"/proc/$1/stat" || return 1; l=${l##*) }; set -f; set -- $l; set +f; st=$1; se=$4; }
ours=; [ -z "$sweep" ] || { facts $$ && ours=$se; facts 1 && ours="$ours $se"; }
alone() { [ -n "$ours" ] && for a in "$b"/.tollway-*; do [ "$a" = "$d" ] || [ -e "$a/stopped" ] || return 1; done; }
stray() {
  case " $ours " in *" $se "*) return 1;; esac
  alone && ! grep -q TOLLWAY_CALL= "/proc/$1/environ" 2>/dev/null
}
reap() {
  n=0
  while [ $n -lt 40 ]; do
    v=
    for f in $(grep -l "TOLLWAY_CALL=$id" /proc/[0-9]*/environ 2>/dev/null); do
      f=${f#/proc/}; v="$v ${f%/environ}"
    done
    if [ -n "$1$ours" ]; then
      for f in /proc/[0-9]*; do
        f=${f#/proc/}; facts $f || continue
        [ "$st" = Z ] || { [ "$se" != "$1" ] && ! stray $f; } || v="$v $f"
      done
    fi
    [ -n "$v" ] || return 0
    kill -9 $v 2>/dev/null
    n=$((n+1))
  done
}
"""

_RUN = r"""
umask 077
mkdir "$d" 2>/dev/null && mkfifo "$d/o" "$d/e" || { echo "tollway $id: cannot use $d"; rm -f "$up"; exit 0; }
echo $$ >"$d/run"
umask 022
cd -- "$w" 2>/dev/null || { echo "tollway $id: no directory $w"; rm -rf "$d" "$up"; exit 0; }
[ -r "$in" ] || { echo "tollway $id: no input"; rm -rf "$d" "$up"; exit 0; }
{ head -c $cap >"$d/out"; cat >/dev/null; } <"$d/o" & r1=$!
{ head -c $cap >"$d/err"; cat >/dev/null; } <"$d/e" & r2=$!
exec 9<"$in"
rm -f "$up"
run() { exec setsid env TOLLWAY_CALL=$id ENV ARGV; }
run <&9 9<&- >"$d/o" 2>"$d/e" & p=$!
exec 9<&-
trap '' PIPE
( exec >/dev/null 2>&1 </dev/null
  TOLLWAY_CALL=$id sh -c 'sleep "$1" || sleep "$2"; : >"$3"' sh LATE "$d/late"
  [ -e "$d/late" ] && reap $p ) & k=$!
wait $p 2>/dev/null; c=$?
kill -9 $k 2>/dev/null
[ -e "$d/late" ] && t=1 || t=0
reap $p
( exec >/dev/null 2>&1 </dev/null; TOLLWAY_CALL=$id sh -c 'sleep 3; kill -9 "$@"' sh $r1 $r2 ) & g=$!
wait $r1 $r2 2>/dev/null
kill -9 $g 2>/dev/null
reap
echo "tollway $id: $c $t"
base64 <"$d/out"; echo .; base64 <"$d/err"; echo .
rm -rf "$d"
"""

_STOP = r"""
mkdir "$d" && { : >"$d/stopped"; exit 0; }
m=0; q=
while [ -e "$d" ] && [ $m -lt 30 ]; do
  [ -n "$q" ] || read -r q <"$d/run"  # it may be about to be written
  [ -z "$q" ] || kill -0 "$q" || break
  reap; m=$((m+1)); sleep 0.1 || sleep 1
done
reap
rm -rf "$d"
"""

_PATH = r"""
exec 2>/dev/null
cd -- "$w" || { echo "tollway: no directory $w"; exit 0; }
x=
for a in PARENTS; do
  x="$x$a"
  [ -h "$x" ] && { echo "tollway: link"; exit 0; }
  x="$x/"
done
"""

_READ = r"""
[ -h "$f" ] && { echo "tollway: link"; exit 0; }
[ -e "$f" ] || { echo "tollway: missing"; exit 0; }
[ -f "$f" ] || { echo "tollway: no file"; exit 0; }
[ -r "$f" ] || { echo "tollway: unreadable"; exit 0; }
n=$(wc -c <"$f")
[ $n -le $max ] || { echo "tollway: large"; exit 0; }
echo "tollway: data $n"
tail -c +$((start+1)) <"$f" | head -c $piece | base64; echo .
"""

_WRITE = r"""
mkdir -p "./$up" || { echo "tollway: mkdir"; exit 0; }
[ -h "$f" ] && { echo "tollway: link"; exit 0; }
[ -d "$f" ] && { echo "tollway: directory"; exit 0; }
CONTENT
chmod $mode "$t" && mv -f "$t" "./$f" && echo "tollway: written" || { rm -f "$t"; echo "tollway: failed"; }
"""


def command_program(
    call: str, command: Command, workspace: str, *, uploaded: str | None = None, sweep: bool = False
) -> str:
    """The program that runs ``command``; its reply goes to ``parse_result``.

    ``uploaded`` names a file on the machine that holds standard input; without it there is none. Input may be a secret
    that the command keeps from what it starts, so it is in no argument, and in no file once the command has it.
    ``sweep`` is for machines on which nothing runs but our commands: whatever is left when the last command ends is
    killed, found by its marks or not.
    """
    inside = command.cwd if command.cwd.startswith("/") else f"{workspace}/{command.cwd}"
    late = f"{command.timeout_s:.3f} {int(command.timeout_s) + 1}"
    # Last, so that nothing of the caller's text is taken for a place to fill in.
    head, _, tail = _RUN.replace("LATE", late).partition("ENV")
    middle, _, end = tail.partition("ARGV")
    cap = command.max_output + 1
    # env would take a program whose name holds "=" for one more variable; a shell drops names that it cannot use.
    argv = ["sh", "-c", 'exec "$@"', "sh", *command.argv] if "=" in command.argv[0] else command.argv
    run = head + _quoted([f"{k}={v}" for k, v in command.env.items()]) + middle + _quoted(argv) + end
    given = f"up={shlex.quote(uploaded or '')}; in=${{up:-/dev/null}}"
    return f"{_head(call, sweep)}; w={shlex.quote(inside)}; cap={cap}; {given}\n{_REAP}{run}"


def stop_program(call: str) -> str:
    """Ends a command and what it started, whether it runs, has ended or has not begun yet."""
    return f"{_head(call, False)}\n{_REAP}{_STOP}"


def read_program(workspace: str, parts: Sequence[str], max_bytes: int, start: int = 0) -> str:
    """Reads a piece of a regular file below the workspace, never through a link; for ``parse_read``."""
    name = shlex.quote("./" + "/".join(parts))
    return (
        f"w={shlex.quote(workspace)}; f={name}; max={max_bytes}; start={start}; piece={PIECE_BYTES}"
        + _PATH.replace("PARENTS", _quoted(parts[:-1]))
        + _READ
    )


def write_program(workspace: str, parts: Sequence[str], mode: int, *, data: bytes | None, uploaded: str) -> str:
    """Puts ``data``, or with ``None`` the file ``uploaded``, in place at once; its reply goes to ``parse_write``."""
    name = shlex.quote("/".join(parts))
    content = "" if data is None else f'echo {_base64(data)} | base64 -d >"$t"'
    up = shlex.quote("/".join(parts[:-1]) or ".")
    return (
        f"w={shlex.quote(workspace)}; f={name}; up={up}; t={shlex.quote(uploaded)}; mode={mode & 0o777:o}"
        + _PATH.replace("PARENTS", _quoted(parts[:-1]))
        + _WRITE.replace("CONTENT", content)
    )


def parse_result(call: str, answer: Reply, command: Command, duration_s: float) -> ExecResult:
    """What the machine says about a command. One that killed the shell around it was killed itself."""
    reply = answer.output
    found = re.search(rb"^tollway " + call.encode() + rb": (\d+) ([01])\r?\n", reply, re.MULTILINE)
    if found is None:
        refused = re.search(rb"^tollway " + call.encode() + rb": (.*)$", reply, re.MULTILINE)
        if refused is not None and refused[1].startswith(b"no directory"):
            raise BadRequest(f"the command's directory does not exist in the sandbox: {command.cwd!r}", param="cwd")
        if refused is None and answer.status > 128:
            return ExecResult(exit_code=answer.status, stdout=b"", duration_s=duration_s)
        said = refused[1].decode("utf-8", "replace") if refused else repr(reply[-200:])
        raise SandboxError(
            f"the sandbox did not report how the command ended ({said}, status {answer.status}); its image needs "
            "/bin/sh, setsid, mkfifo, head, base64, grep and a writable /tmp"
        )
    out, err = _fields(reply[found.end() :], 2)
    late = found[2] == b"1"
    cap = command.max_output
    return ExecResult(
        exit_code=None if late else int(found[1]),
        stdout=out[:cap],
        stderr=err[:cap],
        timed_out=late,
        truncated=max(len(out), len(err)) > cap,
        duration_s=duration_s,
    )


def parse_read(reply: Reply, path: str, max_bytes: int) -> tuple[bytes, int]:
    """A piece of the file and its whole size, or ``BadRequest`` with the reason."""
    kind, rest = _verdict(reply.output)
    reasons = {
        "link": "goes through a link",
        "missing": "does not exist",
        "no file": "is no regular file",
        "unreadable": "cannot be read by the sandbox's user",
        "large": f"holds more than {max_bytes} bytes",
    }
    if kind in reasons:
        raise BadRequest(f"{path!r} {reasons[kind]}", param="path")
    word, _, size = kind.partition(" ")
    if word != "data" or not size.strip().isdecimal():
        raise SandboxError(f"reading {path!r}: the sandbox answered {kind!r}")
    return _fields(rest, 1)[0], int(size)


def parse_write(reply: Reply, path: str) -> None:
    """Nothing, or ``BadRequest`` with the reason."""
    kind, _ = _verdict(reply.output)
    reasons = {
        "link": "goes through a link",
        "mkdir": "lies below something that is no directory",
        "directory": "is a directory",
    }
    if kind in reasons:
        raise BadRequest(f"{path!r} {reasons[kind]}", param="path")
    if kind != "written":
        raise SandboxError(f"writing {path!r}: the sandbox answered {kind!r}; is its disk full?")


def _head(call: str, sweep: bool) -> str:
    return f"exec 2>/dev/null; id={call}; b=${{TMPDIR:-/tmp}}; d=$b/.tollway-$id; sweep={'1' if sweep else ''}"


def _verdict(reply: bytes) -> tuple[str, bytes]:
    found = re.search(rb"^tollway: ([^\r\n]*)\r?\n", reply, re.MULTILINE)
    if found is None:
        return reply[-200:].decode("utf-8", "replace"), b""
    return found[1].decode("utf-8", "replace"), reply[found.end() :]


def _fields(text: bytes, count: int) -> list[bytes]:
    """``count`` base64 blocks, each ended by a line with one dot."""
    parts = re.split(rb"^\.\r?$", text, flags=re.MULTILINE)
    if len(parts) <= count:
        raise SandboxError("the sandbox's reply ended early; the connection was lost or its disk is full")
    try:
        return [base64.b64decode(re.sub(rb"\s", b"", part), validate=True) for part in parts[:count]]
    except binascii.Error as error:
        raise SandboxError(f"the sandbox's reply is damaged: {error}") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _quoted(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
