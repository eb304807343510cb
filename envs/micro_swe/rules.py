"""The eight edits that the agent can make: real source rewrites, each a one-line sed program.

A rule knows nothing of the project that it is applied to: it rewrites every line that has its pattern. It
is the remedy for one kind of error, and harmless elsewhere. Patterns and replacements stay in the common
subset of sed -E and ``re``, so that ``finds_site`` says beforehand what sed will do. Depends on nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["APPLIED", "BAD_CALL", "NO_EDITS_LEFT", "NO_SITE", "RULES", "Rule", "edit_command", "edit_text"]

APPLIED, NO_SITE, NO_EDITS_LEFT, BAD_CALL = "applied", "no site", "no edits left", "bad call"
"""What the edit tool shows."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rewrite."""

    name: str
    error: str
    """The exception that it is the remedy for."""
    pattern: str
    replacement: str

    def finds_site(self, source: str) -> bool:
        """Whether any line of ``source`` would change."""
        return any(re.search(self.pattern, line) for line in source.split("\n"))

    def rewrite(self, source: str) -> str:
        """``source`` after the rule, as sed leaves it."""
        return "\n".join(re.sub(self.pattern, self.replacement, line, count=1) for line in source.split("\n"))


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("default", "KeyError", r"^( *[a-z]+ = )([A-Z]+)\[([a-z]+)\]$", r"\1\2.get(\3, 0)"),
        Rule("cast", "TypeError", r"^( *return )([a-z]+) \+ ([a-z]+)$", r"\1\2 + str(\3)"),
        Rule("guard", "ZeroDivisionError", r"^( *return )([a-z]+) / ([a-z]+)$", r"\1\2 / \3 if \3 else 0"),
        Rule("bound", "IndexError", r"range\(len\(([a-z]+)\) \+ 1\)", r"range(len(\1))"),
        Rule("name", "NameError", r"^( *return [a-z]+)_$", r"\1"),
        Rule("parse", "ValueError", r"^( *[a-z]+ = )int\(([a-z]+)\)$", r'\1int(\2.replace(",", ""))'),
        Rule("method", "AttributeError", r"\.push\(", r".append("),
        Rule("sign", "AssertionError", r"^( *[a-z]+ = )([a-z]+) - ([a-z]+)$", r"\1\3 - \2"),
    )
}
"""By name, in the order of the error kinds."""


def edit_command(rule: Rule, path: str) -> list[str]:
    """The command that applies ``rule`` to a file in the sandbox; it prints the changed lines."""
    return ["/usr/bin/sed", "-E", "-i", "-e", f"s|{rule.pattern}|{rule.replacement}|w /dev/stdout", path]


def edit_text(changed_lines: bytes) -> str:
    """What the model sees after ``edit_command`` printed ``changed_lines``."""
    return APPLIED if changed_lines else NO_SITE
