"""Ports of several engines, one after the other, end where ports end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tollway.errors import ConfigError
from tollway.launching import launcher
from tollway.settings import Settings


def test_engines_that_ports_do_not_suffice_for_are_no_configuration(tmp_path: Path) -> None:
    settings = Settings.model_validate({"engine": {"port": 65534}, "run": {"dir": str(tmp_path)}})
    assert launcher(settings, tmp_path, shown=tmp_path / "settings.json", count=2).urls == []
    with pytest.raises(ConfigError, match=r"engine\.port is 65534, and 3 engines .* up to 65536"):
        launcher(settings, tmp_path, shown=tmp_path / "settings.json", count=3)
