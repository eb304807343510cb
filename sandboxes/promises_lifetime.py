"""Checks of how sandboxes begin, are found, live on and end. Depends on ``promises``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable

from tollway.errors import BadImage, BadRequest, SandboxGone
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.sandboxes.owner import owner_of
from tollway.sandboxes.promises import EXEC_S, LABELS, Check, opened, refuses, spec, want

__all__ = ["CHECKS"]


async def list_and_attach_find_live_ones(provider: SandboxProvider) -> None:
    """All wanted labels select, labels are kept, kill removes."""
    run = secrets.token_hex(6)
    async with opened(provider, labels={"run": run, "mark": "a"}) as sandbox:
        async with opened(provider, labels={"run": run, "mark": "b"}) as other:
            found = await provider.list({"run": run, "mark": "a"})
            want([info.id for info in found] == [sandbox.id], "list selects by all labels", found)
            want(found[0].labels.get("suite") == "conformance", "labels are kept", found[0].labels)
            want(0 < found[0].expires_in_s <= 301, "list says how long it lives", found[0].expires_in_s)
            want(len(await provider.list({"run": run})) == 2, "list finds everything with the label", found)
            want(await provider.list({"run": run, "mark": "c"}) == (), "another value selects nothing")
            owner = owner_of(found[0].labels)
            want(owner is not None and owner.is_here and not owner.is_dead, "a label names the owner", found[0].labels)
        again = await provider.attach(sandbox.id)
        want(again.id == sandbox.id, "attach finds a live sandbox", again.id)
        await refuses(provider.attach(other.id), SandboxGone, "attaching to a killed sandbox is SandboxGone")
    want(await provider.list({"run": run}) == (), "killed sandboxes are not listed")
    want(await provider.list(LABELS) == (), "killed sandboxes are not listed")


async def an_unknown_image_is_told(provider: SandboxProvider) -> None:
    """``BadImage``, which nobody tries again."""
    call = provider.create(spec(image="no-such-image-of-the-suite:none"))
    await refuses(_killed(call), BadImage, "an unknown image is BadImage")


async def _killed(creating: Awaitable[Sandbox]) -> Sandbox:
    sandbox = await creating
    await sandbox.kill()
    return sandbox


async def a_failed_setup_leaves_nothing(provider: SandboxProvider) -> None:
    """A create whose files cannot be written raises, and what it made is gone."""
    mark = {"mark": secrets.token_hex(6)}
    call = provider.create(spec(labels=mark, files={"ok": b"", "../out": b"x"}))
    await refuses(_killed(call), BadRequest, "a file of the spec outside the workspace is BadRequest")
    want(await provider.list(mark) == (), "a sandbox whose setup failed is gone")


async def a_cancelled_create_leaves_nothing(provider: SandboxProvider) -> None:
    """Cancelled at several moments; whatever was made meanwhile is killed."""
    mark = {"mark": secrets.token_hex(6)}
    before = provider.live
    for delay_s in (0.0, 0.005, 0.05, 0.3):
        creating = asyncio.create_task(provider.create(spec(labels=mark)))
        await asyncio.sleep(delay_s)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        if not creating.cancelled():
            await creating.result().kill()
    async with asyncio.timeout(EXEC_S):
        while await provider.list(mark) or provider.live > before:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)


async def many_live_at_once(provider: SandboxProvider) -> None:
    """Twenty sandboxes, made and used together, each with its own files."""
    count = min(20, provider.config.max_live)
    sandboxes = await asyncio.gather(*(provider.create(spec(files={"n": b"%d" % n})) for n in range(count)))
    try:
        want(len({sandbox.id for sandbox in sandboxes}) == count, "ids are unique")
        done = await asyncio.gather(*(sandbox.exec(["cat", "n"], timeout_s=EXEC_S * 2) for sandbox in sandboxes))
        want([each.stdout for each in done] == [b"%d" % n for n in range(count)], "nothing is mixed up", done)
    finally:
        await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))


async def kill_is_final_and_idempotent(provider: SandboxProvider) -> None:
    """Twice, at the same time, and everything afterwards is SandboxGone."""
    async with opened(provider) as sandbox:
        await asyncio.gather(sandbox.kill(), sandbox.kill())
        await sandbox.kill()
        for call in (
            sandbox.exec(["true"], timeout_s=5),
            sandbox.read("x"),
            sandbox.write("x", b""),
            sandbox.extend(5),
            provider.attach(sandbox.id),
        ):
            await refuses(call, SandboxGone, "a killed sandbox answers SandboxGone")


async def kill_ends_running_commands(provider: SandboxProvider) -> None:
    """A command in flight ends with SandboxGone, soon."""
    async with opened(provider) as sandbox:
        running = asyncio.create_task(sandbox.exec(["sleep", "600"], timeout_s=600))
        await asyncio.sleep(0.5)
        await sandbox.kill()
        async with asyncio.timeout(EXEC_S):
            await refuses(running, SandboxGone, "a command of a killed sandbox raises SandboxGone")


async def ttl_ends_it_and_extend_keeps_it(provider: SandboxProvider) -> None:
    """The reaper needs nobody's help."""
    run = secrets.token_hex(6)
    async with (
        opened(provider, ttl_s=1.5, labels={"run": run, "mark": "dies"}) as dies,
        opened(provider, ttl_s=60.0, labels={"run": run, "mark": "lives"}) as lives,
    ):
        await lives.extend(300)
        left = (await provider.list({"run": run, "mark": "lives"}))[0].expires_in_s
        want(left > 60, "extend moves the end", left)
        await lives.extend(1)
        async with asyncio.timeout(EXEC_S):
            while await provider.list({"run": run, "mark": "dies"}):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)
        want(len(await provider.list({"run": run, "mark": "lives"})) == 1, "extend never shortens a life")
        await refuses(dies.exec(["true"], timeout_s=5), SandboxGone, "a sandbox past its ttl is SandboxGone")


CHECKS: tuple[Check, ...] = (
    list_and_attach_find_live_ones,
    an_unknown_image_is_told,
    a_failed_setup_leaves_nothing,
    a_cancelled_create_leaves_nothing,
    many_live_at_once,
    kill_is_final_and_idempotent,
    kill_ends_running_commands,
    ttl_ends_it_and_extend_keeps_it,
)
