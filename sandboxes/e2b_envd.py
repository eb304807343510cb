"""What the E2B front end offers inside a sandbox: processes and files, as envd does.

Processes are Connect streams in JSON over HTTP/1.1; files travel plain. Only what lies below the workspace is
kept between commands, so only that can be up- and downloaded. Terminals and watching directories are not offered
and say so. Depends on ``e2b_server`` for the application's shared parts.
"""

from __future__ import annotations

import contextlib
import math
import time
from email.message import Message
from pathlib import PurePosixPath

from aiohttp import BodyPartReader, web

from tollway.errors import BadRequest
from tollway.sandboxes.e2b_processes import Process, Started
from tollway.sandboxes.e2b_server import FRONT_END, Lease, body_of, problem, same_secret
from tollway.sandboxes.e2b_wire import CONNECT_STATUS, Json, decoded, end_of_stream, entries, inside, opened

__all__ = ["routes"]

routes = web.RouteTableDef()
_WORKSPACE = "/workspace"
_STAT = "stat -c '%f %s %Y %U %G %n' --"
_SHELL_S = 30.0


def entered(request: web.Request) -> Lease:
    """The sandbox that the headers name, for a caller that has its token."""
    sandbox_id = request.headers.get("E2b-Sandbox-Id", "")
    lease = request.app[FRONT_END].find(sandbox_id)
    given = request.headers.get("X-Access-Token", "")
    # A wrong token and an unknown sandbox answer the same: ids cannot be tried out.
    if lease is None or not same_secret(given, lease.token):
        raise web.HTTPBadGateway(text=f"The sandbox {sandbox_id[:64]} was not found")
    return lease


@routes.get("/health")
async def health(request: web.Request) -> web.StreamResponse:
    """Whether the sandbox is there."""
    entered(request)
    return web.Response(status=204)


# -- processes -------------------------------------------------------------------------------------


@routes.post("/process.Process/Start")
async def start(request: web.Request) -> web.StreamResponse:
    """Run a command and stream what happens to it."""
    lease = entered(request)
    message = await streamed_request(request)
    if message.get("pty"):
        return streamed_error("unimplemented", "this server has no terminals; run a command instead")
    process = lease.processes.start(_started(message, request, lease))
    if process is None:
        return streamed_error("resource_exhausted", "too many processes run in this sandbox")
    return await watched(request, process)


@routes.post("/process.Process/Connect")
async def connect(request: web.Request) -> web.StreamResponse:
    """Watch a process that runs."""
    lease = entered(request)
    process = lease.processes.find((await streamed_request(request)).get("process"))
    if process is None:
        return streamed_error("not_found", "no such process")
    return await watched(request, process)


@routes.post("/process.Process/List")
async def listing(request: web.Request) -> web.StreamResponse:
    """What runs."""
    return web.json_response({"processes": entered(request).processes.infos()})


@routes.post("/process.Process/SendSignal")
async def send_signal(request: web.Request) -> web.StreamResponse:
    """End a process: every signal kills it and all that it started."""
    lease = entered(request)
    process = lease.processes.find((await body_of(request)).get("process"))
    if process is None:
        return failed("not_found", "no such process")
    process.kill()
    return web.json_response({})


@routes.post("/process.Process/SendInput")
async def send_input(request: web.Request) -> web.StreamResponse:
    """Add to the input of a process that was started with open input."""
    lease = entered(request)
    body = await body_of(request)
    process = lease.processes.find(body.get("process"))
    if process is None:
        return failed("not_found", "no such process")
    return await _given(process, body.get("input"))


@routes.post("/process.Process/StreamInput")
async def stream_input(request: web.Request) -> web.StreamResponse:
    """The same as a stream of messages, the first of which names the process."""
    lease = entered(request)
    process: Process | None = None
    for message in opened(await request.read()):
        if "start" in message:
            process = lease.processes.find(_object(message["start"]).get("process"))
        elif "data" in message and process is not None:
            await _given(process, _object(message["data"]).get("input"))
    if process is None:
        return streamed_error("not_found", "no such process")
    return web.Response(body=b"\0\0\0\0\2{}" + end_of_stream(), content_type="application/connect+json")


@routes.post("/process.Process/CloseStdin")
async def close_stdin(request: web.Request) -> web.StreamResponse:
    """The end of a process's input."""
    lease = entered(request)
    process = lease.processes.find((await body_of(request)).get("process"))
    if process is None:
        return failed("not_found", "no such process")
    await process.close_input()
    return web.json_response({})


