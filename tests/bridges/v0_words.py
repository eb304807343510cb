"""A v0 verifiers environment, single-turn, for the worker's v0 side."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

WORDS = ["tollway", "gateway", "harness"]


def load_environment(words: int = 3) -> vf.SingleTurnEnv:
    rows = [{"question": f"Spell {word} backwards.", "answer": word[::-1]} for word in WORDS[:words]]

    def right(completion: list, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)

    def length(completion: list) -> float:
        return float(len(completion[-1]["content"]))

    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt="Be brief.", rubric=rubric)
