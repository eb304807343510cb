"""What a rule is said to do to a source is exactly what sed does to it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.envs.micro_swe.rules import RULES, edit_command, edit_text

words = st.sampled_from(
    [
        *(
            "    ",
            "return ",
            "found = ",
            "total",
            "low",
            "key",
            "UNITS",
            "x_",
            " + ",
            " - ",
            " / ",
            "int(",
            ")",
            "[key]",
        ),
        *("range(len(", " + 1)", ".push(", ".append(", "_", "2", ": ", "|", "&", "\\", '"', "é", "[", "(", "*"),
    ]
)
near_misses = st.sampled_from(
    [
        *("    found = UNITS[key]", "    return low + total", "    return low / total", "    number = int(text)"),
        *("    return result_", "    width = low - high", "for at in range(len(values) + 1):", "a.push(b.push(c))"),
    ]
)
lines = st.one_of(st.lists(words, max_size=8).map("".join), near_misses)


@pytest.mark.skipif(shutil.which("sed") != "/usr/bin/sed", reason="needs the system's sed")
@settings(max_examples=40, deadline=None)
@given(st.lists(lines, min_size=1, max_size=30), st.sampled_from(sorted(RULES)))
def test_sed_and_the_rule_agree_on_every_source(source_lines: list[str], name: str) -> None:
    rule, source = RULES[name], "\n".join(source_lines) + "\n"
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "f.py"
        path.write_text(source, encoding="utf-8")
        done = subprocess.run(edit_command(rule, str(path)), capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
        assert path.read_text(encoding="utf-8") == rule.rewrite(source)
    assert edit_text(done.stdout) == ("applied" if rule.finds_site(source) else "no site")
