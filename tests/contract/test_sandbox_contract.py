"""Every shipped provider passes the suite that third parties run."""

from __future__ import annotations

import pytest

from tollway.sandboxes import conformance
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.sandboxes.local import LocalProvider
from tollway.sandboxes.probe import probe

_PROBE = probe()


def _open(name: str) -> SandboxProvider:
    if name == "fake":
        return FakeProvider(SandboxConfig())
    if not _PROBE.available:
        pytest.skip(_PROBE.reason)
    return LocalProvider(SandboxConfig())


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["local", "fake"])
async def test_provider_keeps_the_promise(name: str, check: conformance.Check) -> None:
    async with _open(name) as provider:
        await check(provider)
        assert provider.live == 0


async def test_the_suite_reports_a_broken_promise_instead_of_passing() -> None:
    class Forgetful(FakeProvider):
        """Loses exit codes."""

    async def always_zero(process: object) -> int:
        return 0

    provider = Forgetful(SandboxConfig(), programs={"sh": always_zero})
    async with provider:
        outcomes = {outcome.name: outcome.error for outcome in await conformance.run(provider)}
    assert set(outcomes) == {check.__name__ for check in conformance.CHECKS}
    assert "code 3" in str(outcomes["exit_codes_are_results"])
    assert outcomes["sandboxes_do_not_share_files"] is None