@routes.post("/process.Process/{name}")
async def other_process_call(request: web.Request) -> web.StreamResponse:
    """Anything else."""
    return failed("unimplemented", f"this server does not offer {request.match_info['name']}")


async def _given(process: Process, value: object) -> web.StreamResponse:
    try:
        await process.give(decoded(_object(value).get("stdin", "")))
    except BadRequest as error:
        return failed("invalid_argument", str(error))
    return web.json_response({})


def _started(message: Json, request: web.Request, lease: Lease) -> Started:
    config = _object(message.get("process"))
    argv = [str(config.get("cmd", "")), *map(str, _list(config.get("args")))]
    left_s = max(1.0, lease.ends_at - time.time())
    asked_ms = _whole(request, "Connect-Timeout-Ms")
    timeout_s = min(left_s, asked_ms / 1000) if asked_ms else left_s
    return Started(
        argv=argv,
        env={str(name): str(value) for name, value in _object(config.get("envs")).items()},
        cwd=inside(str(config.get("cwd") or _WORKSPACE)),
        tag=None if message.get("tag") is None else str(message["tag"]),
        open_input=message.get("stdin") is True,
        timeout_s=timeout_s,
    )


def _whole(request: web.Request, header: str) -> int:
    """A header's number; 0 when there is none of a sensible size."""
    text = request.headers.get(header, "")
    return int(text) if text.isdecimal() and len(text) <= 12 else 0


async def watched(request: web.Request, process: Process) -> web.StreamResponse:
    """Stream a process's events. A client that goes away does not end the process."""
    response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
    await response.prepare(request)
    keepalive_s = float(_whole(request, "Keepalive-Ping-Interval") or math.inf)
    with contextlib.suppress(ConnectionResetError):
        async for event in process.events(keepalive_s=min(keepalive_s, 50.0)):
            await response.write(event)
        await response.write_eof()
    return response


# -- files -----------------------------------------------------------------------------------------


@routes.get("/files")
async def download(request: web.Request) -> web.StreamResponse:
    """The contents of a file."""
    lease = entered(request)
    path = _kept(request.query.get("path", ""))
    try:
        data = await lease.sandbox.read(path, max_bytes=request.app[FRONT_END].max_file_bytes)
    except BadRequest as error:
        return problem(404 if await _entry(lease, path) is None else 400, str(error))
    return web.Response(body=data, content_type="application/octet-stream")


@routes.post("/files")
async def upload(request: web.Request) -> web.StreamResponse:
    """New contents for one file, or several in a form."""
    lease = entered(request)
    written = []
    if request.content_type == "multipart/form-data":
        try:
            form = await request.multipart()
        except ValueError as error:
            raise BadRequest(f"the form cannot be read: {error}") from error
        async for part in form:
            if isinstance(part, BodyPartReader) and part.name == "file":
                path = _kept(request.query.get("path") or _named(part))
                await lease.sandbox.write(path, bytes(await part.read(decode=True)))
                written.append(path)
    else:
        path = _kept(request.query.get("path", ""))
        await lease.sandbox.write(path, await request.read())
        written.append(path)
    if not written:
        raise BadRequest("the form holds no file")
    return web.json_response([{"name": PurePosixPath(path).name, "path": path, "type": "file"} for path in written])


def _named(part: BodyPartReader) -> str:
    """The file name of a form's part, with its directories, which aiohttp's own reading changes."""
    header = Message()
    header["Content-Disposition"] = part.headers.get("Content-Disposition", "")
    return header.get_filename("")


@routes.post("/filesystem.Filesystem/Stat")
async def stat(request: web.Request) -> web.StreamResponse:
    """One entry."""
    lease, path = entered(request), inside(str((await body_of(request)).get("path", "")))
    found = await _entry(lease, path)
    return failed("not_found", f"{path} does not exist") if found is None else web.json_response({"entry": found})


