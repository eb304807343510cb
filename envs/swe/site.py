"""The packages that tests need, as one read-only directory: pytest and what a task lists, pinned by hash.

Only wheels, so that no code of theirs runs on this machine. Depends on ``task`` and pip.
"""

from __future__ import annotations

from collections.abc import Sequence

from tollway.envs.swe.task import Package

__all__ = ["PYTEST", "packages_for", "requirements"]

PYTEST = (
    Package(name="pytest", version="8.4.2", sha256="872f880de3fc3a5bdc88a11b39c9710c3497a547cfa9320bc3c5e62fbf272e79"),
    Package(name="pluggy", version="1.6.0", sha256="e920276dd6813095e9377c0bc5566d94c932c33b27a3e3945d8389c374dd4746"),
    Package(
        name="iniconfig", version="2.1.0", sha256="9deba5723312380e77435581c6bf4935c94cbfab9b1ed33ef8d238ea168eb760"
    ),
    Package(
        name="packaging", version="25.0", sha256="29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484"
    ),
    Package(
        name="pygments", version="2.19.2", sha256="86540386c03d588bb81d44bc3928634ff26449851e99741617ecb9037ee5ec0b"
    ),
)
"""What every task of framework "pytest" needs."""


def packages_for(requires: Sequence[Package]) -> tuple[Package, ...]:
    """pytest's packages and those of a task; a task's pin wins over ours."""
    own = {one.name.lower().replace("_", "-"): one for one in requires}
    return tuple(
        sorted({**{one.name: one for one in PYTEST}, **own}.values(), key=lambda one: (one.name.lower(), one.version))
    )


def requirements(packages: Sequence[Package]) -> str:
    """A requirements file for ``pip install --require-hashes``."""
    return "".join(f"{one.name}=={one.version} --hash=sha256:{one.sha256}\n" for one in packages)
