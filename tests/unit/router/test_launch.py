"""Starting engines and keeping them running: real processes that come up, die, and refuse to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from live_engines import write_model

from tollway.errors import ComponentLost
from tollway.free_ports import free_ports
from tollway.router import launch
from tollway.router.engines import EngineClient
from tollway.router.launch import EngineLauncher, EnginePlan, RestartRule

pytestmark = pytest.mark.slow(limit_s=60)

# A program that knows nothing of us: it serves SGLang's surface at the port that it is given, says nothing on a
# ready line, and calls its weights "default".
FOREIGN = """
import asyncio, os, sys
from tollway.router.fake import FakeEngine
async def main():
    print("loading the model", flush=True)
    engine = FakeEngine(version="default")
    engine._port = int(sys.argv[1])
    await engine.start()
    print(f"pid {os.getpid()} listens", file=sys.stderr, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def plan(code: str, **more: object) -> EnginePlan:
    argv = (sys.executable, "-c", textwrap.dedent(code), "{port}")
    return EnginePlan(argv=argv, says_ready=False, ready_timeout_s=30.0, **more)  # type: ignore[arg-type]


class Kept:
    """A launcher that is kept, and what it told of."""

    def __init__(self, launcher: EngineLauncher) -> None:
        self.launcher, self.heard = launcher, list[tuple[str, str]]()
        self.event = asyncio.Event()

    async def tell(self, what: str, url: str) -> None:
        self.heard.append((what, url))
        self.event.set()

    async def keep(self) -> None:
        await self.launcher.keep(down=lambda url: self.tell("down", url), up=lambda url: self.tell("up", url))

    async def until(self, count: int) -> None:
        """Wait until it told of ``count`` things."""
        async with asyncio.timeout(30):
            while len(self.heard) < count:
                self.event.clear()
                await self.event.wait()


@contextlib.asynccontextmanager
async def started(launcher: EngineLauncher) -> AsyncIterator[Kept]:
    await launcher.start()
    kept = Kept(launcher)
    task = asyncio.create_task(kept.keep())
    try:
        yield kept
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await launcher.stop()


def launcher(
    tmp_path: Path, code: str = FOREIGN, *, count: int = 1, restarts: int = 3, **more: object
) -> EngineLauncher:
    rule = RestartRule(restarts=restarts, window_s=600.0)
    return EngineLauncher(plan(code, **more), count=count, logs=tmp_path, rule=rule)


def pid_of(log: Path) -> int:
    """The last process that wrote ``log``."""
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("pid ")][-1]


def pids(tmp_path: Path) -> list[int]:
    """Every process that ever listened, the oldest of each engine first."""
    lines = [line for log in sorted(tmp_path.glob("engine*.log")) for line in log.read_text().splitlines()]
    return [int(line.split()[1]) for line in lines if line.startswith("pid ")]


async def test_a_foreign_program_joins_with_a_number_for_its_weights_and_all_it_says_is_kept(tmp_path: Path) -> None:
    async with started(launcher(tmp_path, count=2)) as kept, aiohttp.ClientSession() as http:
        urls = kept.launcher.urls
        assert len(set(urls)) == 2
        for url in urls:
            assert (await EngineClient(url, http).model_info()).weight_version == "0"
        for name in ("engine.log", "engine.1.log"):
            assert "loading the model" in (tmp_path / name).read_text()
        running = pids(tmp_path)
    assert not any(Path(f"/proc/{pid}").exists() for pid in running), "nothing is left behind"


async def test_a_dead_engine_leaves_routing_first_and_comes_back_at_a_new_address(tmp_path: Path) -> None:
    async with started(launcher(tmp_path)) as kept:
        (url,) = kept.launcher.urls
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        await kept.until(2)
        assert kept.heard == [("down", url), ("up", kept.launcher.urls[0])]
        assert len(pids(tmp_path)) == 2


async def test_an_engine_that_dies_at_each_boot_is_started_so_often_and_then_the_failure_is_loud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report J10."""
    flag = tmp_path / "broken"
    code = f"""
    import pathlib, sys
    if pathlib.Path({str(flag)!r}).exists():
        sys.exit("CUDA error: device-side assert triggered")
    """ + textwrap.indent(FOREIGN, "    ")
    monkeypatch.setattr(launch.RestartBudget, "pause_s", 0.0)
    starter = launcher(tmp_path, code, restarts=2)
    await starter.start()
    kept = Kept(starter)
    flag.touch()
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    with pytest.raises(ComponentLost) as error:
        await asyncio.wait_for(kept.keep(), 30)
    await starter.stop()
    assert [what for what, _ in kept.heard] == ["down"]
    log = (tmp_path / "engine.log").read_text()
    assert log.count("device-side assert") == 2, "two restarts, and not one more"
    words = str(error.value)
    assert "CUDA error: device-side assert triggered" in words
    assert "no restart is left (2 within 600 s), and 0 engines are fewer than the 1 that are needed" in words


async def test_with_engines_left_the_run_goes_on_without_the_dead_one(tmp_path: Path) -> None:
    async with started(launcher(tmp_path, count=2, restarts=0)) as kept:
        first, second = kept.launcher.urls
        os.kill(pid_of(tmp_path / "engine.log"), signal.SIGKILL)
        await kept.until(1)
        async with asyncio.timeout(10):
            while kept.launcher.urls != [second]:
                await asyncio.sleep(0)
        assert kept.heard == [("down", first)]
        os.kill(pid_of(tmp_path / "engine.1.log"), signal.SIGKILL)
        await kept.until(2)
        assert kept.heard[1] == ("down", second)


async def test_an_engine_that_runs_and_answers_nobody_is_ended_and_started_anew(tmp_path: Path) -> None:
    async with started(launcher(tmp_path)) as kept:
        (url,) = kept.launcher.urls
        os.kill(pids(tmp_path)[0], signal.SIGSTOP)
        kept.launcher.give_up("http://127.0.0.1:1")
        kept.launcher.give_up(url)
        await kept.until(2)
        assert [what for what, _ in kept.heard] == ["down", "up"]


async def test_a_port_that_is_taken_meanwhile_is_replaced_by_a_free_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Report C11."""
    (port,) = free_ports()
    async with started(launcher(tmp_path, port=port)) as kept:
        assert kept.launcher.urls == [f"http://127.0.0.1:{port}"]
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        with contextlib.closing(socket.socket()) as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            async with asyncio.timeout(10):
                while True:
                    with contextlib.suppress(OSError):
                        thief.bind(("127.0.0.1", port))
                        thief.listen()
                        break
                    await asyncio.sleep(0)
            await kept.until(2)
            assert kept.heard[1] == ("up", kept.launcher.urls[0])
            assert kept.launcher.urls != [f"http://127.0.0.1:{port}"]
            assert f"port {port} of 127.0.0.1 is taken" in caplog.text


