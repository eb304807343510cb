"""``tollway sandbox``: check a provider, find and end leftovers, run one command in a fresh sandbox.

Parses, opens the provider that the configuration or the call names, calls ``tollway.sandboxes``, and prints. A
further subcommand is one ``add_action`` line in ``add_arguments``. Imports what it needs when it runs, because every
command parses this one's arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tollway import cli_serve_e2b, telemetry
from tollway.cli_actions import add_action, cut_line, run_action
from tollway.errors import ConfigError
from tollway.settings import Settings

if TYPE_CHECKING:
    from tollway.sandboxes.base import ExecResult, SandboxProvider
    from tollway.sandboxes.config import SandboxConfig
    from tollway.sandboxes.reap import Leftover

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = "check a sandbox provider, list or reap what it holds, run one command in a fresh sandbox"
EXIT_FAILED, EXIT_TIMEOUT = 1, 124
_LABELS = {"made-by": "tollway-sandbox-run"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Subcommands and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    check = add_action(actions, "check", _check, "run the conformance suite against a provider: one line per promise")
    check.add_argument("provider", nargs="?", help="local, fake, an installed name, or module:Class")
    check.add_argument("--only", action="append", default=[], metavar="NAME", help="only this check (may repeat)")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

    listed = add_action(actions, "list", _list, "list what a provider holds, of all processes and hosts")
    reap = add_action(
        actions, "reap", _reap, "end sandboxes of dead owners on this host, or what --label/--older-than say"
    )
    reap.add_argument("--older-than", type=float, metavar="SECONDS", help="whatever is older, its owner alive or not")
    for command in (listed, reap):
        command.add_argument("--provider", metavar="NAME", help="default: sandbox.provider")
        command.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="only with this label")
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")

    once = add_action(actions, "run", _run, "run one command in a fresh sandbox; its exit status is this one's")
    once.add_argument(
        "words", nargs="+", metavar="COMMAND", help="program and arguments, after --; one word alone goes through sh -c"
    )
    once.add_argument("--provider", metavar="NAME", help="default: sandbox.provider")
    once.add_argument("--image", metavar="NAME", help="image, template or snapshot of the provider")
    once.add_argument("--tree", type=Path, metavar="DIR", help="start with a copy of this directory")
    once.add_argument("--network", action="store_true", help="with the open network (default: none)")
    once.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="default: 300")

    cli_serve_e2b.add_arguments(add_action(actions, "serve-e2b", cli_serve_e2b.run, cli_serve_e2b.DESCRIPTION))


def run(arguments: argparse.Namespace) -> int:
    """Do it; the exit status."""
    return run_action(arguments)


def _config(settings: Settings, provider: str | None) -> SandboxConfig:
    return settings.sandbox.model_copy(update={"provider": provider}) if provider else settings.sandbox


def _labels(pairs: Sequence[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--label {pair!r}: want KEY=VALUE")
        labels[key] = value
    return labels


# -- check ----------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace, settings: Settings) -> int:
    from tollway.sandboxes.conformance import CHECKS, name_of

    known = [name_of(check) for check in CHECKS]
    for name in arguments.only:
        if name not in known:
            raise ConfigError(f"--only {name}: no such check; known: {', '.join(known)}")
    telemetry.configure("ERROR", component="sandbox")
    return asyncio.run(_checked(_config(settings, arguments.provider), arguments.only, as_json=arguments.json))


async def _checked(config: SandboxConfig, only: Sequence[str], *, as_json: bool) -> int:
    from tollway.sandboxes.base import SandboxSpec
    from tollway.sandboxes.conformance import stream
    from tollway.sandboxes.registry import open_provider

    outcomes = []
    async with open_provider(config) as provider:
        # Where nothing can be made at all, that is the answer, not one line per promise.
        await (await provider.create(SandboxSpec(ttl_s=60, labels={"suite": "first-look"}))).kill()
        if not as_json:
            print(_title(provider))
        async for outcome in stream(provider, only):
            outcomes.append(outcome)
            if not as_json:
                verdict = "FAIL" if outcome.error is not None else "-" if outcome.skipped else "ok"
                note = f" [{outcome.skipped}]" if outcome.skipped else ""
                line = f"{verdict:4} {outcome.seconds:6.1f} s  {outcome.name:40} {outcome.promise}{note}"
                print(cut_line(line), flush=True)
                if outcome.error is not None:
                    print(f"                {outcome.error}", flush=True)
        failed = sum(outcome.error is not None for outcome in outcomes)
        skipped = sum(outcome.skipped is not None for outcome in outcomes)
        passed = len(outcomes) - failed - skipped
        if as_json:
            checks = [
                {
                    "name": each.name,
                    "promise": each.promise,
                    "error": each.error,
                    "skipped": each.skipped,
                    "seconds": round(each.seconds, 3),
                }
                for each in outcomes
            ]
            head = {"provider": config.provider, "stand_in": provider.stand_in or None, "caps": sorted(provider.caps)}
            print(json.dumps({**head, "passed": passed, "failed": failed, "skipped": skipped, "checks": checks}))
        else:
            print(f"{passed} promises kept, {failed} broken, {skipped} not claimed: {_title(provider)}")
    return EXIT_FAILED if failed else 0


def _title(provider: SandboxProvider) -> str:
    note = f" (FAKE: {provider.stand_in})" if provider.stand_in else ""
    return f"{provider.name}{note}; capabilities: {', '.join(sorted(provider.caps)) or 'none'}"


# -- list and reap --------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace, settings: Settings) -> int:
    async def work(provider: SandboxProvider) -> tuple[Leftover, ...]:
        from tollway.sandboxes.reap import find

        return await find(provider, _labels(arguments.label))

    found = asyncio.run(_at(_config(settings, arguments.provider), work))
    _show(found, "live", as_json=arguments.json)
    return 0


def _reap(arguments: argparse.Namespace, settings: Settings) -> int:
    async def work(provider: SandboxProvider) -> tuple[Leftover, ...]:
        from tollway.sandboxes.reap import reap

        return await reap(provider, _labels(arguments.label), older_than_s=arguments.older_than)

    ended = asyncio.run(_at(_config(settings, arguments.provider), work))
    _show(ended, "ended", as_json=arguments.json)
    return EXIT_FAILED if any(each.error for each in ended) else 0


async def _at(
    config: SandboxConfig, work: Callable[[SandboxProvider], Awaitable[tuple[Leftover, ...]]]
) -> tuple[Leftover, ...]:
    from tollway.sandboxes.registry import open_provider

    async with open_provider(config) as provider:
        return await work(provider)


def _show(found: Sequence[Leftover], word: str, *, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "id": each.info.id,
                "labels": dict(each.info.labels),
                "age_s": each.age_s,
                "expires_in_s": each.info.expires_in_s,
                "owner": each.owner,
                "error": each.error,
            }
            for each in found
        ]
        print(json.dumps(rows))
        return
    for each in found:
        age = "?" if each.age_s is None else f"{each.age_s:.0f}"
        labels = " ".join(f"{key}={value}" for key, value in sorted(each.info.labels.items()))
        print(f"{each.info.id}  owner {each.owner}  age {age} s  ttl {each.info.expires_in_s:.0f} s  {labels}")
        if each.error is not None:
            print(f"    not ended: {each.error}")
    print(f"{len(found)} {word}")


# -- run ------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace, settings: Settings) -> int:
    telemetry.configure(settings.run.log_level, component="sandbox")
    done = asyncio.run(_ran(arguments, _config(settings, arguments.provider)))
    for stream, data in ((sys.stdout, done.stdout), (sys.stderr, done.stderr)):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
            stream.buffer.write(data)
            stream.buffer.flush()
    if done.truncated:
        print("tollway: output was cut at sandbox.max_output_bytes", file=sys.stderr)
    if done.exit_code is None:
        print(f"tollway: stopped after {arguments.timeout:g} s", file=sys.stderr)
        return EXIT_TIMEOUT
    return done.exit_code


async def _ran(arguments: argparse.Namespace, config: SandboxConfig) -> ExecResult:
    from tollway.sandboxes.base import SandboxSpec
    from tollway.sandboxes.registry import open_provider

    command = arguments.words[0] if len(arguments.words) == 1 else arguments.words
    spec = SandboxSpec(
        ttl_s=arguments.timeout + 60,
        labels=_LABELS,
        image=arguments.image,
        tree=arguments.tree,
        network="public" if arguments.network else "none",
    )
    async with open_provider(config) as provider:
        sandbox = await provider.create(spec)
        return await sandbox.exec(command, timeout_s=arguments.timeout)
