"""``tollway`` and ``python -m tollway``: the command line. Until it is read in, Ctrl-C ends the process at once."""

import sys

from tollway.interrupts import EndingAtOnce, end_at_once

__all__ = ["main"]


def main() -> int:
    """Run one command and return its exit status."""
    with EndingAtOnce():
        from tollway.cli import main as run

        status = run()
    end_at_once()
    return status


if __name__ == "__main__":
    sys.exit(main())
