"""Isolated machines for episodes: one protocol, the local bubblewrap provider, an in-memory fake.

Callers use ``base`` and get a provider from ``registry``. Knows nothing of tasks, models or sessions.
"""
