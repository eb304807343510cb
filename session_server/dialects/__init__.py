"""Dialects: how harnesses speak. Each parses into ``TurnRequest`` and renders ``TurnOutcome``."""
