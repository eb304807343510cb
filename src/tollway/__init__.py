"""Tollway: the gateway and trainer between agent harnesses and language-model reinforcement learning."""

import time

__version__ = "0.1.0"

STARTED_AT = time.time()
"""Unix seconds at which this process began to import the package, before anything heavy: its start, as runs count
it. The kernel's own start time would include a shell that was replaced by this program."""
