"""The checking process: one JSON object per line in, one per line out, within limits of its own.

Started by ``checker`` as a program. CPU time is bounded per line by the kernel, which ends the process when a
comparison takes more; memory likewise. Ends with its input.
"""

from __future__ import annotations

import json
import math
import resource
import sys

__all__ = ["main"]


def main() -> None:
    """Serve comparisons until the input ends."""
    cpu_s, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    from tollway.envs.maths.compare import same_answer

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Beyond the soft limit the kernel sends SIGXCPU, which ends a process that computes, even in C.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + cpu_s), hard))
        question = json.loads(line)
        try:
            equal, reason = same_answer(question["answer"], question["reference"], tolerance=question["tolerance"])
        except MemoryError:
            equal, reason = False, "too large to compare"
        sys.stdout.write(json.dumps({"equal": equal, "reason": reason}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
