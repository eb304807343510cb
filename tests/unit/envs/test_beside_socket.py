"""The way from a harness beside a task's sandbox into it: whatever is sent there is answered, and runs or does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from bridge_helpers import upstream

from tollway.envs.beside import SOCKET, ExecSocket
from tollway.envs.bridge import Bridge
from tollway.sandboxes.base import SandboxSpec
from tollway.sandboxes.fake import FakeProvider

SPEC = SandboxSpec(ttl_s=60, labels={"task": "t"})


async def _asked(socket: Path, data: bytes, *, ends: bool = False) -> tuple[dict[str, object], bytes]:
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(data)
        if ends:
            writer.write_eof()
        async with asyncio.timeout(20):
            return json.loads(await reader.readline()), await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 300_000,
        b"\xff\xfe",
        b"no JSON",
        b"[]",
        b'{"argv": ["true"]}',
        b'{"key": "gr\xc3\xbc\xc3\x9fe", "argv": ["true"]}',
        b'{"key": "KEY"}',
        b'{"key": "KEY", "argv": "true"}',
        b'{"key": "KEY", "argv": ["true"], "stdin": -1}',
        b'{"key": "KEY", "argv": ["true"], "stdin": 5}',
        b'{"key": "KEY", "argv": ["true", 7]}',
    ],
)
async def test_what_is_no_request_is_answered_and_runs_nothing(line: bytes) -> None:
    async with (
        upstream() as here,
        Bridge(here.session) as bridge,
        FakeProvider() as provider,
        ExecSocket(bridge, await provider.create(SPEC), timeout_s=5) as way,
    ):
        data = line.replace(b"KEY", bridge.key.encode()) + b"\n"
        answer, rest = await _asked(bridge.folder / SOCKET, data, ends=True)
        assert answer["error"]
        assert (rest, way.failure) == (b"", None)
        request = {"key": bridge.key, "argv": ["cat"], "stdin": 2}
        answer, rest = await _asked(bridge.folder / SOCKET, json.dumps(request).encode() + b"\nhi")
        assert answer["exit_code"] == 0
        assert (rest, way.commands) == (b"hi", 1)
