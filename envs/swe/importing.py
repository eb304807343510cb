"""SWE-bench-style records become tasks: fields by name, refused with a reason where they cannot be graded.

A record names a repository and a commit, never the files: they come from a checkout on this machine. Depends on
``task``, ``patches`` and ``cache``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from tollway.envs.swe import patches
from tollway.envs.swe.cache import checkout, read_source
from tollway.envs.swe.task import FORM, Checkout, Package, SweTask
from tollway.errors import BadRequest

__all__ = ["FIELDS", "Imported", "Refused", "Where", "import_record", "read_records"]

FIELDS = (
    "instance_id",
    "repo",
    "base_commit",
    "patch",
    "test_patch",
    "problem_statement",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "version",
    "environment_setup_commit",
)
"""What a record may hold; ``--map`` gives other names for them."""
_REQUIRED = ("instance_id", "repo", "base_commit", "patch", "FAIL_TO_PASS")
_DOCUMENTS = (".md", ".rst", ".txt", ".adoc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where repositories are; ``{instance_id}``, ``{repo}`` and ``{base_commit}`` are filled in."""

    checkout: str
    """Directory of this machine with the repository at the record's commit."""
    image: str | None = None
    """Image with the repository's dependencies."""
    python: str | None = None
    """The Python in that image that has them."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A record that became a task."""

    task: SweTask
    instruction: str
    left_out: tuple[str, ...]
    """Documents that the reference patch changes, too; no test depends on them."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A record that did not."""

    name: str
    reason: str


def read_records(path: Path) -> Iterator[tuple[int, Mapping[str, object] | str]]:
    """Records of a JSON-lines or JSON file by line number; a text instead of a record says what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{path} is no JSON: {error}") from None
        yield from ((at, one if isinstance(one, dict) else "no object") for at, one in enumerate(found, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"no JSON: {error}"
            continue
        yield number, one if isinstance(one, dict) else "no object"


def import_record(
    record: Mapping[str, object],
    *,
    names: Mapping[str, str],
    where: Where,
    requires: Sequence[Package] = (),
) -> Imported | Refused:
    """One record as a task. ``names`` maps our field names to the record's."""
    values = {name: record.get(names.get(name, name)) for name in FIELDS}
    name = str(values["instance_id"] or "record without instance_id")
    try:
        return _import(values, where, requires)
    except BadRequest as error:
        return Refused(name, str(error))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return Refused(name, f"{place}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": "))


def _import(values: Mapping[str, object], where: Where, requires: Sequence[Package]) -> Imported:
    missing = [name for name in _REQUIRED if not values[name]]
    if missing:
        raise BadRequest(f"it has no {', '.join(missing)}; map fields by --map ours=theirs")
    instance, repo, commit = (_text(values, name) for name in ("instance_id", "repo", "base_commit"))
    fails, passes = _ids(values, "FAIL_TO_PASS"), _ids(values, "PASS_TO_PASS")
    for one in (*fails, *passes):
        if not one.partition("::")[0].endswith(".py") or "::" not in one:
            raise BadRequest(f"the test id {one!r} is none of pytest's (path/test.py::name); only those can be graded")
    test_patch = _text(values, "test_patch")
    hidden = patches.read(test_patch) if test_patch else ()
    fix, left_out = _library_part(patches.read(_text(values, "patch")))
    packages, modules, roots = _layout([one.path for one in fix])
    tests = _test_paths([one.path for one in hidden], (*fails, *passes))
    known = {"instance_id": instance, "repo": repo, "base_commit": commit}
    source = Checkout(
        kind="checkout",
        repo=repo,
        base_commit=commit,
        directory=str(Path(_filled(where.checkout, known, "--checkout")).absolute()),
        image=_filled(where.image, known, "--image") if where.image else None,
        python=where.python,
    )
    _fits(checkout(source), fix, hidden)
    task = SweTask.model_validate(
        {
            "schema": FORM,
            "instance_id": instance,
            "source": source.model_dump(),
            "bug_patch": "",
            "fix_patch": patches.render(fix),
            "test_patch": test_patch,
            "packages": packages,
            "modules": modules,
            "roots": roots,
            "test_paths": tests,
            "FAIL_TO_PASS": fails,
            "PASS_TO_PASS": passes,
            "requires": tuple(one.model_dump() for one in requires),
            "timeouts": {"test_s": 300.0, "total_s": 1800.0},
        }
    )
    said = _text(values, "problem_statement").strip()
    return Imported(task, said or f"Repair {repo} so that these tests pass: {', '.join(fails)}", left_out)


def _filled(template: str, known: Mapping[str, str], what: str) -> str:
    try:
        return template.format_map(known)
    except (KeyError, IndexError, ValueError):
        raise BadRequest(f"{what} {template!r}: want {{instance_id}}, {{repo}} and {{base_commit}} at most") from None


def _text(values: Mapping[str, object], name: str) -> str:
    value = values[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{name} is a {type(value).__name__}; want text")
    return value


def _ids(values: Mapping[str, object], name: str) -> tuple[str, ...]:
    """A list of tests; SWE-bench keeps it as JSON in a text."""
    value = values[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRequest(f"{name} is text that is no JSON list") from None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise BadRequest(f"{name} is no list of test ids")
    return tuple(dict.fromkeys(value))


def _library_part(patch: Sequence[patches.FilePatch]) -> tuple[tuple[patches.FilePatch, ...], tuple[str, ...]]:
    """The part of a reference patch that a submission could hold, and the documents that it changes besides."""
    kept, documents = [], []
    for one in patch:
        if one.path.endswith(".py"):
            kept.append(one)
        elif one.path.endswith(_DOCUMENTS) or one.path.split("/")[0] in ("doc", "docs", "changelog", "changes"):
            documents.append(one.path)
        else:
            raise BadRequest(f"its fix changes {one.path}; only Python files are taken from submissions")
    if not kept:
        raise BadRequest("its fix changes no Python file")
    return tuple(kept), tuple(documents)


def _layout(paths: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Packages, single modules and import roots that the changed files speak of."""
    packages, modules = set(), set()
    source = False
    for path in paths:
        parts = PurePosixPath(path).parts
        depth = 2 if parts[0] in ("src", "lib") else 1
        source = source or parts[0] == "src"
        if len(parts) > depth:
            packages.add("/".join(parts[:depth]))
        else:
            modules.add(path)
    return tuple(sorted(packages)), tuple(sorted(modules)), ("src", ".") if source else (".",)


def _test_paths(changed: Sequence[str], ids: Sequence[str]) -> tuple[str, ...]:
    """Directories named tests or test above the tests and what the test patch changes, else the files themselves."""
    found = set()
    for path in (*changed, *(one.partition("::")[0] for one in ids)):
        parts = PurePosixPath(path).parts
        at = next((at for at, part in enumerate(parts[:-1]) if part in ("tests", "test", "testing")), None)
        found.add("/".join(parts[: at + 1]) if at is not None else path)
    return tuple(sorted(found))


def _fits(tree: Path, fix: Sequence[patches.FilePatch], hidden: Sequence[patches.FilePatch]) -> None:
    """Refuse a record whose patches do not apply to the checkout: it stands elsewhere, or the record is wrong."""
    for patch in (fix, hidden):
        before = {one.path: read_source(tree / one.path) for one in patch if (tree / one.path).is_file()}
        patches.apply(patch, before)