async def test_a_port_that_is_taken_while_the_engine_loads_costs_another_start_and_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loads = f"""
    import pathlib, sys, time
    print(f"pid 0 loads for {{sys.argv[1]}}.", flush=True)
    while not pathlib.Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.01)
    """
    kept = launcher(tmp_path, textwrap.dedent(loads) + FOREIGN)
    starting = asyncio.create_task(kept.start())
    try:
        log = tmp_path / "engine.log"
        async with asyncio.timeout(30):
            while not (said := re.search(r"loads for (\d+)\.", log.read_text() if log.exists() else "")):
                await asyncio.sleep(0.01)
        with contextlib.closing(socket.create_server(("127.0.0.1", int(said[1])))):
            (tmp_path / "go").touch()
            await starting
        (url,) = kept.urls
        assert url != f"http://127.0.0.1:{said[1]}"
        assert f"engine found its port taken, http://127.0.0.1:{said[1]}; it starts on another one" in caplog.text
        async with aiohttp.ClientSession() as http:
            assert (await EngineClient(url, http).model_info()).weight_version == "0"
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await kept.stop()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('no such model')", "no such model"),
        ("import os; os.kill(os.getpid(), 9)", "status -9"),
    ],
)
async def test_an_engine_that_does_not_come_up_at_all_is_said_at_once(tmp_path: Path, code: str, words: str) -> None:
    with pytest.raises(ComponentLost, match=words):
        await asyncio.wait_for(launcher(tmp_path, code).start(), 30)


async def test_an_engine_that_never_generates_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    code = "import time; print('compiling kernels', flush=True); time.sleep(3600)"
    starter = EngineLauncher(
        EnginePlan(argv=(sys.executable, "-c", code), says_ready=False, ready_timeout_s=1.5),
        count=1,
        logs=tmp_path,
        rule=RestartRule(),
    )
    with pytest.raises(ComponentLost, match=r"generated nothing within 2 s[\s\S]*compiling kernels"):
        await starter.start()


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    starter = EngineLauncher(
        EnginePlan(argv=("/nonexistent/engine",), says_ready=False), count=1, logs=tmp_path, rule=RestartRule()
    )
    with pytest.raises(ComponentLost, match="cannot start /nonexistent/engine: No such file or directory"):
        await starter.start()


async def test_one_failed_start_ends_the_others(tmp_path: Path) -> None:
    code = f"""
    import pathlib, sys, time
    mark = pathlib.Path({str(tmp_path)!r}) / "first"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        sys.exit("out of memory")
    """ + textwrap.indent(FOREIGN, "    ")
    with pytest.raises(ComponentLost, match="out of memory"):
        await launcher(tmp_path, code, count=2).start()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids(tmp_path))


async def test_a_foreign_program_ends_with_its_owner_however_that_dies(tmp_path: Path) -> None:
    """So does everything that it started, which a server that is still starting forgets."""
    program = FOREIGN.replace(
        "async def main():",
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)'])\n"
        "print(f'pid {child.pid} is its child', file=sys.stderr, flush=True)\n"
        "async def main():",
    )
    owner = f"""
    import asyncio, pathlib, sys
    from tollway.router.launch import EngineLauncher, EnginePlan, RestartRule
    async def main():
        plan = EnginePlan(argv=(sys.executable, "-c", {program!r}, "{{port}}"), says_ready=False)
        await EngineLauncher(plan, count=1, logs=pathlib.Path({str(tmp_path)!r}), rule=RestartRule()).start()
        print("up", flush=True)
        await asyncio.sleep(3600)
    asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(owner), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"up\n"
    started = pids(tmp_path)
    assert len(started) == 2
    process.kill()
    await process.wait()
    async with asyncio.timeout(20):
        while any(_runs(pid) for pid in started):
            await asyncio.sleep(0.01)


async def test_the_embedded_engine_is_kept_the_same_way(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    argv = (sys.executable, "-m", "tollway", "engine", "--model-path", str(model), "--port", "{port}")
    env = {"OMP_NUM_THREADS": "1"}
    starter = EngineLauncher(
        EnginePlan(argv=argv, says_ready=True, env=env), count=1, logs=tmp_path / "logs", rule=RestartRule()
    )
    async with started(starter) as kept, aiohttp.ClientSession() as http:
        (url,) = kept.launcher.urls
        assert await EngineClient(url, http).health_generate()
        assert starter.dead() is None
        kept.launcher.give_up(url)
        await kept.until(2)
        assert await EngineClient(kept.launcher.urls[0], http).health_generate()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
