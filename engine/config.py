"""The ``[engine]`` section. Owns its defaults and bounds; imports pydantic only, never torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tollway.config import Section

__all__ = ["LAUNCH_FIELDS", "EngineConfig", "Option"]

Option = bool | int | float | str | list[str]
"""Value of an option that is passed through."""
LAUNCH_FIELDS = {
    *("kind", "count", "command", "executable", "sglang"),
    *("ready_timeout_s", "restarts", "restart_window_s", "min_engines"),
}
"""How engines are started, which concerns whoever starts them and not the engine itself."""


class EngineConfig(Section):
    """Which engine serves the policy, and how the embedded one is sized.

    >>> EngineConfig(model_path="runs/demo/model").port
    0
    """

    kind: Literal["embedded", "sglang", "command"] = "embedded"
    """What ``tollway train`` and ``tollway serve --start-engines`` start: this package's engine, on the CPU; a stock
    ``sglang serve``; or ``command``. Servers that somebody else runs go behind ``tollway serve --engine URL``."""
    count: int = Field(default=1, ge=1)
    """Engines that ``tollway train`` starts."""
    executable: str = "sglang"
    """Of kind sglang: its program, by name or path; it belongs in an environment of its own."""
    sglang: dict[str, Option] = Field(default_factory=dict)
    """Of kind sglang: options of ``sglang serve`` by their own names, such as ``tp-size = 2``; ``true`` is a bare
    flag, ``false`` leaves it out. Model, host and port are set by Tollway."""
    command: list[str] = Field(default_factory=list)
    """Of kind command: the command line of one engine. ``{model_path}``, ``{host}`` and ``{port}`` are filled in."""
    ready_timeout_s: float = Field(default=600.0, gt=0)
    """Longest start of one engine, until it has generated a token."""
    restarts: int = Field(default=3, ge=0)
    """How often engines that died are started again within ``restart_window_s``, all engines together."""
    restart_window_s: float = Field(default=600.0, gt=0)
    min_engines: int = Field(default=1, ge=1)
    """Once no restart is left, fewer running engines than this end the run."""
    model_path: Path | None = None
    """Model directory in Hugging Face layout (config.json, *.safetensors, optionally tokenizer.json)."""
    host: str = "127.0.0.1"
    """Address to listen on. Weight updates reach this port: keep it on loopback or a private network."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port; the ready line names it."""
    context_length: int | None = Field(default=None, ge=2)
    """Longest prompt plus output in tokens; ``None``: ``max_position_embeddings`` of the model."""
    max_running_requests: int = Field(default=64, ge=1, le=1024)
    """Requests that decode together; others wait."""
    max_total_tokens: int = Field(default=131_072, ge=16)
    """Tokens whose keys and values are kept, running requests and prefix cache together."""
    prefix_cache: bool = True
    """Reuse keys and values of common prefixes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type that weights and keys/values are held and computed in; ``auto``: what config.json says."""
    skip_tokenizer_init: bool = False
    """Token ids only: replies carry no ``text``, string stops are refused."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens between two events of a stream."""
    incremental_streaming: bool = False
    """Events of a stream carry only what is new, as with a stock server's ``--incremental-streaming-output``."""
    weight_version: str = Field(default="0", coerce_numbers_to_str=True)
    """Version that replies report until an update stamps another. A stock server starts with "default", which
    the router refuses: it cannot be compared."""
    seed: int = Field(default=0, ge=0)
    """Base of the random numbers of requests that bring no ``sampling_seed``."""
    threads: int = Field(default=1, ge=1)
    """Compute threads. More than one is slower for small models, far slower on a loaded machine."""

    @model_validator(mode="after")
    def _can_be_started(self) -> EngineConfig:
        if self.kind == "command" and not self.command:
            raise ValueError('kind "command" wants engine.command, for example ["my-engine", "--port", "{port}"]')
        taken = {"model-path", "model", "host", "port"} & {name.lstrip("-").replace("_", "-") for name in self.sglang}
        if taken:
            raise ValueError(f"engine.sglang may not name {', '.join(sorted(taken))}: Tollway sets them")
        if self.min_engines > self.count:
            raise ValueError(f"min_engines {self.min_engines} is more than count {self.count}")
        return self
