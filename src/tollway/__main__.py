"""``python -m tollway`` is the command line."""

import sys

from tollway.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
