"""``swe.json``: what a SWE task is made of, read strictly.

A task is a directory in Harbor's form (task.toml, instruction.md, environment/, tests/, solution/) with this
file beside them. It names its source by hash and holds patches and lists, never the source itself. Depends on
``patches``, pydantic and the kernel's configuration.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from tollway.config import Section
from tollway.envs.swe import patches
from tollway.envs.swe.running import Framework
from tollway.errors import BadRequest

__all__ = ["FORM", "Bundled", "Checkout", "Package", "Sdist", "Source", "SweTask", "Timeouts", "read_task"]

FORM = "tollway-swe/1"
MAX_JSON_BYTES = 16 << 20


def _path(value: str) -> str:
    if not patches.safe_path(value):
        raise ValueError("want a path below the repository, such as src/pkg/part.py")
    return value


def _root(value: str) -> str:
    return value if value == "." else _path(value)


def _hash(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("want 64 lower-case hexadecimal digits (SHA-256)")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", value):
        raise ValueError("want letters, digits, '.', '_' and '-', at most 128, beginning with a letter or digit")
    return value


def _patch(value: str) -> str:
    if value:
        try:
            patches.read(value)
        except BadRequest as error:
            raise ValueError(str(error)) from None
    return value


def _option(value: str) -> str:
    if value.partition("=")[0] in ("-c", "--rootdir", "--junitxml", "--confcutdir", "--collect-only", "--co"):
        raise ValueError("this option of pytest belongs to the runner")
    return value


SafePath = Annotated[str, AfterValidator(_path)]
RootPath = Annotated[str, AfterValidator(_root)]
Sha256 = Annotated[str, AfterValidator(_hash)]
Name = Annotated[str, AfterValidator(_name)]
Patch = Annotated[str, AfterValidator(_patch)]
NodeId = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class _Part(Section):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Package(_Part):
    """One wheel that the tests need, pinned."""

    name: Name
    version: Name
    sha256: Sha256


class Sdist(_Part):
    """A source distribution of the package index."""

    kind: Literal["sdist"]
    name: Name
    version: Name
    sha256: Sha256


class Bundled(_Part):
    """A repository that is part of this package."""

    kind: Literal["bundled"]
    name: Name


class Checkout(_Part):
    """A directory of this machine that holds the repository at ``base_commit``."""

    kind: Literal["checkout"]
    repo: Text
    base_commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,64}$")]
    directory: Text
    image: Text | None = None
    """Image with the repository's dependencies, for providers that have images; ``None`` for their default."""
    python: Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f]*$")] | None = None
    """The Python in that image that has them."""


Source = Annotated[Sdist | Bundled | Checkout, Field(discriminator="kind")]


class Timeouts(_Part):
    """Seconds, generous: they stop what hangs and measure nothing."""

    test_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    total_s: Annotated[float, Field(gt=0, le=36000)] = 600.0


