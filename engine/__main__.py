"""``python -m tollway.engine``: the embedded engine without the rest of the command line.

Flags become an ``EngineConfig``; a ``ConfigError`` is one message on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys

from tollway import telemetry
from tollway.config import load, merge_overrides
from tollway.engine.config import EngineConfig
from tollway.engine.server import run
from tollway.errors import ConfigError, TollwayError

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the engine; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tollway.engine", description="Serve a small model on the CPU.")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other key of [engine]")
    arguments = parser.parse_args(argv)
    telemetry.configure(component="engine")
    given: dict[str, object] = {"model_path": arguments.model_path, "host": arguments.host, "port": arguments.port}
    tree = {key: value for key, value in given.items() if value is not None}
    tree = merge_overrides(tree, arguments.set)
    try:
        run(load(EngineConfig, tree, source="the command line"))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except TollwayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
