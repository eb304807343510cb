"""Whole directories into and out of a sandbox, over nothing but its ``write``, ``read`` and ``exec``.

For providers that cannot take directories of this machine themselves. What travels is cut into pieces, so that
memory stays bounded whatever the size. The sandbox needs ``sh``, ``tar``, ``cat``, ``split``, ``chmod``, ``rm``.
Depends on ``archive``; called through ``Sandbox.put_tree`` and ``Sandbox.get_tree``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import string
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tollway.errors import BadRequest, SandboxError
from tollway.sandboxes.archive import BigFile, Pieces, Tar, extract

if TYPE_CHECKING:
    from tollway.sandboxes.base import Sandbox

__all__ = ["APPEND", "PACK", "PIECE_BYTES", "UNPACK", "get_tree", "put_tree"]

PIECE_BYTES = 4 << 20
"""What is in memory and in flight at once when a directory goes in."""
PART_BYTES = 1 << 20
_NAMES_AT_ONCE = 100
_CLEAN_S = 30.0
UNPACK = 'mkdir -p "$1" && tar -xpof "$2" -C "$1"; status=$?; rm -f "$2"; exit $status'
"""Unpack archive ``$2`` in directory ``$1`` and remove it."""
APPEND = 'mkdir -p "${1%/*}" && cat "$2" >> "$1" && rm -f "$2"'
"""Append file ``$2`` to file ``$1`` and remove it."""
PACK = (
    'mkdir "$2" || exit 1; home=$PWD; cd "$1" || exit 1; '
    '{ tar -cf - --exclude "./$2" .; echo $? > "$home/$2/.status"; } | '
    f'(cd "$home" && split -b {PART_BYTES} -a 4 - "$2/"); '
    # 1: a file changed meanwhile, the working directory itself for example.
    'cd "$home"; read -r status < "$2/.status" && [ "$status" -le 1 ] || exit 2; ls "$2" | wc -l'
)
"""Pack directory ``$1`` into parts in the new directory ``$2`` and say how many there are."""


async def put_tree(sandbox: Sandbox, source: Path, dest: str, *, timeout_s: float) -> None:
    """Copy a directory's contents into directory ``dest``, or one file to path ``dest``; links are not followed."""
    async with _limit(sandbox, timeout_s):
        name = ""
        if not await asyncio.to_thread(source.is_dir):
            dest, _, name = dest.rpartition("/")
            dest = dest or "."
        pieces = Pieces(source, PIECE_BYTES, name)
        waiting: Iterator[Tar | BigFile] = iter(pieces)
        modes: dict[str, int] = {}
        while (piece := await _pull(waiting)) is not None:
            sent = f".tollway-{secrets.token_hex(8)}"
            await sandbox.write(sent, piece.data)
            if isinstance(piece, Tar):
                await _run(sandbox, ["sh", "-c", UNPACK, "sh", dest, sent], timeout_s)
            else:
                modes[piece.name] = piece.mode
                await _run(sandbox, ["sh", "-c", APPEND, "sh", f"{dest}/{piece.name}", sent], timeout_s)
        # Innermost first: a directory that cannot be entered any more hides what is below it.
        modes.update(sorted(pieces.directory_modes.items(), key=lambda item: -item[0].count("/")))
        for mode, group in itertools.groupby(modes, key=modes.__getitem__):
            names = [f"{dest}/{name}" for name in group]
            for at in range(0, len(names), _NAMES_AT_ONCE):
                await _run(sandbox, ["chmod", f"{mode:o}", *names[at : at + _NAMES_AT_ONCE]], timeout_s)


async def get_tree(
    sandbox: Sandbox, path: str, target: Path, *, max_bytes: int, max_files: int, timeout_s: float
) -> int:
    """Copy directory ``path`` of the sandbox to ``target``, which must be empty or absent; returns its entries."""
    parts = f".tollway-{secrets.token_hex(8)}"
    try:
        async with _limit(sandbox, timeout_s):
            said = await _run(sandbox, ["sh", "-c", PACK, "sh", path, parts], timeout_s, refusal=BadRequest)
            count = int(said) if said.strip().isdigit() and len(said) < 20 else 0
            # Headers and padding: at most 4 KiB an entry with its long name.
            if count > (max_bytes + max_files * 4096) // PART_BYTES + 1:
                raise BadRequest(f"{path!r} in the sandbox holds more than {max_bytes} bytes")
            with tempfile.TemporaryFile() as spool:
                for letters in itertools.islice(itertools.product(string.ascii_lowercase, repeat=4), count):
                    spool.write(await sandbox.read(f"{parts}/{''.join(letters)}", max_bytes=PART_BYTES))
                spool.seek(0)
                return await asyncio.to_thread(extract, spool, target, max_bytes=max_bytes, max_files=max_files)
    finally:
        with contextlib.suppress(SandboxError):
            await sandbox.exec(["rm", "-rf", parts], timeout_s=_CLEAN_S)


@asynccontextmanager
async def _limit(sandbox: Sandbox, timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise SandboxError(f"a transfer with sandbox {sandbox.id} took longer than {timeout_s} s") from error


async def _pull(pieces: Iterator[Tar | BigFile]) -> Tar | BigFile | None:
    try:
        return await asyncio.to_thread(next, pieces, None)
    except OSError as error:
        raise BadRequest(f"cannot read what is to be uploaded: {error}") from error


async def _run(sandbox: Sandbox, argv: list[str], timeout_s: float, refusal: type[Exception] = SandboxError) -> bytes:
    done = await sandbox.exec(argv, timeout_s=timeout_s)
    if done.timed_out:
        raise SandboxError(f"a transfer with sandbox {sandbox.id} took longer than {timeout_s:.0f} s")
    if done.exit_code != 0:
        said = (done.stderr or done.stdout)[-500:].decode("utf-8", "replace").strip()
        raise refusal(f"sandbox {sandbox.id} cannot take part in a transfer, exit status {done.exit_code}: {said}")
    return done.stdout
