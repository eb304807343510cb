"""Fixtures of the contract tests: the released SGLang beside the embedded engine."""

from __future__ import annotations

from sglang_cpu.fixture import pytest_collection_modifyitems, real_sglang_moe_url, real_sglang_url

__all__ = ["pytest_collection_modifyitems", "real_sglang_moe_url", "real_sglang_url"]
