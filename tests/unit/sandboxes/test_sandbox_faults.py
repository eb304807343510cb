"""Providers that fail: whatever goes wrong, nothing is left at the provider, and nobody is hammered."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from sandbox_helpers import make

from tollway.errors import BadRequest, CreateFailed, RateLimited, SandboxError, SandboxGone, SandboxUnavailable
from tollway.sandboxes.base import Command, ExecResult, Sandbox, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeCloud, FakeProvider, FakeSandbox
from tollway.sandboxes.heartbeat import kept_alive
from tollway.sandboxes.owner import ATTEMPT, OWNER


@pytest.fixture
def cloud() -> FakeCloud:
    return FakeCloud()


async def settled(provider: FakeProvider) -> None:
    """Wait for what goes on in the background."""
    async with asyncio.timeout(10):
        while provider._owned:
            await asyncio.sleep(0.005)


async def test_a_create_whose_setup_fails_leaves_nothing(cloud: FakeCloud, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    async with FakeProvider(SandboxConfig(), cloud=cloud) as provider:
        provider.faults.write.append(SandboxError("upload failed"))
        with pytest.raises(SandboxError, match="upload failed"):
            await make(provider, files={"a": b"1"})
        provider.faults.exec.append(SandboxError("no answer"))
        with pytest.raises(SandboxError, match="no answer"):
            await make(provider, tree=tmp_path)
        provider.faults.exec.extend([SandboxError("no answer"), SandboxError("nor here")])
        with pytest.raises(SandboxError):
            await make(provider, mounts={"/opt/f": tmp_path / "f"})
        assert (provider.made, provider.killed, cloud.rented) == (3, 3, {})


@pytest.mark.parametrize(
    "spec", [{"tree": Path("/no/such")}, {"mounts": {"x": Path("/")}}, {"mounts": {"/x": Path("/no")}}]
)
async def test_a_spec_that_names_nothing_is_refused_before_anything_is_made(
    cloud: FakeCloud, spec: dict[str, object]
) -> None:
    async with FakeProvider(SandboxConfig(), cloud=cloud) as provider:
        with pytest.raises(BadRequest):
            await make(provider, **spec)
        assert cloud.calls == 0


async def test_a_slow_create_that_is_cancelled_half_way_is_killed_when_it_comes(cloud: FakeCloud) -> None:
    # 200 s and 100 s, scaled down.
    async with FakeProvider(SandboxConfig(create_timeout_s=0.3), cloud=cloud) as provider:
        provider.faults.create_delay_s = 0.2
        making = asyncio.create_task(make(provider))
        await asyncio.sleep(0.1)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert cloud.rented == {}
        await settled(provider)
        assert (provider.made, provider.killed, cloud.rented) == (1, 1, {})
        # Closing at once waits for such creates.
        making = asyncio.create_task(make(provider))
        await asyncio.sleep(0.05)
        making.cancel()
    assert (provider.made, provider.killed, cloud.rented) == (2, 2, {})


async def test_many_slow_creates_cancelled_at_every_moment_leave_nothing(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(max_live=200, max_spawning=50), cloud=cloud) as provider:
        provider.faults.create_delay_s = 0.02
        provider.faults.kill_delay_s = 0.01
        making = [asyncio.create_task(make(provider, files={"a": b"1"})) for _ in range(200)]
        for at, task in enumerate(making):
            task.cancel()
            if at % 20 == 0:
                await asyncio.sleep(0.004)
        await asyncio.gather(*making, return_exceptions=True)
    assert cloud.rented == {}
    assert provider.made == provider.killed == cloud.calls


async def test_an_answer_that_is_lost_leaves_nothing_at_the_provider(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(create_attempts=3), cloud=cloud) as provider:
        provider.faults.lost_create.extend([SandboxError("connection reset"), CreateFailed("read timed out")])
        sandbox = await make(provider)
        await settled(provider)
        assert provider.made == 3
        assert list(cloud.rented) == [sandbox.id]
        assert provider.counts.swept == 2
        provider.faults.lost_create.append(RuntimeError("the SDK broke"))
        with pytest.raises(RuntimeError):
            await make(provider)
    assert cloud.rented == {}


async def test_what_a_lost_answer_left_is_found_at_closing_if_not_before(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(create_attempts=1), cloud=cloud) as provider:
        provider.faults.lost_create.append(SandboxError("connection reset"))
        provider.faults.list.append(SandboxError("not now"))
        with pytest.raises(SandboxError, match="connection reset"):
            await make(provider)
        await settled(provider)
        assert len(cloud.rented) == 1
    assert cloud.rented == {}


async def test_what_others_own_is_never_swept(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(create_attempts=1), cloud=cloud) as other:
        kept = await make(other)
        async with FakeProvider(SandboxConfig(create_attempts=1), cloud=cloud) as provider:
            provider.faults.lost_create.append(SandboxError("connection reset"))
            with pytest.raises(SandboxError):
                await make(provider)
        assert list(cloud.rented) == [kept.id]


async def test_an_unreachable_provider_is_told_after_a_bounded_number_of_tries(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(create_attempts=2), cloud=cloud) as provider:
        sandbox = await make(provider)
        provider.faults.unreachable = True
        with pytest.raises(SandboxError, match="unreachable"):
            await make(provider)
        assert provider.counts.create_failures == 2
        with pytest.raises(SandboxError, match="unreachable"):
            await sandbox.exec(["true"], timeout_s=1)
        provider.faults.unreachable = False
        assert (await sandbox.exec(["true"], timeout_s=1)).exit_code == 0
    assert cloud.rented == {}


async def test_a_provider_that_cannot_run_at_all_is_asked_once(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(create_attempts=5), cloud=cloud) as provider:
        provider.faults.create.extend([SandboxUnavailable("no credentials")] * 2)
        with pytest.raises(SandboxUnavailable):
            await make(provider)
        assert provider.counts.create_failures == 1


async def test_a_burst_beyond_the_providers_rate_is_no_storm(cloud: FakeCloud) -> None:
    cloud.creates_per_s, cloud.retry_after_s = 100, 0.02
    async with FakeProvider(SandboxConfig(create_attempts=3, max_spawning=50), cloud=cloud) as provider:
        results = await asyncio.gather(*(make(provider) for _ in range(50)), return_exceptions=True)
        made = [each for each in results if isinstance(each, Sandbox)]
        # When the first refusal comes, 49 are in flight; from then on they keep the distance that it taught.
        assert len(made) >= 40, results
        assert all(isinstance(each, Sandbox | RateLimited) for each in results)
        assert cloud.calls <= 150
        assert provider.made == len(cloud.rented) == len(made)
        before = cloud.refused
        await asyncio.gather(*(sandbox.kill() for sandbox in made))
        assert cloud.refused == before
    assert cloud.rented == {}


async def test_retries_do_not_multiply(cloud: FakeCloud) -> None:
    # Callers that retry as well, around a provider that retries: 8 x 3 x 2 calls, all counted.
    async with FakeProvider(SandboxConfig(create_attempts=2, max_live=8), cloud=cloud) as provider:
        provider.faults.lost_create.extend([SandboxError("connection reset")] * 1000)

        async def stubborn() -> None:
            for _ in range(3):
                with pytest.raises(SandboxError):
                    await make(provider)

        await asyncio.gather(*(stubborn() for _ in range(8)))
        assert cloud.calls == 8 * 3 * 2
        await settled(provider)
    assert provider.made == 48
    assert cloud.rented == {}


async def test_a_refusal_holds_every_create_back_until_the_provider_said(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(), cloud=cloud) as provider:
        provider.faults.create.append(RateLimited("slow down", retry_after_s=0.2))
        started = asyncio.get_running_loop().time()
        await asyncio.gather(make(provider), make(provider))
        await make(provider)
        # The second one was in flight already or waits; nothing began between the refusal and its end.
        assert asyncio.get_running_loop().time() - started >= 0.19
        assert provider.made == 3


async def test_a_refusal_beyond_the_deadline_is_passed_on_at_once(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(create_timeout_s=5), cloud=cloud) as provider:
        provider.faults.create.append(RateLimited("come back in an hour", retry_after_s=3600))
        async with asyncio.timeout(4):
            with pytest.raises(RateLimited):
                await make(provider)
            with pytest.raises(RateLimited):  # nobody is asked: it is known
                await make(provider)
        assert provider.made == 0


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -5.0])
async def test_a_provider_that_asks_for_nonsense_does_not_stop_creates_for_ever(cloud: FakeCloud, wrong: float) -> None:
    config = SandboxConfig(create_timeout_s=1000, create_attempts=1)
    async with FakeProvider(config, cloud=cloud) as provider:
        provider.faults.create.append(RateLimited("?", retry_after_s=wrong))
        with pytest.raises(RateLimited):
            await make(provider)
        assert provider._pace._closed_until - asyncio.get_running_loop().time() <= 600


async def test_a_stuck_delete_does_not_hang_its_caller_and_is_tried_again(
    cloud: FakeCloud, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeProvider(SandboxConfig(kill_timeout_s=0.05, max_live=1), cloud=cloud) as provider:
        sandbox = await make(provider)
        provider.faults.stuck_kills = 1
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(5):
                await sandbox.kill()
        assert len(cloud.rented) == 1
        with pytest.raises(SandboxGone):
            await sandbox.read("x")
        assert await provider.list() == ()
        await asyncio.sleep(0.01)
        assert provider.counts.stuck == 1
        assert "not deleted yet" in caplog.text
        # Its place is free again when it is gone, not before.
        assert (await make(provider)).id in cloud.rented
        assert (provider.counts.stuck, provider.counts.released) == (0, 1)
    assert cloud.rented == {}


async def test_a_delete_that_fails_is_tried_again(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(), cloud=cloud) as provider:
        sandbox = await make(provider)
        provider.faults.kill.append(SandboxError("502"))
        await sandbox.kill()
        assert cloud.rented == {}
        sandbox = await make(provider)
        provider.faults.kill.append(SandboxGone("deleted by somebody else"))
        await sandbox.kill()
        assert provider.counts.released == 2


async def test_a_delete_that_never_works_is_given_up_and_told(
    cloud: FakeCloud, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeProvider(SandboxConfig(kill_attempts=1, max_live=1), cloud=cloud) as provider:
        sandbox = await make(provider)
        provider.faults.kill.append(SandboxError("no"))
        await sandbox.kill()
        assert (provider.counts.abandoned, provider.counts.stuck) == (1, 0)
        assert sandbox.id in caplog.text
        await make(provider)


async def test_closing_does_not_wait_for_ever_for_stuck_deletes(
    cloud: FakeCloud, caplog: pytest.LogCaptureFixture
) -> None:
    provider = FakeProvider(SandboxConfig(kill_timeout_s=0.05), cloud=cloud)
    async with asyncio.timeout(5):
        async with provider:
            sandboxes = [await make(provider) for _ in range(3)]
            provider.faults.stuck_kills = 100
    assert provider.counts.abandoned == 3
    assert len(cloud.rented) == 3
    assert all(sandbox.id in caplog.text for sandbox in sandboxes)


async def test_closing_does_not_wait_for_ever_for_a_create_that_hangs(cloud: FakeCloud) -> None:
    provider = FakeProvider(SandboxConfig(create_timeout_s=0.05, close_timeout_s=0.1), cloud=cloud)
    provider.faults.create_delay_s = 3600
    async with asyncio.timeout(5):
        async with provider:
            with pytest.raises(CreateFailed):
                await make(provider)
    assert cloud.rented == {}


async def test_a_command_is_never_run_twice(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(), cloud=cloud) as provider:
        sandbox = await make(provider)
        provider.faults.exec.extend([SandboxError("connection reset"), SandboxError("again")])
        with pytest.raises(SandboxError, match="connection reset"):
            await sandbox.exec(["true"], timeout_s=1)
        assert len(provider.faults.exec) == 1


async def test_a_provider_that_never_says_how_a_command_ended_is_not_waited_for() -> None:
    class Silent(FakeSandbox):
        async def _exec(self, command: Command) -> ExecResult:
            await asyncio.Event().wait()
            raise AssertionError

    async with FakeProvider(SandboxConfig(answer_grace_s=0.05)) as provider:
        made = await make(provider)
        silent = Silent(provider, made.id, made.spec)
        with pytest.raises(SandboxError, match="said nothing"):
            await silent.exec(["true"], timeout_s=0.05)


async def test_output_beyond_the_cap_is_cut_whatever_a_provider_lets_through() -> None:
    class Chatty(FakeSandbox):
        async def _exec(self, command: Command) -> ExecResult:
            return ExecResult(exit_code=0, stdout=b"x" * 100, stderr=b"y" * 5)

    async with FakeProvider(SandboxConfig()) as provider:
        made = await make(provider)
        done = await Chatty(provider, made.id, made.spec).exec(["true"], timeout_s=1, max_output=10)
        assert (done.stdout, done.stderr, done.truncated) == (b"x" * 10, b"y" * 5, True)


async def test_every_create_names_its_owner_and_its_attempt(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(), cloud=cloud) as provider:
        provider.faults.lost_create.append(SandboxError("connection reset"))
        sandbox = await make(provider, labels={"task": "t"})
        marks = [(spec.labels[OWNER], spec.labels[ATTEMPT]) for spec in provider.specs]
        assert {owner for owner, _ in marks} == {provider.owner}
        assert len({attempt for _, attempt in marks}) == 2
        assert sandbox.spec.labels["task"] == "t"
        assert all(len(value) <= 63 for value in sandbox.spec.labels.values())


async def test_a_heartbeat_keeps_a_sandbox_alive_and_its_end_lets_it_go(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(), cloud=cloud) as provider:
        sandbox = await make(provider, ttl_s=0.3)
        async with kept_alive(sandbox):
            provider.faults.extend.append(SandboxError("a beat that fails"))
            done = await sandbox.exec(["sleep", "1"], timeout_s=5)  # one silent command, three lives long
            assert done.exit_code == 0
        async with asyncio.timeout(10):
            while cloud.rented:
                await asyncio.sleep(0.01)
                cloud.expire()


async def test_an_owner_that_dies_leaves_nothing_after_the_ttl(cloud: FakeCloud) -> None:
    provider = FakeProvider(SandboxConfig(), cloud=cloud)
    await make(provider, ttl_s=0.1)
    assert provider._reaper is not None
    provider._reaper.cancel()  # what is left of a killed owner: nothing runs any more
    await asyncio.sleep(0.15)
    async with FakeProvider(SandboxConfig(), cloud=cloud) as other:
        assert await other.list() == ()


async def test_a_fork_counts_and_is_killed_with_the_rest(cloud: FakeCloud) -> None:
    async with FakeProvider(SandboxConfig(max_live=2), cloud=cloud) as provider:
        sandbox = await make(provider, files={"f": b"1"})
        twin = await sandbox.fork()
        assert provider.live == 2
        assert await twin.read("f") == b"1"
        twin_spec: SandboxSpec = twin.spec
        assert twin_spec.labels[ATTEMPT] != sandbox.spec.labels[ATTEMPT]
    assert (provider.made, provider.killed, cloud.rented) == (2, 2, {})
