"""What the base class promises for every provider, shown on the in-memory one with faults."""

from __future__ import annotations

import asyncio

import pytest
from sandbox_helpers import make

from tollway.errors import (
    BadImage,
    BadRequest,
    CapabilityMissing,
    CapacityExceeded,
    CreateFailed,
    RateLimited,
    SandboxError,
    SandboxGone,
)
from tollway.sandboxes.base import Sandbox, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider, Process


@pytest.mark.parametrize("wrong", [{"ttl_s": 0}, {"ttl_s": float("inf")}, {"ttl_s": -1}, {"labels": {}}])
def test_a_sandbox_without_an_end_or_an_owner_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        SandboxSpec(**{"ttl_s": 1.0, "labels": {"a": "b"}, **wrong})  # type: ignore[arg-type]


class GatedProvider(FakeProvider):
    """Creates wait for ``gate``; how many are in flight, and when each began, is written down."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.gate = asyncio.Event()
        self.in_flight = self.most = 0
        self.began_at: list[float] = []

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        self.began_at.append(asyncio.get_running_loop().time())
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await self.gate.wait()
            return await super()._create(spec)
        finally:
            self.in_flight -= 1


async def settle() -> None:
    """Let every task that can run do so: no clock is involved."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_no_more_than_max_live_exist_and_a_freed_place_is_used() -> None:
    async with FakeProvider(SandboxConfig(max_live=2)) as provider:
        first, second = await make(provider), await make(provider)
        third = asyncio.create_task(make(provider))
        await settle()
        assert not third.done()
        assert provider.made == 2
        await first.kill()
        sandbox = await third
        assert provider.live == 2
        await asyncio.gather(second.kill(), sandbox.kill())
    assert provider.killed == provider.made == 3


async def test_waiting_for_a_place_ends_with_capacity_exceeded() -> None:
    async with FakeProvider(SandboxConfig(max_live=1, create_timeout_s=0.05)) as provider:
        await make(provider)
        with pytest.raises(CapacityExceeded, match=r"sandbox\.max_live"):
            await make(provider)


async def test_creates_in_flight_are_bounded() -> None:
    async with GatedProvider(SandboxConfig(max_spawning=2)) as provider:
        making = [asyncio.create_task(make(provider)) for _ in range(6)]
        await settle()
        assert provider.in_flight == 2
        provider.gate.set()
        await asyncio.gather(*making)
        assert (provider.made, provider.most) == (6, 2)


async def test_the_rate_of_creates_is_bounded() -> None:
    async with GatedProvider(SandboxConfig(creates_per_s=50)) as provider:
        provider.gate.set()
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(make(provider) for _ in range(6)))
        # A slow machine only makes them later.
        for at, began in enumerate(sorted(provider.began_at)):
            assert began - started >= at / 50 - 0.001


@pytest.mark.parametrize("queued", [False, True])
async def test_a_create_beyond_its_deadline_is_given_up_and_killed_in_the_background(queued: bool) -> None:
    config = SandboxConfig(max_live=2, max_spawning=1 if queued else 2, create_timeout_s=0.05)
    async with GatedProvider(config) as provider:
        async with asyncio.timeout(10):
            late = await asyncio.gather(make(provider), make(provider), return_exceptions=True)
        assert all(isinstance(error, CreateFailed) and error.retryable for error in late), late
        assert "sandbox.create_timeout_s" in str(late[0])
        with pytest.raises(CapacityExceeded):
            await make(provider)  # its place is taken until it is known to be gone
        provider.gate.set()
        async with asyncio.timeout(10):
            while provider.killed < (1 if queued else 2):
                await asyncio.sleep(0.005)
        provider.faults.create_delay_s = 0.0
        await make(provider)
    # One that still waited for its turn was never begun.
    assert provider.made == provider.killed == (2 if queued else 3)
    assert provider.live == 0


async def test_setup_files_count_against_the_deadline_of_a_create() -> None:
    class SlowWrites(FakeProvider):
        async def _create(self, spec: SandboxSpec) -> Sandbox:
            sandbox = await super()._create(spec)

            async def never(path: str, data: bytes, mode: int) -> None:
                await asyncio.Event().wait()

            sandbox._write = never  # type: ignore[method-assign]
            return sandbox

    provider = SlowWrites(SandboxConfig(create_timeout_s=0.05))
    with pytest.raises(CreateFailed):
        async with asyncio.timeout(10):
            await make(provider, files={"a": b"1"})
    for task in list(provider._owned):
        task.cancel()
    await provider.aclose()
    assert (provider.made, provider.killed, provider.live) == (1, 1, 0)


