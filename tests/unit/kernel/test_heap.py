"""Large buffers that come and go stay with the process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, sys
from tollway.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    [bytearray(200_000) for _ in range(8)]  # as a reply of 1.6 MB arrives
before = faults()
for _ in range(50):
    [bytearray(200_000) for _ in range(8)]  # as a reply of 1.6 MB arrives
print(faults() - before)
"""


def test_buffers_that_are_freed_and_taken_again_cost_no_page_faults() -> None:
    """A process of its own: the setting is for the whole process, and for good."""

    def run(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert run("keep") < 1000
    assert run("leave") > 2000


QUIET = """
import gc
from tollway import heap
heap.settle()
full = 0
def count(phase, info):
    global full
    full += phase == "start" and info["generation"] == 2
gc.callbacks.append(count)
heap.collect_if_due()
assert full == 0, "nothing was made yet"
for _ in range(120):  # more young collections than make a full one due
    gc.collect(0)
assert full == 0
heap.collect_if_due()
print(full)
"""


def test_full_collections_wait_for_a_quiet_moment_and_for_something_to_do() -> None:
    """Also in a process of its own: freezing is for the whole process."""
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 1
