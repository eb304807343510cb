"""What SWE tasks need on this machine: verified downloads and the directories made from them.

Every directory is made beside its place, then moved there, named by the hashes of what went in, and never
changed again; sandboxes share it read-only. No code of a package runs here: source distributions are unpacked,
wheels are unpacked by pip. Depends on ``task``, ``site`` and pip.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tollway.envs.swe import patches, site
from tollway.envs.swe.running import PYTHON
from tollway.envs.swe.task import Bundled, Checkout, Package, Sdist, Source, SweTask
from tollway.errors import BadRequest, ConfigError

__all__ = ["BUNDLED", "Cache", "apply_to_tree", "compile_site", "default_cache"]

BUNDLED = Path(__file__).with_name("bundled")
"""Repositories that are part of this package."""
PIP_S = 600.0
MAX_TREE_BYTES = 512 << 20
MAX_TREE_FILES = 50_000


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/tollway/swe``, or ``~/.cache/tollway/swe``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home.startswith("/") else Path.home() / ".cache") / "tollway" / "swe"


class Cache:
    """One cache directory. Safe to use from several processes at once."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or default_cache()).absolute()

    # -- downloads ---------------------------------------------------------------------------------

    def sdist(self, source: Sdist, *, download: bool) -> Path:
        """The verified archive. Raises ``ConfigError`` when it is not here and may not be downloaded."""
        folder = self.root / "sdists" / source.sha256
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if digest(path) == source.sha256:
                return path
        if not download:
            raise ConfigError(
                f"{source.name} {source.version} is not in {self.root}; run: tollway tasks fetch"
                f" (or set env.swe.cache to where it is)"
            )
        with self._making(folder) as place:
            name = find_and_save([(source.name, source.version, True)], place)[0]
            found = digest(place / name)
            if found != source.sha256:
                raise ConfigError(
                    f"{name} has SHA-256 {found}, the task wants {source.sha256}: the index serves another file"
                )
        return next(iter(sorted(folder.glob("*"))))

    def pin_sdist(self, name: str, version: str) -> Sdist:
        """Download the source distribution that the index has now, and pin it by what came."""
        with _spare(self.root) as place:
            path = place / find_and_save([(name, version, True)], place)[0]
            source = Sdist(kind="sdist", name=name, version=version, sha256=digest(path))
            folder = self.root / "sdists" / source.sha256
            if not folder.is_dir():
                with self._making(folder) as final:
                    shutil.copyfile(path, final / path.name)
        self.base(source)
        return source

    def pin_wheel(self, name: str, version: str) -> Package:
        """The pin of a wheel that every Python can use, as the index has it now."""
        with _spare(self.root) as place:
            options = ["--no-deps", "--only-binary", ":all:", "--platform", "any", "--dest", str(place)]
            pip(["download", *options, f"{name}=={version}"])
            return Package(name=name, version=version, sha256=digest(next(place.glob("*.whl"))))

    def packages(self, requires: Sequence[Package], *, download: bool) -> Path:
        """The directory of installed wheels: pytest and ``requires``."""
        wanted = site.packages_for(requires)
        text = site.requirements(wanted)
        folder = self.root / "site" / hashlib.sha256(text.encode()).hexdigest()[:24]
        if folder.is_dir():
            return folder
        if not download:
            raise ConfigError(
                f"the packages that tests need ({', '.join(one.name for one in wanted)}) are not in {self.root};"
                " run: tollway tasks fetch"
            )
        with self._making(folder) as place:
            listed = place / "requirements.txt"
            listed.write_text(text, encoding="utf-8")
            options = ["--target", str(place), "--no-deps", "--no-compile", "--only-binary", ":all:"]
            pip(["install", *options, "--require-hashes", "--upgrade", "-r", str(listed)])
            shutil.rmtree(place / "bin", ignore_errors=True)
            for stray in place.glob("*.pth"):
                stray.unlink()
            compile_site(place)
        return folder

    # -- directories -------------------------------------------------------------------------------

    def base(self, source: Source, *, download: bool = False) -> Path:
        """The unpacked source, unchanged."""
        if isinstance(source, Bundled):
            if not (BUNDLED / source.name).is_dir():
                raise BadRequest(f"no bundled repository {source.name!r}; there are: {', '.join(bundled_names())}")
            return BUNDLED / source.name
        if isinstance(source, Checkout):
            return checkout(source)
        folder = self.root / "sources" / source.sha256
        if not folder.is_dir():
            archive = self.sdist(source, download=download)
            with self._making(folder) as place:
                unpack(archive, place)
        return folder

    def tree(self, task: SweTask, *, download: bool = False) -> Path:
        """What the agent of a task is given: the source with the bug."""
        identity = json.dumps([task.source.model_dump(mode="json"), task.bug_patch], sort_keys=True)
        base = self.base(task.source, download=download)
        if isinstance(task.source, Bundled | Checkout):
            # These may change under the same name.
            identity += tree_digest(base)
        folder = self.root / "trees" / hashlib.sha256(identity.encode()).hexdigest()[:24]
        if not folder.is_dir():
            with self._making(folder) as place:
                copy_tree(base, place)
                if task.bug_patch:
                    apply_to_tree(patches.read(task.bug_patch), place)
        return folder

    def _making(self, folder: Path) -> _Making:
        return _Making(folder)