async def test_commands_running_at_once_are_bounded() -> None:
    running, most = 0, 0

    async def busy(process: Process) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 0

    async with FakeProvider(SandboxConfig(max_running=3), programs={"busy": busy}) as provider:
        sandboxes = [await make(provider) for _ in range(10)]
        await asyncio.gather(*(sandbox.exec(["busy"], timeout_s=5) for sandbox in sandboxes))
    assert most == 3


async def test_retryable_creates_are_tried_again_a_bounded_number_of_times() -> None:
    async with FakeProvider(SandboxConfig(create_attempts=3)) as provider:
        provider.faults.create.extend([RateLimited("slow down", retry_after_s=0.01), CreateFailed("flaky")])
        await make(provider)
        assert provider.made == 1
        provider.faults.create.extend([RateLimited("slow down", retry_after_s=0.01)] * 5)
        with pytest.raises(RateLimited):
            await make(provider)
        assert len(provider.faults.create) == 2
        assert provider.live == 1


async def test_a_bad_image_is_never_retried() -> None:
    async with FakeProvider(SandboxConfig(create_attempts=3, max_live=1)) as provider:
        provider.faults.create.extend([BadImage("no such image"), BadImage("tried again")])
        with pytest.raises(BadImage, match="no such image"):
            await make(provider)
        assert len(provider.faults.create) == 1
        provider.faults.create.clear()
        await make(provider)  # the place was given back


async def test_a_failing_setup_step_kills_what_was_created() -> None:
    async with FakeProvider(SandboxConfig(max_live=1)) as provider:
        provider.faults.write.append(SandboxError("upload failed"))
        with pytest.raises(SandboxError, match="upload failed"):
            await make(provider, files={"a": b"1"})
        assert (provider.made, provider.killed, provider.live) == (1, 1, 0)
        await make(provider, files={"a": b"1"})


@pytest.mark.parametrize("cancel_after_s", [0.0, 0.01, 0.03])
async def test_cancelling_a_create_leaks_nothing(cancel_after_s: float) -> None:
    async with FakeProvider(SandboxConfig(max_live=1)) as provider:
        provider.faults.create_delay_s = 0.05
        making = asyncio.create_task(make(provider))
        await asyncio.sleep(cancel_after_s)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        again = await asyncio.wait_for(make(provider), 5)
        assert provider.live == 1
        await again.kill()
    assert provider.made == provider.killed
    assert provider.live == 0


async def test_closing_waits_for_creates_whose_callers_went_away() -> None:
    provider = FakeProvider(SandboxConfig())
    async with provider:
        provider.faults.create_delay_s = 0.1
        making = asyncio.create_task(make(provider))
        await asyncio.sleep(0.02)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        assert provider.made == 0
    assert (provider.made, provider.killed, provider.live) == (1, 1, 0)
    with pytest.raises(SandboxError, match="closed"):
        await make(provider)


async def test_a_cancelled_kill_still_kills() -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        sandbox = await make(provider)
        provider.faults.kill_delay_s = 0.05
        killing = asyncio.create_task(sandbox.kill())
        await asyncio.sleep(0.01)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        with pytest.raises(SandboxGone):
            await sandbox.read("x")
        await sandbox.kill()
        assert provider.killed == 1


async def test_capabilities_gate_options_before_anything_is_created() -> None:
    class Bare(FakeProvider):
        caps = frozenset({"stderr"})

    async with Bare(SandboxConfig()) as provider:
        with pytest.raises(CapabilityMissing, match="public_network"):
            await make(provider, network="public")
        with pytest.raises(CapabilityMissing, match="network_hosts"):
            await make(provider, network=("example.org",))
        assert provider.made == 0
        sandbox = await make(provider)
        with pytest.raises(CapabilityMissing):
            await sandbox.exec(["true"], user="root", timeout_s=1)
        for optional in (sandbox.snapshot, sandbox.pause, sandbox.resume, sandbox.fork):
            with pytest.raises(CapabilityMissing):
                await optional()


@pytest.mark.parametrize(
    "call",
    [
        {"cmd": []},
        {"cmd": ["a\0b"]},
        {"cmd": ["true"], "timeout_s": 0},
        {"cmd": ["true"], "cwd": "a\0"},
        {"cmd": ["true"], "env": {"A": "\0"}},
        {"cmd": ["true"], "env": {"A=B": "x"}},
        {"cmd": ["true"], "env": {"": "x"}},
        {"cmd": ["echo", "\ud800"]},
        {"cmd": ["true"], "timeout_s": float("nan")},
    ],
)
async def test_commands_that_cannot_be_are_refused(call: dict[str, object]) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        sandbox = await make(provider)
        with pytest.raises(BadRequest):
            await sandbox.exec(**{"timeout_s": 1.0, **call})  # type: ignore[arg-type]
