"""The bytes and JSON shapes of E2B's two surfaces: the control plane's objects and envd's Connect streams.

Pure: no I/O, no provider. Depends on nothing but ``errors``.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TypeAlias
from urllib.parse import parse_qsl, unquote

from tollway.errors import BadRequest

__all__ = [
    "CONNECT_STATUS",
    "Json",
    "data_event",
    "decoded",
    "end_event",
    "end_of_stream",
    "entries",
    "envelope",
    "inside",
    "metadata_filter",
    "moment",
    "opened",
]

Json: TypeAlias = dict[str, object]
CONNECT_STATUS = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "not_found": 404,
    "already_exists": 409,
    "resource_exhausted": 429,
    "internal": 500,
    "unimplemented": 501,
    "unavailable": 503,
}
"""HTTP status of a unary call that fails with a Connect code."""
_CHUNK = 64 << 10
_HOME = "/home/user"
_WORKSPACE = "/workspace"
_STAT = re.compile(r"([0-9a-f]{1,8}) (\d+) (\d+) (\S+) (\S+) (/.*)")


def envelope(message: Mapping[str, object], flag: int = 0) -> bytes:
    """One message of a Connect stream.

    >>> envelope({})
    b'\\x00\\x00\\x00\\x00\\x02{}'
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">BI", flag, len(body)) + body


def opened(body: bytes) -> Iterator[Json]:
    """The messages of a Connect stream's body, without the one that ends it."""
    at = 0
    while at < len(body):
        if len(body) - at < 5:
            raise BadRequest("a Connect envelope is cut off")
        flag, size = struct.unpack_from(">BI", body, at)
        at += 5
        if len(body) - at < size or flag & 1:
            raise BadRequest("a Connect envelope is cut off or compressed")
        if not flag & 2:
            try:
                message = json.loads(body[at : at + size] or b"{}")
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"a Connect message is no JSON: {error}") from error
            if not isinstance(message, dict):
                raise BadRequest("a Connect message is a JSON object")
            yield message
        at += size


def data_event(stream: str, data: bytes) -> Iterator[bytes]:
    """Output of a process, in pieces."""
    for at in range(0, len(data), _CHUNK):
        piece = base64.b64encode(data[at : at + _CHUNK]).decode("ascii")
        yield envelope({"event": {"data": {stream: piece}}})


def end_event(exit_code: int, note: str = "") -> bytes:
    """The end of a process; codes above 128 are signals."""
    status = f"signal: {exit_code - 128}" if exit_code > 128 else f"exit status {exit_code}"
    end: Json = {"exitCode": exit_code, "exited": exit_code <= 128, "status": f"{status}{note}"}
    return envelope({"event": {"end": end}})


def end_of_stream(code: str | None = None, message: str = "") -> bytes:
    """What closes a Connect stream, with the error that ended it."""
    return envelope({} if code is None else {"error": {"code": code, "message": message}}, flag=2)


def decoded(text: object) -> bytes:
    """Bytes of a protobuf field in its JSON form."""
    try:
        return base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise BadRequest(f"a bytes field is no base64: {error}") from error


def inside(path: str) -> str:
    """A client's path as the sandbox knows it: ``/home/user`` is another name of the workspace.

    >>> inside("/home/user/a"), inside("~/b"), inside("c"), inside("/etc/passwd")
    ('/workspace/a', '/workspace/b', '/workspace/c', '/etc/passwd')
    """
    for home in (_HOME, "~"):
        if path == home or path.startswith(f"{home}/"):
            path = _WORKSPACE + path[len(home) :]
    return str(PurePosixPath(_WORKSPACE) / path)


def metadata_filter(query: str | None) -> dict[str, str]:
    """The labels that ``?metadata=`` asks for; names and values are quoted twice on the wire.

    >>> metadata_filter("a=b%2520c")
    {'a': 'b c'}
    """
    return {unquote(name): unquote(value) for name, value in parse_qsl(query or "", keep_blank_values=True)}


def moment(unix_s: float) -> str:
    """An instant as the control plane writes it."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def entries(listing: str) -> list[Json]:
    """Entries from lines of ``stat -c '%f %s %Y %U %G %n'``; a name may itself hold line breaks."""
    found: list[list[str]] = []
    for line in listing.split("\n")[:-1]:
        match = _STAT.fullmatch(line)
        if match is not None:
            found.append(list(match.groups()))
        elif found:
            found[-1][5] += f"\n{line}"
    return [_entry(*fields) for fields in found]


def _entry(mode_hex: str, size: str, changed: str, owner: str, group: str, path: str) -> Json:
    mode = int(mode_hex, 16)
    kind = "FILE_TYPE_UNSPECIFIED"
    for test, name in ((stat.S_ISREG, "FILE"), (stat.S_ISDIR, "DIRECTORY"), (stat.S_ISLNK, "SYMLINK")):
        if test(mode):
            kind = f"FILE_TYPE_{name}"
    return {
        "name": PurePosixPath(path).name,
        "type": kind,
        "path": path,
        "size": size,
        "mode": stat.S_IMODE(mode),
        "permissions": stat.filemode(mode),
        "owner": owner,
        "group": group,
        "modifiedTime": moment(int(changed)),
        "isSymlink": stat.S_ISLNK(mode),
    }
