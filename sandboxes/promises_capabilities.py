"""Checks of limits and of optional capabilities: what ``caps`` names works, what it does not name is refused.

Depends on ``promises``.
"""

from __future__ import annotations

import asyncio
import secrets

from tollway.errors import BadRequest, CapabilityMissing, SandboxError, SandboxGone
from tollway.sandboxes.base import CAPABILITIES, ExecResult, Sandbox, SandboxProvider
from tollway.sandboxes.promises import EXEC_S, NOT_CLAIMED, Check, opened, refuses, spec, want

__all__ = ["CHECKS"]

_ROUTES = "cat /proc/net/route /proc/net/ipv6_route"
_CONNECT = """
for host in 1.1.1.1 9.9.9.9; do
  python3 -c "import socket; socket.create_connection(('$host', 443), 3)" && exit 0
  curl -s -m 3 -o /dev/null -k "https://$host/" && exit 0
  wget -q -T 3 -t 1 -O /dev/null "http://$host/" && exit 0
done
exit 1
"""


async def capabilities_are_known(provider: SandboxProvider) -> None:
    """``caps`` holds known names only."""
    want(provider.caps <= CAPABILITIES, "capabilities are those of the protocol", provider.caps - CAPABILITIES)


async def missing_capabilities_are_typed(provider: SandboxProvider) -> None:
    """What ``caps`` does not name raises ``CapabilityMissing``, nothing else, and makes nothing."""
    async with opened(provider) as sandbox:
        for name, optional in (
            ("snapshot", sandbox.snapshot),
            ("pause", sandbox.pause),
            ("pause", sandbox.resume),
            ("fork", sandbox.fork),
        ):
            if name not in provider.caps:
                promise = f"{optional.__name__} without the capability raises CapabilityMissing"
                await refuses(optional(), CapabilityMissing, promise)
    before = provider.live
    if "public_network" not in provider.caps:
        await refuses(provider.create(spec(network="public")), CapabilityMissing, "network='public' needs its cap")
    if "network_hosts" not in provider.caps:
        call = provider.create(spec(network=("example.org",)))
        await refuses(call, CapabilityMissing, "a list of hosts needs its cap")
    want(provider.live == before, "a refused create makes nothing", provider.live)


async def network_none_is_none(provider: SandboxProvider) -> None:
    """Without a route nothing gets out; with one, no connection does."""
    async with opened(provider) as sandbox:
        done = await sandbox.exec(_ROUTES, timeout_s=EXEC_S)
        lines = done.stdout.decode("ascii", "replace").splitlines()
        routed = [line for line in lines if not line.startswith("Iface") and line.split()[-1:] != ["lo"]]
        if done.exit_code == 0 and not [line for line in routed if line.split()[0] != "lo"]:
            return
        done = await sandbox.exec(_CONNECT, timeout_s=EXEC_S)
        want(done.exit_code != 0, "network 'none' reaches nothing", done)


async def public_network_can_be_had(provider: SandboxProvider) -> str | None:
    """Capability ``public_network``: a sandbox with it is made and works."""
    if "public_network" not in provider.caps:
        return NOT_CLAIMED
    async with opened(provider, network="public") as sandbox:
        done = await sandbox.exec(["echo", "on"], timeout_s=EXEC_S)
        want(done.stdout == b"on\n", "a sandbox with network works", done)
    return None


async def hosts_can_be_allowed(provider: SandboxProvider) -> str | None:
    """Capability ``network_hosts``: a sandbox with a list of hosts is made and reaches no others."""
    if "network_hosts" not in provider.caps:
        return NOT_CLAIMED
    async with opened(provider, network=("example.org",)) as sandbox:
        done = await sandbox.exec(_CONNECT, timeout_s=EXEC_S)
        want(done.exit_code != 0, "hosts that are not named are not reached", done)
    return None


async def a_snapshot_starts_others(provider: SandboxProvider) -> str | None:
    """Capability ``snapshot``: its name is an image; the copy is independent."""
    if "snapshot" not in provider.caps:
        return NOT_CLAIMED
    async with opened(provider, files={"f": b"before"}) as sandbox:
        image = await sandbox.snapshot()
        await sandbox.write("f", b"after")
        async with opened(provider, image=image) as copy:
            want(await copy.read("f") == b"before", "a snapshot holds the state at its time")
            await copy.write("f", b"copy")
        want(await sandbox.read("f") == b"after", "the original goes its own way")
    return None


async def a_fork_starts_from_the_state(provider: SandboxProvider) -> str | None:
    """Capability ``fork``: a second sandbox, independent, listed and killed like any other."""
    if "fork" not in provider.caps:
        return NOT_CLAIMED
    run = {"run": secrets.token_hex(6)}
    async with opened(provider, files={"f": b"one"}, labels=run) as sandbox:
        await sandbox.write("f", b"two")
        twin = await sandbox.fork()
        try:
            want(twin.id != sandbox.id, "a fork has its own id", twin.id)
            want(await twin.read("f") == b"two", "a fork holds the state at its time")
            await twin.write("f", b"three")
            want(await sandbox.read("f") == b"two", "the original does not see what its fork writes")
            want(len(await provider.list(run)) == 2, "a fork is listed with its labels")
        finally:
            await twin.kill()
        want(await sandbox.read("f") == b"two", "the original survives its fork")
    return None


