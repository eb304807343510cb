"""The trainer: episodes in, optimiser steps, weights out to running engines.

``loop.train`` is the way in. Nothing outside ``backends`` and ``weights`` imports torch.
"""
