"""Rules that hold for every test."""

from __future__ import annotations

import os

# One thread per process: on a loaded machine a second one makes single steps many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
