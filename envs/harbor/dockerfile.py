"""Reads a Dockerfile as far as it can be had without building: files to copy, variables, the working directory.

Anything that a build would have to run is named, with its line. Pure.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Copy", "Recipe", "read_dockerfile"]

_HARMLESS = frozenset(
    ["LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "HEALTHCHECK", "SHELL", "USER"]
)
"""About the image's own start, which no task uses: commands run by themselves. USER: everything runs as one user."""


@dataclass(frozen=True, slots=True)
class Copy:
    """``COPY``: sources below the build context, and an absolute destination."""

    sources: tuple[str, ...]
    target: str
    """Ends in "/" when it is a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a Dockerfile asks for."""

    base: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()
    problem: str = ""
    """Why it cannot be had without a build; empty when it can."""


def read_dockerfile(text: str) -> Recipe:
    """The recipe.

    >>> read_dockerfile("FROM debian:12\\nWORKDIR /app\\nCOPY . .").copies
    (Copy(sources=('.',), target='/app/'),)
    >>> read_dockerfile("FROM debian:12\\nRUN apt-get update").problem
    'line 2: RUN needs a build'
    """
    base: str | None = None
    workdir, env, copies = "/", dict[str, str](), list[Copy]()
    said_workdir: str | None = None
    for number, line in _instructions(text):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        if word == "FROM":
            if base is not None:
                return Recipe(base=base, problem=f"line {number}: a second stage needs a build")
            base = next((part for part in rest.split() if not part.startswith("--")), "")
        elif word == "WORKDIR":
            workdir = said_workdir = posixpath.normpath(posixpath.join(workdir, rest.strip("\"'")))
        elif word == "ENV":
            env |= _variables(rest)
        elif word in ("COPY", "ADD"):
            copy = _copy(rest, workdir)
            if isinstance(copy, str):
                return Recipe(base=base, problem=f"line {number}: {word} {copy}")
            copies.append(copy)
        elif word not in _HARMLESS:
            return Recipe(base=base, problem=f"line {number}: {word} needs a build")
    if base is None:
        return Recipe(problem="there is no FROM in it")
    return Recipe(base=base, workdir=said_workdir, env=env, copies=tuple(copies))


def _instructions(text: str) -> list[tuple[int, str]]:
    """Lines with what they continue on joined, each with the number of its first line."""
    found: list[tuple[int, str]] = []
    open_since = 0
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        goes_on = line.endswith("\\")
        line = line[:-1].rstrip() if goes_on else line
        if open_since:
            found[-1] = (open_since, f"{found[-1][1]} {line}")
        else:
            found.append((number, line))
        open_since = (open_since or number) if goes_on else 0
    return found


def _copy(rest: str, workdir: str) -> Copy | str:
    options = re.match(r"(?:--\S+\s+)*", rest)
    flags = options[0].split() if options else []
    if refused := [flag for flag in flags if not flag.startswith(("--chown", "--chmod", "--link"))]:
        return f"{refused[0]} needs a build"
    rest = rest[options.end() if options else 0 :]
    try:
        parts = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError:
        return "cannot be read"
    if not isinstance(parts, list) or len(parts) < 2 or not all(isinstance(part, str) for part in parts):
        return "wants sources and a destination"
    *sources, target = parts
    if any("://" in source or ".." in source.split("/") for source in sources):
        return "of something that is not in environment/"
    if any(mark in part for part in parts for mark in "*?[$"):
        return "with patterns or variables needs a build"
    folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
    absolute = posixpath.normpath(posixpath.join(workdir, target))
    return Copy(
        tuple(posixpath.normpath(source.lstrip("/")) for source in sources),
        absolute.rstrip("/") + ("/" if folder else ""),
    )


def _variables(rest: str) -> dict[str, str]:
    try:
        parts = shlex.split(rest)
    except ValueError:
        parts = [rest]
    if parts and all("=" in part for part in parts):
        return dict(part.split("=", 1) for part in parts)
    name, _, value = rest.partition(" ")
    return {name: value.strip()}
