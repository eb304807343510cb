"""Long texts pass through a renderer as one stand-in id, so that its per-token work is of the template alone.

Renderers of the library carry several lists with an entry per token and fill them in Python loops: a
millisecond for a tool result of a thousand tokens, ten times what encoding it takes. Their decisions depend on
control ids and on the ends of a text, never on its middle. While ``folding`` is on for a thread, ``encode``
keeps the ends and puts one number in place of the middle; ``unfold`` puts the ids back. Depends on ``tokens``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tollway.session_server.tokens import ControlTokenizer

__all__ = ["FoldingTokenizer"]

_EDGE = 4
"""Ids kept at each end of a text."""
_SHORTEST = 24
_STAND_IN = 1 << 40
"""First stand-in; far above any vocabulary."""


class FoldingTokenizer:
    """The surface that renderers ask for, over ``inner``. Threads fold for themselves."""

    def __init__(self, inner: ControlTokenizer) -> None:
        self.inner = inner
        self.enabled = True
        self._local = threading.local()
        # Asked for at every turn: found here, they cost no failed look-up before.
        self.convert_tokens_to_ids = inner.convert_tokens_to_ids
        self.unk_token_id = inner.unk_token_id

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    @contextmanager
    def folding(self) -> Iterator[None]:
        """Fold what this thread encodes, if folding is ``enabled``."""
        self._local.middles = [] if self.enabled else None
        try:
            yield
        finally:
            self._local.middles = None

    def unfold(self, ids: Sequence[int]) -> list[int]:
        """The real ids, inside ``folding``."""
        middles: list[list[int]] | None = self._local.middles
        if not middles:
            return list(ids)
        out: list[int] = []
        for token in ids:
            if token >= _STAND_IN:
                out += middles[token - _STAND_IN]
            else:
                out.append(token)
        return out

    def encode(self, text: str, add_special_tokens: bool = False, **more: object) -> list[int]:
        """See ``ControlTokenizer.encode``."""
        ids = self.inner.encode(text, add_special_tokens, **more)
        middles: list[list[int]] | None = getattr(self._local, "middles", None)
        if middles is None or len(ids) < _SHORTEST:
            return ids
        middles.append(ids[_EDGE:-_EDGE])
        return [*ids[:_EDGE], _STAND_IN + len(middles) - 1, *ids[-_EDGE:]]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **more: object) -> str:
        """See ``ControlTokenizer.decode``."""
        if getattr(self._local, "middles", None):
            token_ids = self.unfold(token_ids)
        return self.inner.decode(token_ids, skip_special_tokens, **more)
