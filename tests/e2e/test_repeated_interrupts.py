"""Signals that come twice, or late: the work is cut short once, and nothing is shown or lost that was not asked for."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import asyncio, sys, time
from tollway.app import run_to_end

def say(text):
    print(text, flush=True)

async def work():
    try:
{body}
    finally:
        say("released")
    return "its result"

try:
    say(run_to_end(work()))
except KeyboardInterrupt:
    say("stopped")
"""
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def program(body: str) -> subprocess.Popen[str]:
    """A process that runs ``body`` as a command runs its work: cancelled by a signal."""
    code = PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), " " * 8))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@BOTH
def test_a_second_signal_cuts_what_the_first_one_waits_for(number: signal.Signals) -> None:
    body = """
    say("up")
    try:
        await asyncio.sleep(3600)
    finally:
        say("ending")
        await asyncio.sleep(3600)
    """
    with program(body) as process:
        assert said(process) == "up\n"
        process.send_signal(number)
        assert said(process) == "ending\n"
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("released\nstopped\n", "")


@BOTH
def test_a_signal_that_comes_when_the_work_is_done_takes_nothing_away(number: signal.Signals) -> None:
    """Here the event loop still waits for a thread."""
    body = """
    task = asyncio.current_task()
    def linger():
        while not task.done():
            time.sleep(0.01)
        say("done")
        sys.stdin.read()
    asyncio.get_running_loop().run_in_executor(None, linger)
    """
    with program(body) as process:
        assert (said(process), said(process)) == ("released\n", "done\n")
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("its result\n", "")


@BOTH
def test_what_holds_up_the_event_loop_is_broken_off_by_whoever_insists(number: signal.Signals) -> None:
    with program("say('up'); time.sleep(3600)") as process:
        assert said(process) == "up\n"
        assert process.stdout is not None
        while not select.select([process.stdout], [], [], 0.3)[0]:
            process.send_signal(number)
        assert process.communicate(timeout=60) == ("released\nstopped\n", "")
