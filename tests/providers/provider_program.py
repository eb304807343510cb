# ruff: noqa: PT017, T201 - a program of its own, not a test under pytest
"""Runs one provider, with its real SDK, against a stand-in of its service: every promise, then faults on the wire.

Started by the tests with the Python of that SDK's environment: ``python provider_program.py e2b|agentenv|...``.
Prints one JSON line: what the service is, and what is wrong with each check (null for nothing).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tollway.errors import BadRequest, CreateFailed, RateLimited, SandboxError
from tollway.sandboxes import conformance
from tollway.sandboxes.base import SandboxProvider, SandboxSpec
from tollway.sandboxes.config import DaytonaConfig, E2BConfig, LocalConfig, SandboxConfig
from tollway.sandboxes.registry import open_provider

KEY = "key"
RATE, BROKEN = 429, 500


@dataclass
class Stand:
    """A stand-in of one service, and how to break it."""

    config: SandboxConfig
    live: Callable[[], int]
    """Machines that exist at the service."""
    creates: Callable[[], int]
    """Create requests that came in."""
    break_create: Callable[..., None]
    break_delete: Callable[..., None]
    forget_faults: Callable[[], None]
    sdk_tries: int = 1
    """How often the SDK itself repeats a create that failed inside the service; nothing turns it off."""
    nowhere: dict[str, object] = field(default_factory=dict)
    """Changes of the configuration after which the service cannot be reached."""

    def provider(self, **changes: object) -> SandboxProvider:
        return open_provider(self.config.model_copy(update=changes))


@asynccontextmanager
async def local() -> AsyncIterator[SandboxProvider]:
    config = SandboxConfig(max_output_bytes=16 << 20, local=LocalConfig(mode="session"))
    async with open_provider(config) as provider:
        yield provider


@asynccontextmanager
async def e2b_stand(name: str) -> AsyncIterator[Stand]:
    from aiohttp import web
    from wire_faults import Faults

    from tollway.sandboxes.e2b_server import FrontEnd, application

    os.environ["E2B_API_KEY"] = KEY
    faults, seen = Faults(), []
    async with local() as provider:
        front_end = FrontEnd(provider, key=KEY, network=True)
        app = application(front_end)

        @web.middleware
        async def struck(request: web.Request, handler: object) -> web.StreamResponse:
            seen.append(f"{request.method} {request.path}")
            planned = await faults.strike(request.method, request.path)
            if planned is not None:
                return planned
            answer = await handler(request)  # type: ignore[operator]
            return await faults.after(request.method, request.path) or answer

        app.middlewares.insert(0, struck)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield Stand(
            config=SandboxConfig(provider=name, e2b=E2BConfig(api_url=url, sandbox_url=url)),
            live=lambda: len(front_end.all()),
            creates=lambda: seen.count("POST /v2/sandboxes"),
            break_create=lambda status=BROKEN, **more: faults.plan("POST", "/v2/sandboxes", status, **more),
            break_delete=lambda status=BROKEN, **more: faults.plan("DELETE", "/sandboxes/.*", status, **more),
            forget_faults=faults.plans.clear,
            nowhere={"e2b": E2BConfig(api_url="http://127.0.0.1:9", sandbox_url="http://127.0.0.1:9")},
        )
        await front_end.aclose()
        await runner.cleanup()


@asynccontextmanager
async def daytona_stand(name: str) -> AsyncIterator[Stand]:
    from fake_daytona import FakeDaytona

    os.environ["DAYTONA_API_KEY"] = KEY
    async with local() as provider:
        fake = FakeDaytona(provider)
        runner = await fake.start()
        yield Stand(
            config=SandboxConfig(provider=name, daytona=DaytonaConfig(api_url=f"{fake.url}/api")),
            live=lambda: len(fake.machines),
            creates=lambda: fake.requests.count("POST /api/sandbox"),
            break_create=lambda status=BROKEN, **more: fake.faults.plan("POST", "/api/sandbox", status, **more),
            break_delete=lambda status=BROKEN, **more: fake.faults.plan("DELETE", "/api/sandbox/.*", status, **more),
            forget_faults=fake.faults.plans.clear,
            nowhere={"daytona": DaytonaConfig(api_url="http://127.0.0.1:9/api")},
        )
        await runner.cleanup()


@asynccontextmanager
async def modal_stand(name: str) -> AsyncIterator[Stand]:
    from fake_modal import FakeModal
    from grpclib import Status

    codes = {RATE: Status.RESOURCE_EXHAUSTED.value, BROKEN: Status.INTERNAL.value, None: None}
    async with local() as provider:
        fake = FakeModal(provider)
        server = await fake.start()
        os.environ.update(MODAL_SERVER_URL=fake.url, MODAL_TOKEN_ID="ak-1", MODAL_TOKEN_SECRET="as-1")

        def plan(call: str, status: int | None = BROKEN, *, headers: object = None, **more: object) -> None:
            fake.faults.plan("rpc", call, codes[status], **more)

        yield Stand(
            config=SandboxConfig(provider=name),
            live=lambda: len(fake.machines),
            creates=lambda: fake.creates,
            break_create=lambda status=BROKEN, **more: plan("create", status, **more),
            break_delete=lambda status=BROKEN, **more: plan("delete", status, **more),
            forget_faults=fake.faults.plans.clear,
            sdk_tries=4,
        )
        server.close()
        await server.wait_closed()


STANDS = {"e2b": e2b_stand, "agentenv": e2b_stand, "daytona": daytona_stand, "modal": modal_stand}


def spec(**more: object) -> SandboxSpec:
    return SandboxSpec(ttl_s=120, labels={"suite": "faults"}, **more)  # type: ignore[arg-type]


# -- faults ----------------------------------------------------------------------------------------


async def a_burst_of_429_is_waited_out(stand: Stand) -> None:
    before = stand.creates()
    stand.break_create(RATE, times=2, headers={"Retry-After": "1"})
    async with stand.provider() as provider:
        started = time.monotonic()
        sandbox = await provider.create(spec())
        assert time.monotonic() - started >= 1, "it did not wait as the service asked"
        assert (await sandbox.exec(["echo", "x"], timeout_s=20)).stdout == b"x\n"
    assert stand.creates() - before == 3, f"{stand.creates() - before} requests for one create"


async def lasting_429_is_rate_limited(stand: Stand) -> None:
    before = stand.creates()
    stand.break_create(RATE, times=50)
    async with stand.provider(create_attempts=2) as provider:
        await expect(RateLimited, provider.create(spec()))
    assert stand.creates() - before == 2, f"{stand.creates() - before} requests: retries are nested"


async def a_broken_create_is_tried_again(stand: Stand) -> None:
    stand.break_create(BROKEN, times=1)
    async with stand.provider() as provider:
        assert (await (await provider.create(spec())).exec(["echo", "x"], timeout_s=20)).stdout == b"x\n"


async def lasting_failures_end(stand: Stand) -> None:
    before = stand.creates()
    stand.break_create(BROKEN, times=50)
    async with stand.provider() as provider:
        await expect(CreateFailed, provider.create(spec()))
    most = 3 * stand.sdk_tries
    assert stand.creates() - before == most, f"{stand.creates() - before} requests for three tries"


async def a_lost_answer_leaves_nothing(stand: Stand) -> None:
    stand.break_create(BROKEN, times=50, late=True)
    async with stand.provider(create_attempts=2) as provider:
        await expect(CreateFailed, provider.create(spec()))
        stand.forget_faults()


async def a_cancelled_slow_create_leaves_nothing(stand: Stand) -> None:
    stand.break_create(None, times=1, delay_s=1.5)
    async with stand.provider() as provider:
        creating = asyncio.create_task(provider.create(spec()))
        await asyncio.sleep(0.5)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        assert creating.cancelled()


async def a_create_that_takes_too_long_leaves_nothing(stand: Stand) -> None:
    stand.break_create(None, times=1, delay_s=3)
    async with stand.provider(create_timeout_s=1) as provider:
        await expect(CreateFailed, provider.create(spec()))


async def a_failed_setup_leaves_nothing(stand: Stand) -> None:
    async with stand.provider() as provider:
        await expect(BadRequest, provider.create(spec(files={"a": b"", "a/b": b""})))
        assert stand.live() == 0, "the half-made sandbox is still there"


async def a_stuck_delete_does_not_block_and_ends(stand: Stand) -> None:
    stand.break_delete(BROKEN, times=2)
    async with stand.provider(kill_timeout_s=5) as provider:
        sandbox = await provider.create(spec())
        started = time.monotonic()
        await sandbox.kill()
        assert time.monotonic() - started < 15
    assert stand.live() == 0, "it was given up"


async def a_service_out_of_reach_is_told(stand: Stand) -> None:
    if not stand.nowhere:
        return
    async with stand.provider(**stand.nowhere, create_attempts=1, create_timeout_s=30) as provider:
        await expect(SandboxError, provider.create(spec()))


async def a_killed_machine_is_gone(stand: Stand) -> None:
    async with stand.provider() as first, stand.provider() as second:
        sandbox = await first.create(spec())
        await (await second.attach(sandbox.id)).kill()
        try:
            await sandbox.exec(["true"], timeout_s=20)
        except SandboxError as error:
            assert error.code == "sandbox_gone", repr(error)
        else:
            raise AssertionError("a machine that somebody else deleted still answers")


FAULTS: tuple[Callable[[Stand], Awaitable[None]], ...] = (
    a_burst_of_429_is_waited_out,
    lasting_429_is_rate_limited,
    a_broken_create_is_tried_again,
    lasting_failures_end,
    a_lost_answer_leaves_nothing,
    a_cancelled_slow_create_leaves_nothing,
    a_create_that_takes_too_long_leaves_nothing,
    a_failed_setup_leaves_nothing,
    a_stuck_delete_does_not_block_and_ends,
    a_service_out_of_reach_is_told,
    a_killed_machine_is_gone,
)


async def expect(kind: type[Exception], call: Awaitable[object]) -> None:
    try:
        made = await call
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}, got {made!r}")


async def main(name: str, only: list[str]) -> dict[str, object]:
    checks: dict[str, str | None] = {}
    async with STANDS[name](name) as stand:
        async with stand.provider() as provider:
            stand_in, caps = provider.stand_in, sorted(provider.caps)
            async for outcome in conformance.stream(provider, only):
                checks[outcome.name] = outcome.error
        for fault in FAULTS:
            if only and fault.__name__ not in only:
                continue
            stand.forget_faults()
            try:
                async with asyncio.timeout(90):
                    await fault(stand)
                error = None if stand.live() == 0 else f"{stand.live()} machines are left at the service"
            except Exception as problem:  # what went wrong is the result
                error = f"{type(problem).__name__}: {problem}"
            checks[f"fault: {fault.__name__}"] = error
    return {"provider": name, "stand_in": stand_in, "caps": caps, "checks": checks}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2:]))))
