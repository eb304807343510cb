"""How a library is built into tasks: where its sources and tests lie, what its tests need.

Guessed from the unpacked source distribution, or said by the user. Pure apart from looking at a directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tollway.envs.swe.running import Framework
from tollway.envs.swe.task import Package
from tollway.errors import BadRequest

__all__ = ["Recipe", "guess"]

_NOT_PACKAGES = {
    "tests",
    "test",
    "testing",
    "docs",
    "doc",
    "examples",
    "example",
    "benchmarks",
    "scripts",
    "tools",
    "build",
}
_TEST_PLACES = ("tests", "test", "testing", "src/tests")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One library."""

    packages: tuple[str, ...]
    """Directories of its own Python packages."""
    modules: tuple[str, ...]
    """Its modules that lie in no package."""
    roots: tuple[str, ...]
    test_paths: tuple[str, ...]
    """Everything that belongs to its tests."""
    collect: tuple[str, ...] = ()
    """What of it is run; empty for all."""
    framework: Framework = "pytest"
    requires: tuple[Package, ...] = ()
    options: tuple[str, ...] = ()


def guess(
    tree: Path,
    *,
    tests: Sequence[str] = (),
    collect: Sequence[str] = (),
    requires: Sequence[Package] = (),
    options: Sequence[str] = (),
) -> Recipe:
    """What the usual layouts say. Raises ``BadRequest`` when sources or tests are not where they usually are."""
    source = "src/" if (tree / "src").is_dir() else ""
    packages = tuple(
        f"{source}{one.name}"
        for one in sorted((tree / source).iterdir())
        if one.is_dir() and (one / "__init__.py").is_file() and one.name not in _NOT_PACKAGES
    )
    modules = tuple(
        f"{source}{one.name}"
        for one in sorted((tree / source).glob("*.py"))
        if one.name not in ("setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py", "__init__.py")
        and not one.name.startswith("test")
        and not one.name.endswith("_test.py")
    )
    found = tuple(tests) or tuple(
        [one for one in _TEST_PLACES if (tree / one).is_dir()][:1]
        or sorted(one.name for one in tree.glob("test*.py"))
        or sorted(str(one.relative_to(tree)) for name in ("tests", "test") for one in tree.glob(f"{source}*/{name}"))
    )
    if missing := [one for one in found if not (tree / one).exists()]:
        raise BadRequest(f"the source distribution has no {', '.join(missing)}; name its tests with --tests")
    if not found:
        raise BadRequest("the source distribution has no tests where they usually are; name them with --tests")
    if not packages and not modules:
        raise BadRequest("the source distribution has no Python package or module at its top or under src/")
    return Recipe(
        packages=packages,
        modules=() if packages else modules,
        roots=("src", ".") if source else (".",),
        test_paths=found,
        collect=tuple(collect),
        requires=tuple(requires),
        options=tuple(options),
    )
