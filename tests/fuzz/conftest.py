"""Lets the fuzz tests use the session server tests' vocabularies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "session_server"))
