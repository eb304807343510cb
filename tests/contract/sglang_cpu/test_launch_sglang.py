"""`engine.kind = "sglang"`: the released SGLang, started, stamped, killed and started again by our launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from sglang_cpu.fixture import DENSE, START_UP_S, set_up
from sglang_cpu.serve import ENVIRONMENT, FLAGS, PYTHON

from tollway.engine.config import EngineConfig, Option
from tollway.fresh_model import write_fresh_model
from tollway.launching import launcher
from tollway.router.config import RouterConfig
from tollway.router.launch import EngineLauncher
from tollway.router.service import Router
from tollway.settings import load_settings


def options() -> dict[str, Option]:
    """The flags of the reference server as a table of ``[engine.sglang]``."""
    found: dict[str, Option] = {}
    for flag in FLAGS:
        if flag.startswith("--"):
            name = flag.removeprefix("--")
            found[name] = True
        else:
            found[name] = flag
    return found


@pytest.mark.all
@pytest.mark.timeout(2 * START_UP_S)
async def test_a_stock_server_is_started_numbered_watched_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    write_fresh_model(tmp_path / "model", DENSE, seed=1)
    config = EngineConfig(kind="sglang", executable=str(PYTHON.with_name("sglang")), sglang=options())
    settings = load_settings(None, [f"run.dir={str(tmp_path)!r}"]).model_copy(update={"engine": config})
    engines = launcher(settings, tmp_path / "model", shown=tmp_path / "settings.json", count=1)
    await engines.start()
    try:
        async with Router(RouterConfig(probe_interval_s=0.5)) as router:
            engine = router.add_engine(engines.urls[0])
            await router.wait_ready(60)
            assert (engine.version, engine.client.facts.kind, engine.dp_ranks) == (0, "sglang", 1)
            assert engine.start_id.startswith('[{"')
            came: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def down(url: str) -> None:
                await router.remove_engine(engine.id)

            async def up(url: str) -> None:
                came.set_result(url)

            keeping = asyncio.create_task(engines.keep(down=down, up=up))
            first = _session(engines)
            (scheduler,) = [pid for pid in _members(first) if "scheduler" in _name(pid)]
            os.kill(scheduler, signal.SIGKILL)  # what a fault on the device does
            again = router.add_engine(await came)
            await router.wait_ready(60)
            assert again.version == 0
            assert again.url != engine.url
            second = _session(engines)
            assert len(_members(second)) >= 4, "ours beside the server, the server, its scheduler and detokenizer"
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
    finally:
        await engines.stop()
    async with asyncio.timeout(20):  # what was killed takes a moment to give its memory back
        while _members(first) or _members(second):
            await asyncio.sleep(0.05)


def _session(engines: EngineLauncher) -> int:
    """The session of the one engine: everything that it started is in it."""
    process = engines._slots[0].process
    assert process is not None
    return process.pid


def _members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.parent.name))
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
