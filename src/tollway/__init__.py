"""Tollway: the gateway and trainer between agent harnesses and language-model reinforcement learning."""

__version__ = "0.1.0"
