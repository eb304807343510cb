"""What a command harness is made of: its files in the sandbox, its command, and the names that templates know.

Values only, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["HOME", "WORKSPACE", "Kit", "Place", "Recipe", "fill"]

WORKSPACE = "/workspace"
"""The task's files, as every provider has them."""
HOME = "/tmp/tollway"  # noqa: S108 - the sandbox's own
"""Home directory of a harness: outside of the workspace, so that its own files are none of the task's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """What a harness needs its sandbox to have."""

    mounts: Mapping[str, Path] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    """Directories that come first on PATH."""
    mem_mb: int = 0
    pids: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one run is told. The fields and properties are the names that templates know."""

    base_url: str
    """Without ``/v1``."""
    token: str = field(repr=False)
    model: str
    context_tokens: int
    instruction: str
    workspace: str = WORKSPACE
    home: str = HOME

    @property
    def openai_base_url(self) -> str:
        """What OpenAI clients call a base URL."""
        return f"{self.base_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """What Anthropic clients call a base URL."""
        return self.base_url

    @property
    def instruction_file(self) -> str:
        """File with the instruction, for those that are too long for an argument."""
        return f"{self.home}/instruction.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One run: templates of its arguments, its variables and its files, by path."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    takes_arguments: bool = False
    """Whether ``env.command.argv`` comes behind ``argv``; otherwise ``recipe`` has put it where it belongs."""


_NAMES = (
    "base_url",
    "openai_base_url",
    "anthropic_base_url",
    "token",
    "model",
    "context_tokens",
    "instruction_file",
    "instruction",
    "workspace",
    "home",
)
_KNOWN = re.compile("{(" + "|".join(_NAMES) + ")}")


def fill(template: str, place: Place) -> str:
    """``template`` with the known names in braces replaced, once: what they bring in is not looked at again.

    >>> place = Place(base_url="http://m", token="t", model="p", context_tokens=1, instruction="say {token}")
    >>> fill('{"url": "{openai_base_url}", "task": "{instruction}"}', place)
    '{"url": "http://m/v1", "task": "say {token}"}'
    """
    return _KNOWN.sub(lambda match: str(getattr(place, match.group(1))), template)