@contextmanager
def _spare(root: Path) -> Iterator[Path]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as name:
            yield Path(name)
    except PermissionError as error:
        raise ConfigError(f"cannot write the cache {root}: {error}; set env.swe.cache") from error


class _Making:
    """Make a directory whole or not at all: ``with _Making(folder) as place``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Path:
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._place = Path(tempfile.mkdtemp(prefix=".making-", dir=self._folder.parent))
            self._place.chmod(0o755)
        except OSError as error:
            raise ConfigError(f"cannot write the cache {self._folder.parent}: {error}; set env.swe.cache") from error
        return self._place

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            open_to_all(self._place)
            try:
                self._place.rename(self._folder)
                return
            except OSError:
                if not self._folder.is_dir():  # else another process was faster, with the same contents
                    raise
        shutil.rmtree(self._place, ignore_errors=True)


def compile_site(site: Path) -> None:
    """Compile packages ahead for the sandboxes' Python, which may not write there: a start is a second faster.

    Compiling runs nothing of them. Where that Python is not on this machine, sandboxes do without.
    """
    if not os.access(PYTHON, os.X_OK):
        return
    options = ["-I", "-S", "-m", "compileall", "-q", "-q", "--invalidation-mode", "unchecked-hash"]
    # A file for another version of Python does not compile; the others do.
    subprocess.run([PYTHON, *options, str(site)], capture_output=True, timeout=PIP_S, check=False)


def find_and_save(wanted: Sequence[tuple[str, str, bool]], into: Path) -> list[str]:
    """Save distribution files (name, version, is it an sdist) with pip's index settings; returns file names."""
    request = {
        "into": str(into),
        "wanted": [{"name": name, "version": version, "sdist": sdist} for name, version, sdist in wanted],
    }
    child = Path(__file__).with_name("pip_child.py")
    out = _child([sys.executable, str(child)], "looking for packages", stdin=json.dumps(request))
    try:
        saved = json.loads(out.strip().splitlines()[-1])["saved"]
    except (ValueError, IndexError, KeyError, TypeError):
        raise ConfigError(f"pip said nothing useful: {out[-500:]!r}") from None
    for (name, version, sdist), file in zip(wanted, saved, strict=True):
        if file is None:
            kind = "source distribution" if sdist else "wheel"
            raise ConfigError(f"the package index has no {kind} of {name} {version} (pip config says which index)")
    return [str(one) for one in saved]


def pip(arguments: Sequence[str]) -> str:
    """Run pip of this Python; ``ConfigError`` with its last words when it fails."""
    return _child([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], "pip")