@routes.post("/filesystem.Filesystem/ListDir")
async def list_dir(request: web.Request) -> web.StreamResponse:
    """What is in a directory."""
    lease, body = entered(request), await body_of(request)
    path, depth = inside(str(body.get("path", ""))), body.get("depth") or 1
    found = await _entry(lease, path)
    if found is None:
        return failed("not_found", f"{path} does not exist")
    if found["type"] != "FILE_TYPE_DIRECTORY" or not isinstance(depth, int):
        return failed("invalid_argument", f"{path} is no directory")
    script = f'find "$1/" -mindepth 1 -maxdepth "$2" -exec {_STAT} {{}} +'
    done = await lease.sandbox.exec(["sh", "-c", script, "sh", path, str(depth)], timeout_s=_SHELL_S)
    listed = entries(done.stdout.decode("utf-8", "replace").replace(f" {path}//", f" {path}/"))
    return web.json_response({"entries": sorted(listed, key=lambda entry: str(entry["path"]))})


@routes.post("/filesystem.Filesystem/MakeDir")
async def make_dir(request: web.Request) -> web.StreamResponse:
    """A directory, with those above it."""
    lease, path = entered(request), _kept(str((await body_of(request)).get("path", "")))
    if await _entry(lease, path) is not None:
        return failed("already_exists", f"{path} is there already")
    return await _changed(lease, ["mkdir", "-p", "--", path], path)


@routes.post("/filesystem.Filesystem/Move")
async def move(request: web.Request) -> web.StreamResponse:
    """Another name for an entry."""
    lease, body = entered(request), await body_of(request)
    source, target = _kept(str(body.get("source", ""))), _kept(str(body.get("destination", "")))
    if await _entry(lease, source) is None:
        return failed("not_found", f"{source} does not exist")
    return await _changed(lease, ["sh", "-c", 'mkdir -p "${2%/*}" && mv -f -- "$1" "$2"', "sh", source, target], target)


@routes.post("/filesystem.Filesystem/Remove")
async def remove(request: web.Request) -> web.StreamResponse:
    """The end of an entry and all below it."""
    lease, path = entered(request), _kept(str((await body_of(request)).get("path", "")))
    done = await lease.sandbox.exec(["rm", "-rf", "--", path], timeout_s=_SHELL_S)
    return web.json_response({}) if done.exit_code == 0 else failed("internal", _said(done.stderr))


@routes.post("/filesystem.Filesystem/{name}")
async def other_file_call(request: web.Request) -> web.StreamResponse:
    """Anything else."""
    return failed("unimplemented", f"this server does not offer {request.match_info['name']}")


async def _entry(lease: Lease, path: str) -> Json | None:
    done = await lease.sandbox.exec(["sh", "-c", f'{_STAT} "$1"; readlink -- "$1"', "sh", path], timeout_s=_SHELL_S)
    lines = done.stdout.decode("utf-8", "replace")
    listed, _, rest = lines.partition(f" {path}\n")
    found = entries(f"{listed} {path}\n") if rest or listed != lines else []
    if not found:
        return None
    return {**found[0], "symlinkTarget": rest[:-1]} if found[0]["isSymlink"] else found[0]


async def _changed(lease: Lease, argv: list[str], path: str) -> web.StreamResponse:
    done = await lease.sandbox.exec(argv, timeout_s=_SHELL_S)
    found = await _entry(lease, path) if done.exit_code == 0 else None
    return failed("internal", _said(done.stderr)) if found is None else web.json_response({"entry": found})


def _kept(path: str) -> str:
    """A path below the workspace."""
    full = inside(path)
    if not path or ".." in PurePosixPath(full).parts or not full.startswith(f"{_WORKSPACE}/"):
        raise BadRequest(f"{path!r}: only files below {_WORKSPACE}, also called /home/user, are kept by this server")
    return full


def _said(stderr: bytes) -> str:
    return stderr[-500:].decode("utf-8", "replace").strip() or "the command failed"


# -- Connect ---------------------------------------------------------------------------------------


async def streamed_request(request: web.Request) -> Json:
    """The one message of a server stream's request."""
    messages = list(opened(await request.read()))
    if len(messages) != 1:
        raise BadRequest("the request holds one message")
    return messages[0]


def streamed_error(code: str, message: str) -> web.StreamResponse:
    """A stream that ends before it begins."""
    return web.Response(body=end_of_stream(code, message), content_type="application/connect+json")


def failed(code: str, message: str) -> web.Response:
    """A unary call that fails."""
    return web.json_response({"code": code, "message": message}, status=CONNECT_STATUS[code])


def _object(value: object) -> Json:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest("expected an object")
    return value


def _list(value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest("expected a list")
    return value
