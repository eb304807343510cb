"""Graders of the user's own: a function by ``module:name``, checked before the first episode."""

from tollway.envs.custom.attempt import Attempt

__all__ = ["Attempt"]