def _child(command: Sequence[str], what: str, *, stdin: str = "") -> str:
    try:
        done = subprocess.run(command, input=stdin, text=True, capture_output=True, timeout=PIP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{what}: {error}") from error
    if done.returncode != 0:
        hint = "; install pip into this environment" if "No module named pip" in done.stderr else ""
        raise ConfigError(f"{what} failed{hint}:\n{_last_words(done.stderr)}")
    return done.stdout


def _last_words(said: str) -> str:
    """The end of what pip said, the same whenever the same went wrong: of its retries the last, no addresses."""
    lines = [re.sub(r"<[\w.]+ object at 0x[0-9a-f]+>(: )?", "", line) for line in said.strip().splitlines()]
    retries = [number for number, line in enumerate(lines) if line.startswith("WARNING: Retrying")]
    return "\n".join(line for number, line in enumerate(lines) if number not in retries[:-1])[-1500:]


def unpack(archive: Path, into: Path) -> None:
    """Unpack an sdist whose one top directory becomes ``into``; nothing is written elsewhere, no link goes out."""
    with tempfile.TemporaryDirectory(dir=into.parent) as spare:
        try:
            if archive.name.endswith(".zip"):
                _unzip(archive, Path(spare))
            else:
                _untar(archive, Path(spare))
        except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
            raise BadRequest(f"{archive.name} cannot be unpacked: {error}") from error
        tops = list(Path(spare).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise BadRequest(f"{archive.name} does not hold exactly one directory, as a source distribution does")
        copy_tree(tops[0], into)


def _untar(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as opened:
        total = 0
        for count, member in enumerate(opened):
            total += member.size
            if total > MAX_TREE_BYTES or count > MAX_TREE_FILES:
                raise BadRequest(f"{archive.name} unpacks to more than {MAX_TREE_BYTES >> 20} MiB or too many files")
        opened.extractall(into, filter="data")


def _unzip(archive: Path, into: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for one in opened.infolist():
            name = one.filename.rstrip("/")
            if not patches.safe_path(name):
                raise BadRequest(f"{archive.name} holds the path {one.filename!r}")
        if sum(one.file_size for one in opened.infolist()) > MAX_TREE_BYTES:
            raise BadRequest(f"{archive.name} unpacks to more than {MAX_TREE_BYTES >> 20} MiB")
        opened.extractall(into)  # noqa: S202 - every path was looked at above


def copy_tree(source: Path, into: Path) -> None:
    """Copy regular files and directories; links, version control and compiled files stay behind."""
    skip: Callable[..., set[str]] = shutil.ignore_patterns("__pycache__", "*.pyc", ".git", ".hg", ".svn", "*.pth")

    def ignore(folder: str, names: list[str]) -> set[str]:
        return skip(folder, names) | {name for name in names if _is_special(os.path.join(folder, name))}

    shutil.copytree(source, into, ignore=ignore, dirs_exist_ok=True)


def _is_special(path: str) -> bool:
    return os.path.islink(path) or not (os.path.isfile(path) or os.path.isdir(path))


def apply_to_tree(patch: Sequence[patches.FilePatch], tree: Path) -> None:
    """Apply a patch to a directory that nothing else shares."""
    before: dict[str, str] = {}
    for one in patch:
        path = tree / one.path
        if path.is_file():
            before[one.path] = read_source(path)
    for name, text in patches.apply(patch, before).items():
        path = tree / name
        if text is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def read_source(path: Path) -> str:
    """A text file with its line ends as they are."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path.name} is no UTF-8 text: {error}") from None


def checkout(source: Checkout) -> Path:
    """A local checkout, if it stands at the wanted commit. git itself is not needed."""
    tree = Path(source.directory)
    if not tree.is_dir():
        raise BadRequest(f"no directory {tree}; check {source.repo} out there at {source.base_commit}")
    head = head_of(tree)
    if head is not None and not head.startswith(source.base_commit):
        raise BadRequest(f"{tree} stands at {head[:12]}, the task wants {source.base_commit[:12]}: check that out")
    return tree


def head_of(tree: Path) -> str | None:
    """The commit that a checkout stands at; ``None`` for a directory without version control."""
    git = tree / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text(encoding="ascii").strip()
        for line in (git / "packed-refs").read_text(encoding="ascii").splitlines():
            if line.endswith(f" {name}"):
                return line.partition(" ")[0]
    except (OSError, UnicodeDecodeError):
        pass
    return None


def bundled_names() -> list[str]:
    """Names of the repositories that are part of this package."""
    return sorted(one.name for one in BUNDLED.iterdir() if one.is_dir() and not one.name.startswith((".", "_")))


def open_to_all(tree: Path) -> None:
    """Readable for every user: sandboxes run under users of their own."""
    for folder, names, files in os.walk(tree):
        for name in (*names, *files):
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.path.isdir(path) or os.access(path, os.X_OK) else 0o644)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_digest(tree: Path) -> str:
    """A hash over names and contents of a directory."""
    total = hashlib.sha256()
    for path, data in sorted(tree_files(tree).items()):
        total.update(f"{path}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def tree_files(tree: Path) -> Mapping[str, bytes]:
    """Regular files of a directory by relative path, version control and compiled files left out."""
    found = {}
    for path in sorted(tree.rglob("*")):
        parts = path.relative_to(tree).parts
        if path.is_file() and not path.is_symlink() and "__pycache__" not in parts and ".git" not in parts:
            found["/".join(parts)] = path.read_bytes()
    return found
