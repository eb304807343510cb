"""What the tests of SWE tasks share: a small repository with pytest tests, a site made of this environment's pytest."""

from __future__ import annotations

import atexit
import importlib.util
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tollway.envs.base import Task
from tollway.envs.config import EnvConfig
from tollway.envs.swe.cache import Cache
from tollway.envs.swe.config import SweConfig
from tollway.envs.swe.environment import Swe
from tollway.envs.swe.grading import SweGrader
from tollway.envs.swe.task import SweTask, parse_task

PYTEST_PARTS = ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")

LIBRARY = {
    "shapes/__init__.py": "from shapes.area import area, half\n\n__all__ = ['area', 'half']\n",
    "shapes/area.py": '''\
"""Areas."""


def area(width, height):
    """Of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width + height


def half(value):
    """The smaller half."""
    return value // 2
''',
    "tests/test_area.py": """\
import pytest

from shapes import area, half


@pytest.fixture
def square():
    return 3


def test_area():
    assert area(2, 3) == 6


def test_square(square):
    assert area(square, square) == 9


@pytest.mark.parametrize(("width", "height", "expected"), [(1, 1, 1), (0, 0, 0), (2, 5, 10)])
def test_many(width, height, expected):
    assert area(width, height) == expected


def test_negative():
    with pytest.raises(ValueError, match="negative"):
        area(-1, 1)


def test_half():
    assert half(5) == 2


@pytest.mark.parametrize("value", range(20))
def test_halves(value):
    assert half(value) * 2 <= value
""",
}
FIX = """\
--- a/shapes/area.py
+++ b/shapes/area.py
@@ -5,7 +5,7 @@
     \"\"\"Of a rectangle.\"\"\"
     if width < 0 or height < 0:
         raise ValueError("negative")
-    return width + height
+    return width * height
{blank}
{blank}
 def half(value):
""".format(blank=" ")


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write texts by relative path."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def shapes_fields(directory: Path) -> dict[str, object]:
    """swe.json of the task to repair ``LIBRARY``, which lies in ``directory``."""
    return {
        "schema": "tollway-swe/1",
        "instance_id": "shapes-1",
        "source": {"kind": "checkout", "repo": "x/shapes", "base_commit": "0" * 40, "directory": str(directory)},
        "bug_patch": "",
        "fix_patch": FIX,
        "packages": ["shapes"],
        "test_paths": ["tests"],
        "FAIL_TO_PASS": [
            "tests/test_area.py::test_area",
            "tests/test_area.py::test_many[1-1-1]",
            "tests/test_area.py::test_many[2-5-10]",
            "tests/test_area.py::test_square",
        ],
        "PASS_TO_PASS": [
            "tests/test_area.py::test_half",
            *(f"tests/test_area.py::test_halves[{value}]" for value in range(20)),
            "tests/test_area.py::test_many[0-0-0]",
            "tests/test_area.py::test_negative",
        ],
        "controls": {f"tests/test_area.py::{name}": [0] for name in ("test_area", "test_many", "test_square")},
        "timeouts": {"test_s": 20.0, "total_s": 50.0},
    }


def shapes(root: Path) -> SweTask:
    """The task to repair ``LIBRARY``."""
    directory = write_files(root / "repository", LIBRARY)
    return parse_task(json.dumps(shapes_fields(directory)), source="shapes")


@cache
def pytest_site() -> Path:
    """A site directory for sandboxes with the pytest that runs these tests; made once, gone with the process.

    Compiled files are copied with it, dates and all, so that a start is fast where both Pythons are of one version.
    """
    site = Path(tempfile.mkdtemp(prefix="tollway-site-"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    site.chmod(0o755)
    for name in PYTEST_PARTS:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            continue
        source = Path(found.origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, site / name, ignore=shutil.ignore_patterns("*.so"))
        else:
            shutil.copyfile(source, site / source.name)
    return site


def shapes_grader(root: Path, **changes: object) -> SweGrader:
    """A grader for ``shapes``, over a site of our own: nothing is downloaded."""
    task = shapes(root)
    tree = Cache(root / "cache").tree(task)
    return SweGrader(task=task.model_copy(update=changes), tree=tree, site=pytest_site())


def tiny(root: Path, *only: str) -> Swe:
    """The environment over the tiny set, for evaluation."""
    return Swe(EnvConfig(name="swe", split="heldout", swe=SweConfig(tasks="tiny", only=only, cache=root / "cache")))


def grader_of(environment: Swe, task: Task) -> SweGrader:
    """The grader of a task of ours."""
    grader = environment.grader(task)
    assert isinstance(grader, SweGrader)
    return grader


__all__ = [
    "FIX",
    "LIBRARY",
    "grader_of",
    "pytest_site",
    "shapes",
    "shapes_fields",
    "shapes_grader",
    "tiny",
    "write_files",
]
