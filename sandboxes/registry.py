"""Providers by name: the shipped ones, those of installed packages, and ``module:Class``.

Third parties register a ``SandboxProvider`` subclass whose constructor takes a ``SandboxConfig`` under the
entry-point group ``tollway.sandboxes``. Imports a provider only when it is asked for.
"""

from __future__ import annotations

from tollway.plugins import Plugins
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.config import SandboxConfig

__all__ = ["GROUP", "names", "open_provider"]

GROUP = "tollway.sandboxes"
_PROVIDERS = Plugins(
    key="sandbox.provider",
    port=SandboxProvider,  # type: ignore[type-abstract]  # compared with, never called
    group=GROUP,
    shipped={
        "agentenv": "tollway.sandboxes.e2b:AgentEnvProvider",
        "daytona": "tollway.sandboxes.daytona:DaytonaProvider",
        "docker": "tollway.sandboxes.docker:DockerProvider",
        "e2b": "tollway.sandboxes.e2b:E2BProvider",
        "fake": "tollway.sandboxes.fake:FakeProvider",
        "local": "tollway.sandboxes.local:LocalProvider",
        "modal": "tollway.sandboxes.modal:ModalProvider",
    },
)


def names() -> tuple[str, ...]:
    """Every provider name that ``open_provider`` knows, sorted."""
    return _PROVIDERS.names()


def open_provider(config: SandboxConfig) -> SandboxProvider:
    """The provider that ``config.provider`` names; ``ConfigError`` names the known ones."""
    return _PROVIDERS.open(config.provider, config)
