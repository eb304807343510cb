"""The outer gateway's own process, without one: what its keeper says when it cannot be started again."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from tollway.errors import ComponentLost, NoEngine
from tollway.router.gateways import OwnGateway
from tollway.router.smg import Smg


class _Ended:
    """An smg whose process has ended."""

    def __init__(self) -> None:
        self.process = self

    async def wait(self) -> int:
        return 1

    def lost(self) -> ComponentLost:
        return ComponentLost("smg ended with status 1")

    async def stop(self) -> None:
        """Nothing is left of it."""


class _Full(OwnGateway):
    """On a machine that starts no further process."""

    async def _launch(self) -> Smg:
        raise BlockingIOError(11, "Resource temporarily unavailable")


async def test_a_gateway_that_the_machine_cannot_start_again_is_said_to_be_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = _Full(probe_s=1.0, on_start=lambda: None)
    with caplog.at_level(logging.ERROR):
        await gateway._keep(cast(Smg, _Ended()))
    assert "smg is not started again: [Errno 11] Resource temporarily unavailable" in caplog.text
    with pytest.raises(NoEngine, match="is down"):
        await gateway.checked()
    await gateway.aclose()
