"""Every shipped provider that runs here passes the suite that third parties run."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tollway.sandboxes import conformance
from tollway.sandboxes.base import CAPABILITIES, SandboxProvider
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.sandboxes.local import LocalProvider
from tollway.sandboxes.probe import probe

_PROBE = probe()


def _open(mode: str) -> SandboxProvider:
    if not _PROBE.available:
        pytest.skip(_PROBE.reason)
    return LocalProvider(SandboxConfig(local=LocalConfig(mode=mode)))  # type: ignore[arg-type]  # a parameter


WAITING = {
    "a_cancelled_create_leaves_nothing",
    "a_timeout_is_a_result",
    "cancelling_a_command_leaves_the_sandbox",
    "kill_ends_running_commands",
    "nothing_survives_a_timeout",
    "output_is_capped",
    "ttl_ends_it_and_extend_keeps_it",
}
"""Checks that wait most of the time; here they do so side by side."""


@pytest.mark.parametrize(
    "check",
    [check for check in conformance.CHECKS if conformance.name_of(check) not in WAITING],
    ids=conformance.name_of,
)
@pytest.mark.parametrize("mode", ["exec", "session"])
async def test_the_local_provider_keeps_the_promise(mode: str, check: conformance.Check) -> None:
    async with _open(mode) as provider:
        await check(provider)
        assert provider.live == 0


@pytest.mark.parametrize("mode", ["exec", "session"])
async def test_the_local_provider_keeps_the_promises_that_take_time(mode: str) -> None:
    async def verdict(name: str) -> str | None:
        async with _open(mode) as provider:
            (outcome,) = await conformance.run(provider, [name])
            return outcome.error

    errors = dict(zip(WAITING, await asyncio.gather(*map(verdict, WAITING)), strict=True))
    assert errors == dict.fromkeys(WAITING)


async def test_the_fake_keeps_every_promise() -> None:
    async def verdict(check: conformance.Check) -> str | None:
        async with FakeProvider(SandboxConfig()) as provider:
            (outcome,) = await conformance.run(provider, [conformance.name_of(check)])
            assert (provider.live, provider.cloud.rented) == (0, {})
            return outcome.error

    # Side by side: most of the time they wait.
    errors = await asyncio.gather(*(verdict(check) for check in conformance.CHECKS))
    assert errors == [None] * len(conformance.CHECKS)


async def test_the_suite_reports_a_broken_promise_instead_of_passing() -> None:
    async def always_zero(process: object) -> int:
        return 0

    provider = FakeProvider(SandboxConfig(), programs={"sh": always_zero})
    names = ["exit_codes_are_results", "sandboxes_do_not_share_files", "reads_stay_inside"]
    async with provider:
        outcomes = {outcome.name: outcome.error for outcome in await conformance.run(provider, names)}
    assert set(outcomes) == set(names)
    assert "code 3" in str(outcomes["exit_codes_are_results"])
    assert outcomes["sandboxes_do_not_share_files"] is None


class Careless(FakeProvider):
    """Claims what it does not do."""

    caps = FakeProvider.caps | {"memory_limit", "pids_limit", "disk_limit", "user"}


async def test_what_is_claimed_is_tried() -> None:
    names = ["users_can_be_chosen", "memory_is_limited", "processes_are_limited", "the_disk_is_limited"]
    async with Careless(SandboxConfig()) as provider:
        outcomes = await conformance.run(provider, names)
    assert [outcome.name for outcome in outcomes if outcome.error is not None] == names


def test_every_check_says_what_it_holds_a_provider_to() -> None:
    for check in conformance.CHECKS:
        assert len(conformance.promise_of(check)) > 20, conformance.name_of(check)
    assert len({conformance.name_of(check) for check in conformance.CHECKS}) == len(conformance.CHECKS)


def test_every_capability_is_tried_by_some_check() -> None:
    text = "".join(
        inspect.getsource(module)
        for module in (
            conformance.promises_capabilities,
            conformance.promises_commands,
            conformance.promises_files,
            conformance.promises_lifetime,
        )
    )
    assert [name for name in CAPABILITIES if name not in text] == []
