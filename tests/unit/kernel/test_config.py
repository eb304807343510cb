"""Configuration errors name the key, what was found and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from tollway.config import Section, load, merge_overrides, read_tree
from tollway.errors import ConfigError


class Inner(Section):
    rate: float = Field(default=1.0, gt=0)
    name: str


class Root(Section):
    inner: Inner | None = None
    steps: int = 3


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"stesp": 1}, "stesp: unknown key; did you mean 'steps'?"),
        ({"zzz": 1}, "zzz: unknown key; known keys: inner, steps"),
        ({"inner": {"name": "x", "rat": 1}}, "inner.rat: unknown key; did you mean 'rate'?"),
        ({"inner": {}}, "inner.name: required and not set"),
        ({"inner": {"name": "x", "rate": 0}}, "inner.rate: Input should be greater than 0 (found 0)"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
    ],
)
def test_a_wrong_key_or_value_is_named(tree: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Root, tree, source="test.toml")
    assert text in str(caught.value)
    assert "test.toml" in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Root, {"steps": "x", "other": 1, "inner": {}}, source="f")
    assert len(str(caught.value).splitlines()) == 4


def test_overrides_are_toml_values_and_leave_the_tree_alone() -> None:
    tree: dict[str, object] = {"inner": {"name": "a"}}
    merged = merge_overrides(tree, ["inner.rate=2.5", "steps = 7", "inner.name=plain text"])
    assert merged == {"inner": {"name": "plain text", "rate": 2.5}, "steps": 7}
    assert tree == {"inner": {"name": "a"}}
    assert load(Root, merged, source="f").steps == 7


@pytest.mark.parametrize("override", ["steps", "=1", "a..b=1", "steps.x=1"])
def test_a_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        merge_overrides({"steps": 1}, [override])


def test_a_missing_or_broken_file_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        read_tree(tmp_path / "none.toml")
    broken = tmp_path / "b.toml"
    broken.write_text("a = [1,\nb = 2")
    with pytest.raises(ConfigError, match="line 2"):
        read_tree(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"b\.toml"):
        read_tree(broken)


def test_what_config_show_prints_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "shown.json"
    path.write_text(Root(steps=9).model_dump_json())
    assert load(Root, read_tree(path), source="f") == Root(steps=9)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="want sections"):
        read_tree(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_tree(path)
