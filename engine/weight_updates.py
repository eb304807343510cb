"""New weights for a running engine: sessions, tensors over HTTP, broadcast, disk, versions.

Tensors and broadcasts need an open session (``begin_weight_update`` .. ``end_weight_update``); disk needs none
and rolls back by itself. A failed load inside a session may leave earlier tensors replaced, and says so.
Methods marked so run on the scheduler's thread. Depends on ``generation``, ``weights`` and ``unpickle``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from tollway.engine.generation import Generation
from tollway.engine.unpickle import read_bucket, read_named_tensors
from tollway.engine.weights import WeightMismatch, copy_tensors, load_directory
from tollway.errors import BadRequest, ConfigError

__all__ = ["WeightUpdates", "decode_payload"]

logger = logging.getLogger(__name__)
_READERS: dict[str | None, Callable[[bytes], list[tuple[str, Tensor]]]] = {
    None: read_named_tensors,
    "direct": read_named_tensors,
    "flattened_bucket": read_bucket,
}


def decode_payload(payload: bytes, load_format: str | None) -> list[tuple[str, Tensor]]:
    """Named tensors of one ``serialized_named_tensors`` entry. Raises ``BadRequest``. Any thread."""
    if load_format not in _READERS:
        raise BadRequest(f"load_format {load_format!r} is not supported; use flattened_bucket, direct or none")
    return _READERS[load_format](payload)


class WeightUpdates:
    """State of the update session. All methods run on the scheduler's thread."""

    def __init__(self, model_path: Path) -> None:
        self.model_path = model_path
        self.open = False
        self._loaded = 0

    def begin(self, selector: str) -> str:
        """Open a session. A second one is refused."""
        if self.open:
            raise BadRequest("a weight update session is already open; end it with /end_weight_update first")
        _check_selector(selector)
        self.open, self._loaded = True, 0
        return "weight update session opened"

    def end(self) -> str:
        """Close the session."""
        self.require_session("end_weight_update")
        self.open = False
        return f"weight update session closed after {self._loaded} tensors"

    def require_session(self, what: str) -> None:
        """Refuse ``what`` outside a session."""
        if not self.open:
            raise BadRequest(f"{what} needs an open session; call /begin_weight_update first")

    def load(
        self, generation: Generation, tensors: Sequence[tuple[str, Tensor]], *, flush: bool, version: str | None
    ) -> str:
        """Copy tensors in. All of them are checked before the first is copied."""
        self.require_session("a weight update")
        _check_memory(generation)
        if flush:
            _check_flushable(generation)
        try:
            copy_tensors(generation.decoder, tensors)
        except WeightMismatch as error:
            raise WeightMismatch(
                f"{error}; nothing of this call was loaded, {self._loaded} tensors of this session were: "
                "weights may be partly updated, reload them fully before serving"
            ) from error
        self._loaded += len(tensors)
        _after(generation, flush, version)
        return f"loaded {len(tensors)} tensors"

    def load_disk(self, generation: Generation, path: Path, *, flush: bool, version: str | None) -> str:
        """Replace all weights by those of a directory, or none."""
        _check_memory(generation)
        if flush:
            _check_flushable(generation)
        try:
            load_directory(generation.decoder, path)
        except (WeightMismatch, ConfigError) as error:
            raise BadRequest(f"failed to load {path}: {error}; the weights in use are unchanged") from error
        self.model_path = path
        _after(generation, flush, version)
        logger.info("loaded weights from %s, version %s", path, generation.version)
        return f"loaded weights from {path}"


def _check_selector(selector: str) -> None:
    if selector not in ("all", "target"):
        raise BadRequest(f"selector {selector!r} is not supported: this engine has no draft model; use all or target")


def _check_memory(generation: Generation) -> None:
    if "weights" in generation.released:
        raise BadRequest("the memory of the weights is released; call /resume_memory_occupation first")


def _check_flushable(generation: Generation) -> None:
    """Before anything is loaded: a flush that fails afterwards would leave new weights over old keys and values."""
    if generation.batch.n or (generation.waiting and not generation.paused):
        raise BadRequest(
            f"flush_cache cannot be done: {generation.batch.n} running and {len(generation.waiting)} waiting requests; "
            "pause with mode retract or abort first, or send flush_cache=false. Nothing was loaded"
        )


def _after(generation: Generation, flush: bool, version: str | None) -> None:
    if flush:
        generation.flush()
    if version is not None:
        generation.set_version(version)
