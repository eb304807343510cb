"""What a sandbox's spec means to a Docker daemon: the container's settings and the archives that fill it.

Pure but for reading the tree. Depends on the records of the port.
"""

from __future__ import annotations

import io
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tollway.errors import CapabilityMissing
from tollway.sandboxes.config import DockerConfig
from tollway.sandboxes.remote import marks_of
from tollway.sandboxes.spec import SandboxSpec

if TYPE_CHECKING:
    from aiodocker.types import JSONValue

__all__ = ["KEEPER", "LEASE", "WORKSPACE", "archive_of", "container_settings", "workspace_archive"]

MB = 1 << 20
WORKSPACE = "/workspace"
LEASE = "tollway-lease"
"""File in the container's root: a generation and the seconds that it still has from then on."""
KEEPER = f"""
trap 'exit 0' TERM INT
while :; do
  read -r generation seconds 2>/dev/null <"/{LEASE}" || exit 0
  now=$(date +%s)
  [ "$generation" = "$known" ] || {{ known=$generation; end=$((now+seconds)); }}
  [ $now -lt $end ] || exit 0
  sleep 1 & wait $!
done
"""
"""Runs as root without capabilities, so that nothing the sandbox's user does can end it or extend its time."""
_OWN_PROCESSES = 16
"""The keeper, and what a command's frame runs beside the command."""


def container_settings(spec: SandboxSpec, config: DockerConfig, image: str, *, at_home: bool) -> dict[str, JSONValue]:
    """The body of the daemon's create call."""
    if spec.mounts and not at_home:
        raise CapabilityMissing("mounts are files of this machine, and the Docker daemon runs on another one")
    binds: list[JSONValue] = [
        {"Type": "bind", "Source": str(source.resolve()), "Target": inside, "ReadOnly": True}
        for inside, source in spec.mounts.items()
    ]
    host: dict[str, JSONValue] = {
        "AutoRemove": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": spec.pids + _OWN_PROCESSES,
        "Memory": spec.mem_mb * MB,
        "MemorySwap": spec.mem_mb * MB,
        "NetworkMode": "none" if spec.network == "none" else config.network,
        "Ulimits": [{"Name": "fsize", "Soft": spec.disk_mb * MB, "Hard": spec.disk_mb * MB}],
        "Mounts": binds,
        "LogConfig": {"Type": "none", "Config": {}},
    }
    if spec.cpu is not None:
        host["NanoCpus"] = int(spec.cpu * 1e9)
    if config.disk_quota:
        host["StorageOpt"] = {"size": f"{spec.disk_mb}m"}
    if config.runtime is not None:
        host["Runtime"] = config.runtime
    return {
        "Image": image,
        "Entrypoint": ["/bin/sh", "-c", KEEPER],
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": [f"HOME={WORKSPACE}"],
        "Labels": dict(marks_of(spec)),
        "HostConfig": host,
    }


def archive_of(name: str, data: bytes, owner: str = "0:0") -> IO[bytes]:
    """A tar of one file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o644
        archive.addfile(_owned(member, owner), io.BytesIO(data))
    file.seek(0)
    return file


def workspace_archive(tree: Path | None, owner: str) -> IO[bytes]:
    """A tar of the workspace directory with what is in ``tree``; links stay links, devices and sockets stay away."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
            top = tarfile.TarInfo(WORKSPACE.strip("/"))
            top.type, top.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(_owned(top, owner))
            for path in sorted(tree.iterdir()) if tree is not None else ():
                archive.add(path, f"{top.name}/{path.name}", filter=lambda member: _taken(member, owner))
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _taken(member: tarfile.TarInfo, owner: str) -> tarfile.TarInfo | None:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    if member.isdir():
        member.mode |= stat.S_IRWXU
    return _owned(member, owner)


def _owned(member: tarfile.TarInfo, owner: str) -> tarfile.TarInfo:
    uid, _, gid = owner.partition(":")
    member.uid, member.gid = int(uid), int(gid or uid)
    member.uname = member.gname = ""
    return member
