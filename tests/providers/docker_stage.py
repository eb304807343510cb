"""A Docker daemon of the test's own, and a small image made of this machine's programs. Nothing is pulled."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("docker.io", "containerd", "runc", "tini")
PROGRAMS = ("sh", "grep", "sed", "tar", "find", "setsid", "ps", "ldd", "bash")
IMAGE = "tollway-test:latest"


class NoDaemon(Exception):
    """This machine cannot run one; says why."""


@dataclass(frozen=True)
class Daemon:
    """A running daemon."""

    url: str
    cli: tuple[str, ...]

    def docker(self, *arguments: str, data: bytes | None = None) -> str:
        done = subprocess.run([*self.cli, *arguments], input=data, capture_output=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"docker {arguments[0]}: {done.stderr.decode()}")
        return done.stdout.decode()


def unpacked(place: Path) -> Path:
    """Debian's own packages of the daemon, unpacked into a private directory; nothing is installed."""
    if shutil.which("apt-get") is None or os.getuid() != 0:
        raise NoDaemon("a Docker daemon needs root and Debian's packages to start for a test")
    debs = place / "debs"
    debs.mkdir()
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=debs, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoDaemon(f"Debian's docker.io cannot be downloaded: {done.stderr.strip()[-200:]}")
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", deb, place / "root"], check=True)
    return place / "root"


@contextmanager
def daemon(place: Path | None = None) -> Iterator[Daemon]:
    """Starts dockerd without touching the machine's network or another daemon, and ends it with its containers."""
    with scratch(place) as private:
        yield from started(private)


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """A directory of its own, without the mount that dockerd leaves over its data when it ends."""
    place = Path(tempfile.mkdtemp(prefix="tollway-docker-", dir=parent))
    try:
        yield place
    finally:
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((mount for mount in mounted if mount.startswith(f"{place}/")), key=len, reverse=True):
            subprocess.run(["umount", mount], check=True)
        shutil.rmtree(place)


def started(place: Path) -> Iterator[Daemon]:
    """The daemon, for as long as the iterator lives."""
    root = unpacked(place)
    path = f"{root}/usr/sbin:{root}/usr/bin:{os.environ['PATH']}"
    url = f"unix://{place}/docker.sock"
    home = place / "state"
    home.mkdir()
    log = (place / "log").open("wb")
    command = ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "-H", url]
    command += [f"--data-root={home}/data", f"--exec-root={home}/exec", f"--pidfile={home}/pid"]
    process = subprocess.Popen(
        command, stdout=log, stderr=log, env={**os.environ, "PATH": path}, start_new_session=True
    )
    cli = (shutil.which("docker", path=path) or "docker", "-H", url)
    try:
        begun = time.monotonic()
        while subprocess.run([*cli, "version"], capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() - begun > 60:
                said = (place / "log").read_text(errors="replace").strip().splitlines()[-3:]
                raise NoDaemon(f"dockerd does not start on this machine: {' | '.join(said)}")
            time.sleep(0.2)
        made = Daemon(url, cli)
        made.docker("import", "-", IMAGE, data=image())
        try:
            made.docker("run", "--rm", "--network", "none", IMAGE, "/bin/true")
        except RuntimeError as error:
            raise NoDaemon(f"containers do not run on this machine: {error}") from error
        yield made
    finally:
        subprocess.run(f"{' '.join(cli)} rm -f $({' '.join(cli)} ps -aq)", shell=True, capture_output=True, check=False)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


def image() -> bytes:
    """A root file system with this machine's shell and usual utilities, and the libraries that they need."""
    listed = subprocess.run(["dpkg", "-L", "coreutils"], capture_output=True, text=True, check=True).stdout.split()
    programs = {Path(line).name for line in listed if "/bin/" in line} | set(PROGRAMS)
    files: dict[str, Path] = {}
    for name in sorted(programs):
        found = shutil.which(name, path="/usr/bin:/bin")
        if found is not None:
            files[f"bin/{name}"] = Path(found).resolve()
            for library in libraries(Path(found)):
                files[str(library).lstrip("/")] = library.resolve()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for directory, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777), ("root", 0o700)):
            member = tarfile.TarInfo(directory)
            member.type, member.mode = tarfile.DIRTYPE, mode
            archive.addfile(member)
        users = b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/workspace:/bin/sh\n"
        member = tarfile.TarInfo("etc/passwd")
        member.size = len(users)
        archive.addfile(member, io.BytesIO(users))
        for name, path in files.items():
            archive.add(path, name)
    return buffer.getvalue()


def libraries(program: Path) -> list[Path]:
    """What the loader maps for a program, the loader included."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    words = [word for line in said.splitlines() for word in line.split() if word.startswith("/")]
    return [Path(word) for word in words if Path(word).exists()]
