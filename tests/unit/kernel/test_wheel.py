"""What is shipped is what lies in the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("session_server", "router", "engine", "envs", "sandboxes", "trainer")


@pytest.mark.slow(180)
@pytest.mark.timeout(180)
def test_the_wheel_holds_every_module_of_the_tree_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "src"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in (name for name in listed if (ROOT / name).is_file()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy],
        check=True,
    )
    (wheel,) = tmp_path.glob("tollway-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {name for name in names if name.endswith(".py")}
    wanted = {f"tollway/{p.relative_to(ROOT / 'src/tollway')}" for p in (ROOT / "src/tollway").rglob("*.py")}
    for folder in FOLDERS:
        wanted |= {f"tollway/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*.py")}
    assert shipped == wanted
    assert "tollway/py.typed" in names

    code = "import tollway.records, tollway.router.supervisor; print(tollway.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(wheel) in done.stdout
