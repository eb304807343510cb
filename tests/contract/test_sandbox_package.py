"""The example of a third-party provider passes the suite, from its source and from wheels in a fresh environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "sandbox_provider"
SOURCES = ("src", "session_server", "router", "engine", "envs", "sandboxes", "trainer")
WORKS = ["unshare", "--user", "--map-root-user", "-mpniu", "--fork", "sh", "-c", "mount -t proc none /proc"]


def _can_unshare() -> bool:
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
    try:
        return subprocess.run([*drop, *WORKS], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not _can_unshare(), reason="unshare cannot make namespaces on this machine")


@needs_namespaces
def test_the_example_works_from_its_source() -> None:
    only = ["exit_codes_are_results", "files_go_in_and_out", "network_none_is_none", "kill_ends_running_commands"]
    done = subprocess.run(
        [sys.executable, "-m", "tollway", "sandbox", "check", "tollway_unshare:UnshareProvider", "--json"]
        + [word for name in only for word in ("--only", name)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["passed"] == len(only)


def test_the_example_is_short() -> None:
    (source,) = (EXAMPLE / "src").rglob("*.py")
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 150


def _wheel(source: Path, into: Path) -> Path:
    """Build in a copy: the sources may be anybody's, and a build writes beside them."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(into), str(source)],
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    return max(into.glob("*.whl"), key=lambda path: path.stat().st_mtime)


@needs_namespaces
@pytest.mark.all
@pytest.mark.slow(300)
def test_both_wheels_in_a_fresh_environment_pass_the_whole_suite(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="building wheels without downloads needs setuptools here")
    copy = tmp_path / "tollway"
    copy.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "node_modules", ".venv*")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(EXAMPLE, tmp_path / "example", ignore=ignored)
    wheels = [_wheel(copy, tmp_path / "wheels"), _wheel(tmp_path / "example", tmp_path / "wheels")]

    fresh = tmp_path / "venv"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, *map(str, wheels)], check=True)
    # Dependencies come from this environment, as a plain path: its own tollway stays behind the fresh one.
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    where = [python, "-c", "import tollway.sandboxes.base as m, tollway_unshare as n; print(m.__file__, n.__file__)"]
    for path in subprocess.check_output(where, text=True, cwd=tmp_path, env=clean).split():
        assert Path(path).is_relative_to(site), path
    command = [str(fresh / "bin" / "tollway"), "sandbox", "check", "unshare", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean, check=False)
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    assert report["provider"] == "unshare"
    assert report["stand_in"] is None
    assert report["passed"] >= 30
