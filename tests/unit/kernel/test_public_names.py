"""The public surface is declared, sorted, documented and importable without heavy packages."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import tollway

HEAVY = {"torch", "megatron", "ray", "sglang", "renderers", "transformers"}
HEAVY |= {"aiodocker", "daytona", "e2b", "modal", "sympy", "verifiers"}
KERNEL = sorted(m.name for m in pkgutil.iter_modules(tollway.__path__, "tollway.") if not m.ispkg)


@pytest.mark.parametrize("name", [n for n in KERNEL if not n.endswith("__main__")])
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{name}.{public} has no docstring"


def test_every_error_has_a_code_of_its_own_or_its_parents_and_a_valid_status() -> None:
    from tollway import errors

    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.TollwayError)
        assert 400 <= error.status < 600
        assert error.code == error.code.lower()


@pytest.mark.parametrize(
    "module", ["tollway.settings", "tollway.cli", "tollway.session_server.app", "tollway.router.service"]
)
def test_the_gateway_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(' '.join(sorted({HEAVY!r} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
