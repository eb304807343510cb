"""``tollway cache``: its arguments, and how it is shown. ``cache_view`` draws it.

Imports what it needs when it runs, because every command parses this one's arguments.
"""

from __future__ import annotations

import argparse
import os
import sys

from tollway.errors import ConfigError
from tollway.settings import ADMIN_KEY_VARIABLE

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = (
    "show a running server's prefix cache and why tokens missed it; the admin key comes from TOLLWAY_ADMIN_KEY"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--url", help="address of the server (default: server.host and server.port)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="keep it on the screen (default in a terminal)")
    how.add_argument("--once", action="store_true", help="print it once (default elsewhere)")
    how.add_argument("--json", action="store_true", help="print the answer of GET /cache")


def run(arguments: argparse.Namespace, url: str) -> int:
    """Show the figures of the server at ``url``; returns the exit status. Raises ``ConfigError`` without a key."""
    from tollway.cache_view import show_cache

    if not (key := os.environ.get(ADMIN_KEY_VARIABLE)):
        raise ConfigError(f"set {ADMIN_KEY_VARIABLE} to the server's admin key: it alone may see the figures")
    watch = arguments.watch or (sys.stdout.isatty() and not arguments.once)
    return show_cache(url, key, watch=watch, as_json=arguments.json)
