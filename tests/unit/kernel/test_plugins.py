"""Named plug-ins: found where they are registered, and refused with the key, the value and what is known."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tollway.errors import ConfigError
from tollway.plugins import Plugins

GROUP = "tollway.test_animals"
MODULE = "throwaway_animals"
SOURCE = """
from abc import ABC, abstractmethod

from test_plugins import Animal

class Dog(Animal):
    pass

class Stone:
    def __init__(self, name):
        raise AssertionError("never made")

class Sketch(Animal, ABC):
    @abstractmethod
    def bark(self): ...

    @abstractmethod
    def run(self): ...

def born(name):
    return Dog(name + " junior")

def nothing(name):
    return None

number = 3
"""
ENTRIES = {
    "dog": f"{MODULE}:Dog",
    "cat": f"{MODULE}:Dog",
    "puppy": f"{MODULE}:born",
    "ghost": f"{MODULE}:nothing",
    "stone": f"{MODULE}:Stone",
    "number": f"{MODULE}:number",
    "unicorn": f"{MODULE}:Unicorn",
    "lost": "throwaway_animals_that_moved:Dog",
}


class Animal:
    """A port."""

    def __init__(self, name: str) -> None:
        self.name = name


class Cat(Animal):
    """The shipped one."""


ANIMALS = Plugins(key="zoo.animal", port=Animal, group=GROUP, shipped={"cat": f"{__name__}:Cat"})


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with entry points, as pip leaves it behind."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    info = tmp_path / "throwaway_animals-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: throwaway-animals\nVersion: 1.0\n")
    lines = (f"{name} = {value}\n" for name, value in ENTRIES.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{''.join(lines)}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop(MODULE, None)


def test_shipped_names_come_before_installed_ones() -> None:
    assert type(ANIMALS.open("cat", "Tom")) is Cat
    assert ANIMALS.names() == tuple(sorted(ENTRIES))


@pytest.mark.parametrize("name", ["dog", f"{MODULE}:Dog"])
def test_an_installed_class_opens_by_name_and_any_class_by_path(name: str) -> None:
    found = ANIMALS.open(name, "Rex")
    assert (type(found).__name__, found.name) == ("Dog", "Rex")


def test_a_function_may_make_the_plug_in() -> None:
    assert ANIMALS.open("puppy", "Rex").name == "Rex junior"


def test_an_unknown_name_is_told_with_its_key_and_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        ANIMALS.open("hamster", "Joe")
    known = ", ".join(sorted(ENTRIES))
    assert str(caught.value) == f"zoo.animal='hamster' is unknown; known: {known}, or module:Class"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unicorn", rf"zoo\.animal='unicorn': cannot load {MODULE}:Unicorn: .*no attribute 'Unicorn'"),
        ("lost", r"zoo\.animal='lost': cannot load throwaway_animals_that_moved:Dog: No module named .* PYTHONPATH"),
        (f"{MODULE}:Unicorn", "cannot load"),
        (":Dog", "cannot load :Dog"),
        (".relative:Dog", "cannot load"),
        ("a b:c d", "cannot load"),
    ],
)
def test_a_broken_target_is_named_with_the_reason(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ANIMALS.open(name, "Joe")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stone", rf"zoo\.animal='stone': {MODULE}:Stone is not an Animal class"),
        ("number", rf"{MODULE}:number is not an Animal class"),
        ("ghost", rf"zoo\.animal='ghost': {MODULE}:nothing gave a NoneType, want an Animal"),
        ("json:dumps", "json:dumps gave a str, want an Animal"),
        (f"{MODULE}:Sketch", f"{MODULE}:Sketch does not define bark, run, which an Animal must"),
    ],
)
def test_a_target_of_another_kind_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ANIMALS.open(name, "Joe")
