"""``sampling_params`` of a request: types, ranges, and what this engine refuses by name.

Owns validation only; how tokens are drawn is ``sampler``'s. Depends on pydantic and ``tollway.errors``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tollway.engine.text import TextCodec
from tollway.errors import BadRequest

__all__ = ["SamplingParams", "explain"]

_MOST = 2**31 - 1
"""Largest count or id: what the batch's tables cannot hold would end the engine's thread, not the request."""
_MOST_BIAS = 1e30
"""Far beyond every logit, and float32 still holds it divided by the lowest temperature."""
_LEAST_PENALTY = 1e-6
"""A logit divided by less would leave float32."""
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_UNSUPPORTED = (*_GRAMMARS, "stop_regex", "custom_params")


class SamplingParams(BaseModel):
    """How one request samples; unknown keys are refused, as a stock server does."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    max_new_tokens: int | None = Field(default=128, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """0 is greedy. Log-probabilities are those of the temperature-scaled distribution, as in SGLang."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1, le=_MOST)
    """-1 keeps the whole vocabulary."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=_MOST)]] | None = None
    min_new_tokens: int = Field(default=0, ge=0, le=_MOST)
    n: int = Field(default=1, ge=1, le=256)
    ignore_eos: bool = False
    """As in SGLang this ignores ``stop_token_ids`` too."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-_MOST_BIAS, le=_MOST_BIAS)]] | None = None
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=_LEAST_PENALTY, le=2.0)

    @classmethod
    def parse(cls, raw: Mapping[str, object] | None, *, vocab_size: int, codec: TextCodec | None) -> SamplingParams:
        """Validate a request's ``sampling_params``. Raises ``BadRequest`` naming the parameter."""
        raw = {} if raw is None else raw
        for name in _UNSUPPORTED:
            if raw.get(name) is not None:
                why = ": it has no grammar backend, serve the model with SGLang" if name in _GRAMMARS else ""
                raise BadRequest(f"sampling_params.{name} is not supported by the embedded engine{why}", param=name)
        try:
            params = cls.model_validate({name: value for name, value in raw.items() if name not in _UNSUPPORTED})
        except ValidationError as error:
            raise BadRequest(explain(error, "sampling_params.")) from None
        params._check(vocab_size, codec)
        return params

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        """The most likely token is taken; log-probabilities are at temperature 1."""
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def edits_logits(self) -> bool:
        """Logits change before sampling, beyond temperature."""
        penalised = self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1
        return penalised or bool(self.logit_bias)

    def _check(self, vocab_size: int, codec: TextCodec | None) -> None:
        if self.top_k == 0:
            raise BadRequest("sampling_params.top_k must be -1 (whole vocabulary) or at least 1, got 0", param="top_k")
        if self.stops and codec is None:
            raise BadRequest(
                "stop needs a tokenizer, and this server runs without one: use stop_token_ids", param="stop"
            )
        if len(self.stops) > 32 or not all(self.stops):
            raise BadRequest("stop takes at most 32 strings, none of them empty", param="stop")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise BadRequest(
                f"min_new_tokens {self.min_new_tokens} is larger than max_new_tokens {self.max_new_tokens}",
                param="min_new_tokens",
            )
        for token in self.logit_bias or {}:
            if not re.fullmatch("[0-9]{1,9}", token) or int(token) >= vocab_size:
                raise BadRequest(f"logit_bias names {token!r}; want token ids below {vocab_size}", param="logit_bias")


def explain(error: ValidationError, prefix: str = "") -> str:
    """One line per problem, naming the field and what was found."""
    lines = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"]) or "body"
        lines.append(f"{prefix}{field}: {problem['msg']}, found {type(problem['input']).__name__}")
    return "; ".join(lines)