class SweTask(_Part):
    """One bug to repair."""

    form: Literal["tollway-swe/1"] = Field(alias="schema")
    instance_id: Name
    source: Source
    bug_patch: Patch
    """What turns the source into what the agent is given; empty when the source has the bug already."""
    fix_patch: Patch = ""
    """The reference fix on top of it; empty for the reverse of ``bug_patch``."""
    test_patch: Patch = ""
    """Tests that the agent does not see; they are laid down before grading."""
    packages: tuple[SafePath, ...] = ()
    """Directories whose Python files, existing and new ones, may be handed in."""
    modules: tuple[SafePath, ...] = ()
    """Further single files that may be handed in."""
    roots: Annotated[tuple[RootPath, ...], Field(min_length=1)] = (".",)
    """Directories that Python imports from."""
    framework: Framework = "pytest"
    test_paths: Annotated[tuple[SafePath, ...], Field(min_length=1)]
    """Files and directories that belong to the tests: restored before grading, never taken from a submission."""
    test_files: tuple[SafePath, ...] = ()
    """What is collected; empty for the files that the tests below name."""
    options: tuple[Annotated[str, AfterValidator(_option)], ...] = ()
    """Further options of pytest."""
    fail_to_pass: Annotated[tuple[NodeId, ...], Field(min_length=1)] = Field(alias="FAIL_TO_PASS")
    pass_to_pass: tuple[NodeId, ...] = Field(default=(), alias="PASS_TO_PASS")
    controls: dict[NodeId, tuple[Annotated[int, Field(ge=0)], ...]] = Field(default_factory=dict)
    """By test function: the assertions that are known to fail when their expectation is falsified."""
    events: tuple[str, ...] = ()
    """What the honest library asks the interpreter for."""
    requires: tuple[Package, ...] = ()
    """Wheels that tests need besides pytest."""
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _fits_together(self) -> SweTask:
        if not self.packages and not self.modules:
            raise ValueError("packages and modules are both empty: name what may be handed in")
        ids = [*self.fail_to_pass, *self.pass_to_pass]
        if len(set(ids)) != len(ids):
            raise ValueError("a test stands twice in FAIL_TO_PASS and PASS_TO_PASS")
        for one in ids:
            path = one.partition("::")[0]
            if "::" not in one or not patches.safe_path(path):
                raise ValueError(f"test {one!r}: want path/of/test.py::name")
            if not self.is_test(path):
                raise ValueError(f"test {one!r} lies outside test_paths")
        if not self.bug_patch and not self.fix_patch:
            raise ValueError("bug_patch and fix_patch are both empty: nothing says what the fix is")
        for name in ("bug_patch", "fix_patch"):
            for changed in patches.read(text) if (text := getattr(self, name)) else ():
                if not self.may_submit(changed.path):
                    raise ValueError(f"{name} changes {changed.path}, which nobody may hand in")
        return self

    @property
    def fix(self) -> tuple[patches.FilePatch, ...]:
        """The reference fix, on what the agent is given."""
        return patches.read(self.fix_patch) if self.fix_patch else patches.reverse(patches.read(self.bug_patch))

    @property
    def files(self) -> tuple[str, ...]:
        """What is collected."""
        return self.test_files or tuple(
            sorted({one.partition("::")[0] for one in self.fail_to_pass + self.pass_to_pass})
        )

    def is_test(self, path: str) -> bool:
        """Whether ``path`` belongs to the tests."""
        return any(path == one or path.startswith(f"{one}/") for one in self.test_paths)

    def may_submit(self, path: str) -> bool:
        """Whether ``path`` is taken from a submission: Python files of the library, never of its tests."""
        if not patches.safe_path(path) or not path.endswith(".py") or self.is_test(path):
            return False
        if path in self.modules:
            return True
        parts = PurePosixPath(path).parts
        if any(fnmatch.fnmatchcase(parts[-1], one) for one in _NEVER) or not {"tests", "test"}.isdisjoint(parts[:-1]):
            return False
        return any(path.startswith(f"{one}/") for one in self.packages)


_NEVER = ("conftest.py", "test_*.py", "*_test.py", "setup.py", "sitecustomize.py", "usercustomize.py", "noxfile.py")


def read_task(directory: Path) -> SweTask:
    """The task of a directory. Raises ``BadRequest`` that names the file, the field and what is wrong."""
    path = directory / "swe.json"
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadRequest(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadRequest(f"{directory} is no SWE task: it has no swe.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {path}: {error}") from error
    return parse_task(text, source=str(path))


def parse_task(text: str, *, source: str) -> SweTask:
    """The task that ``text`` describes; ``source`` is what errors call it."""
    try:
        tree = json.loads(text, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{source} is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise BadRequest(f"{source} holds a {type(tree).__name__}; want an object")
    if tree.get("schema") != FORM:
        raise BadRequest(f"{source}: schema is {tree.get('schema')!r}; this version reads {FORM!r}")
    try:
        # From JSON, so that lists are taken for tuples although types are strict.
        return SweTask.model_validate_json(text)
    except ValidationError as error:
        lines = [_explain(dict(problem)) for problem in error.errors()[:10]]
        raise BadRequest("\n".join([f"{source} is no usable task:", *lines])) from None
    except RecursionError:
        raise BadRequest(f"{source} is nested too deeply") from None


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _explain(problem: Mapping[str, object]) -> str:
    place = problem["loc"]
    where = ".".join(str(part) for part in place) if isinstance(place, tuple) else ""
    text = str(problem["msg"]).removeprefix("Value error, ")
    value = problem["input"]
    shown = "" if isinstance(value, dict) else f" (found {str(value)[:80]!r})"
    return f"  {where or 'the whole'}: {text}{shown}"
