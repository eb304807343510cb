"""Group statistics and advantages: pure functions in fp64, by rollout and never by row.

A rollout that was split into several rows (branches, compactions) still counts once. Further estimators
join here as functions of the same shape. Depends on numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["has_variance", "leave_group_mean", "normalised"]

F64 = NDArray[np.float64]

_MIN_STD = 1e-8
_STD_EPSILON = 1e-6


def has_variance(rewards: F64) -> bool:
    """Whether a group [rollouts] teaches anything: fp64 std above 1e-8.

    In float32 eight equal rewards of 0.3 have a std of 3e-8, so the precision is part of the rule.

    >>> has_variance(np.array([0.3] * 8)), has_variance(np.array([0, 0, 0, 1e-3]))
    (False, True)
    """
    return rewards.size > 1 and bool(np.std(rewards.astype(np.float64)) > _MIN_STD)


def leave_group_mean(rewards: F64) -> F64:
    """Rewards [rollouts] minus the group's mean."""
    exact = rewards.astype(np.float64)
    centred: F64 = exact - exact.mean()
    return centred


def normalised(rewards: F64) -> F64:
    """GRPO advantages [rollouts]: (r - mean) / (std + 1e-6), std with n - 1.

    Raises ``ValueError`` for fewer than two rollouts, where the std does not exist.

    >>> np.round(normalised(np.array([1.0, 0, 0, 0])), 2).tolist()
    [1.5, -0.5, -0.5, -0.5]
    """
    if rewards.size < 2:
        raise ValueError(f"group statistics need at least 2 rollouts, got {rewards.size}")
    centred = leave_group_mean(rewards)
    scaled: F64 = centred / (np.sqrt((centred**2).sum() / (rewards.size - 1)) + _STD_EPSILON)
    return scaled
