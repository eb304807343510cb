"""A grader of one's own: right answers earn 1, long ones lose a little."""

from tollway.envs.custom import Attempt


def grade(attempt: Attempt) -> float:
    """Called once for every episode, and once with an empty answer before the first."""
    right = attempt.reference is not None and attempt.reference in attempt.answer
    return float(right) - min(1.0, len(attempt.answer) / 1000)