async def a_pause_keeps_the_state(provider: SandboxProvider) -> str | None:
    """Capability ``pause``: after ``resume`` files are there and commands run."""
    if "pause" not in provider.caps:
        return NOT_CLAIMED
    async with opened(provider, files={"f": b"kept"}) as sandbox:
        await sandbox.pause()
        await sandbox.resume()
        done = await sandbox.exec(["cat", "f"], timeout_s=EXEC_S)
        want(done.stdout == b"kept", "a resumed sandbox has its files", done)
    async with opened(provider) as sandbox:
        await sandbox.pause()
        await sandbox.kill()
        await refuses(sandbox.resume(), SandboxGone, "a paused sandbox can be killed")
    return None


async def others_can_attach(provider: SandboxProvider) -> str | None:
    """Capability ``attach``: another provider object finds, uses and kills it, and leaves it alone otherwise."""
    if "attach" not in provider.caps:
        return NOT_CLAIMED
    run = {"run": secrets.token_hex(6)}
    async with opened(provider, labels=run, files={"f": b"x"}) as sandbox:
        async with type(provider)(provider.config) as second:
            found = await second.list(run)
            want([info.id for info in found] == [sandbox.id], "others list it by its labels", found)
            again = await second.attach(sandbox.id)
            want(await again.read("f") == b"x", "others see its files")
            done = await again.exec(["echo", "hi"], timeout_s=EXEC_S)
            want(done.stdout == b"hi\n", "others run commands in it", done)
            await again.extend(200)
        want(await sandbox.read("f") == b"x", "closing another provider does not end it")
        async with type(provider)(provider.config) as third:
            await (await third.attach(sandbox.id)).kill()
            want(await third.list(run) == (), "others can kill it")
            await refuses(third.attach(sandbox.id), SandboxGone, "what is gone cannot be attached to")
    return None


async def users_can_be_chosen(provider: SandboxProvider) -> str | None:
    """Capability ``user``: a command runs as the user that its call names."""
    if "user" not in provider.caps:
        return NOT_CLAIMED
    async with opened(provider) as sandbox:
        done = await sandbox.exec(["id", "-un"], user="root", timeout_s=EXEC_S)
        want(done.stdout.strip() == b"root", "a command runs as the user that was asked for", done)
    return None


async def memory_is_limited(provider: SandboxProvider) -> str | None:
    """Capability ``memory_limit``: a command that takes ever more ends, and the sandbox goes on."""
    if "memory_limit" not in provider.caps:
        return NOT_CLAIMED
    async with opened(provider, mem_mb=128) as sandbox:
        # One line without an end: tail keeps it whole in memory.
        done = await sandbox.exec("head -c 20000000 /dev/zero | tail | wc -c", timeout_s=EXEC_S)
        want(done.stdout.strip() == b"20000000", "a command may use what it was given", done)
        done = await sandbox.exec("tail /dev/zero", timeout_s=EXEC_S)
        want(done.exit_code not in (0, None), "a command that takes all memory ends", done)
        await _goes_on(sandbox)
    return None


async def processes_are_limited(provider: SandboxProvider) -> str | None:
    """Capability ``pids_limit``: the next process is refused, and the sandbox goes on."""
    if "pids_limit" not in provider.caps:
        return NOT_CLAIMED
    fill = "i=0; while [ $i -lt %d ]; do sleep %d & i=$((i+1)); done; echo all of them"
    async with opened(provider, pids=20) as sandbox:
        done = await sandbox.exec(fill % (5, 1), timeout_s=EXEC_S)
        want(b"all of them" in done.stdout, "five processes are allowed where pids=20", done)
        done = await sandbox.exec(fill % (300, 30), timeout_s=EXEC_S)
        want(b"all of them" not in done.stdout, "300 processes are not allowed where pids=20", done)
        await _goes_on(sandbox)
    return None


async def the_disk_is_limited(provider: SandboxProvider) -> str | None:
    """Capability ``disk_limit``: writing ends near ``disk_mb``, by an error or by the sandbox's end."""
    if "disk_limit" not in provider.caps:
        return NOT_CLAIMED
    fill = "for i in 1 2 3 4 5 6 7 8 9 10; do head -c 50000000 /dev/zero > fill$i || exit 1; done"
    async with opened(provider, disk_mb=32) as sandbox:
        done = await sandbox.exec("head -c 10000000 /dev/zero > some && cat some | wc -c", timeout_s=EXEC_S)
        want(done.stdout.strip() == b"10000000", "10 MB are allowed where disk_mb=32", done)
        try:
            await sandbox.exec(fill, timeout_s=EXEC_S)
            used = await sandbox.exec(["du", "-sk", "."], timeout_s=EXEC_S)
        except (SandboxError, BadRequest):
            return None
        want(int(used.stdout.split()[0]) < 256 * 1024, "500 MB are not allowed where disk_mb=32", used)
    return None


async def _goes_on(sandbox: Sandbox) -> None:
    done: ExecResult | None = None
    async with asyncio.timeout(EXEC_S):
        while done is None or done.exit_code != 0:  # what was killed may take a moment to go
            done = await sandbox.exec(["echo", "on"], timeout_s=EXEC_S)
    want(done.stdout == b"on\n", "the sandbox is usable afterwards", done)


CHECKS: tuple[Check, ...] = (
    capabilities_are_known,
    missing_capabilities_are_typed,
    network_none_is_none,
    public_network_can_be_had,
    hosts_can_be_allowed,
    a_snapshot_starts_others,
    a_fork_starts_from_the_state,
    a_pause_keeps_the_state,
    others_can_attach,
    users_can_be_chosen,
    memory_is_limited,
    processes_are_limited,
    the_disk_is_limited,
)
