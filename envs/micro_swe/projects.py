"""Generates the projects: four shapes around one buggy function, with helpers, a check and hidden cases.

Deterministic in (seed, split, index). Every 8 tasks in a row hold each kind of bug once, every 32 each kind
in each shape once. Pure:
nothing is run here. Depends on ``bugs``, ``names`` and ``rules``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tollway.envs.micro_swe.bugs import KINDS, Bug, Case, Material
from tollway.envs.micro_swe.names import POOLS, Pool, Split

__all__ = ["CHECK", "SHAPES", "Project", "build", "project_at"]

SHAPES = ("module", "package", "library", "data")
CHECK = "check.py"

_CHECK = """\
import sys

ROOT = __file__.rpartition("/")[0]
sys.path.insert(0, ROOT)
CASES = {cases}


class Mismatch(Exception):
    pass


try:
    from {module} import {function}

    for args, want in CASES:
        if {function}(*args) != want:
            raise Mismatch
except Exception as error:
    trace = error.__traceback__
    place = "check.py"
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(ROOT):
            place = name[len(ROOT) + 1 :] + ":" + str(trace.tb_lineno)
        trace = trace.tb_next
    print(type(error).__name__ + " at " + place)
    sys.exit(1)
print("ok")
"""

# Healthy code that one of the rules would also rewrite, without changing what it does.
_DECOYS = {
    "default": ("def {name}():", "    key = min({table})", "    found = {table}[key]", "    return found"),
    "cast": ("def {name}(left, right):", "    return left + right"),
    "guard": ("def {name}(part, whole):", "    return part / whole"),
    "parse": ("def {name}(text):", "    number = int(text)", "    return number"),
}
_HELPERS = (
    ("def {name}(value):", "    return value * {a} + {b}"),
    ("def {name}(value):", "    return min(max(value, {a}), {a} + {b})"),
    ("def {name}(values):", "    kept = [value for value in values if value > {a}]", "    return sorted(kept)"),
    ("def {name}(value):", "    if value < {a}:", "        return {b}", "    return value"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A small real project with one bug."""

    kind: str
    shape: str
    rule: str
    """The one edit that repairs it."""
    path: str
    """The file with the bug."""
    files: Mapping[str, str]
    """All files, the visible check included."""
    sources: tuple[str, ...]
    module: str
    function: str
    """What the checks import and call."""
    hidden: tuple[Case, ...]


@lru_cache(maxsize=4096)
def project_at(seed: int, split: Split, index: int) -> Project:
    """Project ``index`` of the endless order."""
    block, place = divmod(index, len(KINDS))
    kinds = list(KINDS)
    random.Random(f"{seed}/{split}/block/{block}").shuffle(kinds)
    kind = kinds[place]
    shape = SHAPES[(list(KINDS).index(kind) + block) % len(SHAPES)]
    return build(kind, shape, split, random.Random(f"{seed}/{split}/{index}"))


def build(kind: str, shape: str, split: Split, rng: random.Random) -> Project:
    """One project of a kind and a shape."""
    pool = POOLS[split]
    name = rng.choice(pool.modules)
    material = Material(
        pool=pool,
        table_name=rng.choice(pool.tables),
        table={word: rng.choice(pool.constants) for word in rng.sample(pool.words, 3)},
        function=rng.choice(pool.functions),
        factor=rng.choice(pool.constants),
        offset=rng.choice(pool.constants),
    )
    bug = KINDS[kind](material, rng)
    source = _source(material, bug, rng, table_from_file=shape == "data")
    files: dict[str, str] = {}
    module = name
    if shape == "module":
        path = f"{name}.py"
    elif shape == "package":
        path, module = f"{name}/core.py", f"{name}.core"
        files[f"{name}/__init__.py"] = ""
    elif shape == "library":
        path = "lib.py"
        files[f"{name}.py"] = f"from lib import {material.function}\n\n__all__ = [{material.function!r}]\n"
    else:
        path = f"{name}.py"
        files["data.txt"] = "".join(f"{word} {number}\n" for word, number in material.table.items())
    files[path] = source
    sources = tuple(file for file in files if file.endswith(".py"))
    files[CHECK] = _CHECK.format(cases=list(bug.visible), module=module, function=material.function)
    return Project(
        kind=kind,
        shape=shape,
        rule=bug.rule,
        path=path,
        files=files,
        sources=sources,
        module=module,
        function=material.function,
        hidden=bug.hidden,
    )


def _source(material: Material, bug: Bug, rng: random.Random, *, table_from_file: bool) -> str:
    if table_from_file:
        head = [
            'with open(__file__.rpartition("/")[0] + "/data.txt") as rows:',
            f"    {material.table_name} = {{row.split()[0]: int(row.split()[1]) for row in rows}}",
        ]
    else:
        head = [f"{material.table_name} = {dict(material.table)!r}".replace("'", '"')]
    functions = [*_helpers(material.pool, material.table_name, bug.rule, rng), bug.lines]
    rng.shuffle(functions)
    lines = head
    for function in functions:
        lines += ["", "", *function]
    return "\n".join(lines) + "\n"


def _helpers(pool: Pool, table: str, rule: str, rng: random.Random) -> list[tuple[str, ...]]:
    """One to three healthy functions; the first is one that a wrong rule would touch."""
    count = rng.randrange(1, 4)
    names = rng.sample(pool.helpers, count)
    decoy = rng.choice([lines for name, lines in _DECOYS.items() if name != rule])
    chosen = [decoy, *rng.sample(_HELPERS, count - 1)]
    a, b = rng.choice(pool.constants), rng.choice(pool.constants)
    return [
        tuple(line.format(name=name, table=table, a=a, b=b) for line in lines)
        for name, lines in zip(names, chosen, strict=True)
    ]
