"""Proof of one family over one vocabulary: the token cases that a family owns, and append-only behaviour.

Every check runs the family itself; a family that cannot append something may branch, but must never answer
with ids that differ from what a whole rendering puts there. Run by ``tollway verify-family``; third parties
call ``verify_family`` on theirs. Depends on ``token_cases`` and ``behaviour``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tollway.session_server.families.base import Family
from tollway.session_server.families.behaviour import BEHAVIOUR
from tollway.session_server.families.registry import load_family
from tollway.session_server.families.subject import Check, Failed, NotApplicable, Subject
from tollway.session_server.families.token_cases import token_cases
from tollway.session_server.families.vocabularies import CONTROL_STRINGS, real_vocabulary, with_control_strings
from tollway.session_server.tokens import ControlTokenizer

__all__ = ["CaseResult", "open_family", "verify_family"]

State = Literal["passed", "failed", "not applicable"]
SERVER = "the server's, whatever the family: "
ELSEWHERE = {
    12: "matching", 13: "matching", 14: "matching", 15: "matching", 16: "the dialects", 20: "matching",
    21: "matching", 22: "matching", 23: "matching", 25: "the idempotency keys", 26: "the forest", 27: "the forest",
    33: "the router's resumption", 34: "the version spans", 35: "the records", 36: "the router", 39: "the export",
    40: "the calls in flight", 41: "the context limit",
}  # fmt: skip
"""Token cases without a family's part, and who has them."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One line of the report."""

    case: str
    """``A-1`` to ``A-41`` for the token cases, a name for the others."""
    title: str
    state: State
    note: str = ""
    """What was found, why it does not apply, or how it failed."""


def verify_family(family: Family) -> list[CaseResult]:
    """Every case with its state; the family holds when none is ``failed``."""
    subject = Subject(family)
    results = [_run(subject, f"A-{row}", title, check) for row, title, check in token_cases()]
    elsewhere = [
        CaseResult(f"A-{row}", "", "not applicable", SERVER + owner) for row, owner in ELSEWHERE.items()
    ]  # fmt: skip
    results = sorted([*results, *elsewhere], key=lambda each: int(each.case[2:]))
    return results + [_run(subject, name, title, check) for name, title, check in BEHAVIOUR]


def _run(subject: Subject, case: str, title: str, check: Check) -> CaseResult:
    try:
        return CaseResult(case, title, "passed", check(subject))
    except NotApplicable as reason:
        return CaseResult(case, title, "not applicable", str(reason))
    except Failed as failure:
        return CaseResult(case, title, "failed", str(failure))
    except Exception as error:
        # A family that raises where it must answer has failed the case, whatever it raised.
        return CaseResult(case, title, "failed", f"{type(error).__name__}: {error}")


def open_family(
    name: str, *, tokenizer: Path | None = None, vocabulary: str | None = None, chat_template: Path | None = None
) -> Family:
    """The family to prove, over a model's tokenizer or over a real vocabulary that packages bring.

    A family whose own vocabulary is in no package gets its control strings added. Raises ``ConfigError``.
    """
    if vocabulary is None:
        return load_family(name, tokenizer=tokenizer, chat_template=chat_template)
    file = real_vocabulary(vocabulary)
    if name not in CONTROL_STRINGS or name == vocabulary:
        return load_family(name, tokenizer=file, chat_template=chat_template)
    from tokenizers import Tokenizer

    from tollway.session_server.families.catalogue import renderers_family

    backend = with_control_strings(Tokenizer.from_file(str(file)), name)
    return renderers_family(name, ControlTokenizer(backend, name=f"{vocabulary} with control strings of {name}"))
