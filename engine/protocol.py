"""The body of ``/generate``: types, ranges and limits; from JSON to ``Request``.

Wrong types are 400, unknown keys of the body are ignored, what this engine cannot do is refused by name. Depends on
``params``, ``request`` and ``text``.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tollway.engine.params import SamplingParams, explain
from tollway.engine.request import Request
from tollway.engine.sampler import mix_seed
from tollway.engine.spec import ModelSpec
from tollway.engine.text import StopWatch, TextCodec
from tollway.errors import BadRequest

__all__ = ["GenerateBody", "Intake"]

_UNSUPPORTED = (
    *("lora_path", "input_embeds", "image_data", "audio_data", "video_data", "session_params"),
    *("token_ids_logprob", "return_indexer_topk", "return_sampling_mask", "return_hidden_states"),
    *("custom_logit_processor", "bootstrap_host", "bootstrap_room"),
)


class GenerateBody(BaseModel):
    """One call of ``/generate``, typed as on a stock server."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str | list[str] | None = None
    input_ids: list[object] | None = None
    sampling_params: dict[str, object] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int | None = Field(default=None, ge=-1)
    top_logprobs_num: int | None = Field(default=None, ge=0)
    return_text_in_logprobs: bool = False
    return_flat_raw_output_top_logprobs: bool = False
    return_flat_raw_top_logprobs_b64: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int | None = None
    return_prompt_token_ids: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None
    routing_key: str | None = None
    session_id: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    priority: int | None = None

    @classmethod
    def parse(cls, raw: object) -> GenerateBody:
        """Type-check a decoded JSON body. Raises ``BadRequest`` naming the field."""
        if not isinstance(raw, dict):
            raise BadRequest(f"the body must be a JSON object, found {type(raw).__name__}")
        for name in _UNSUPPORTED:
            if raw.get(name):
                raise BadRequest(f"{name} is not supported by the embedded engine", param=name)
        try:
            body = cls.model_validate(raw)
        except ValidationError as error:
            raise BadRequest(explain(error)) from None
        if body.stream and body.return_flat_raw_output_top_logprobs:
            name = "return_flat_raw_output_top_logprobs"
            raise BadRequest(f"{name} does not support stream=True: arrays come with the finished reply", param=name)
        return body


@dataclass(slots=True)
class Intake:
    """Turns bodies into requests for one model."""

    spec: ModelSpec
    codec: TextCodec | None
    context_length: int
    """Longest prompt plus output, the token budget already considered."""
    eos_ids: tuple[int, ...]
    base_seed: int
    _arrivals: count[int]
    _run_id: str
    _unnamed: count[int]

    @classmethod
    def make(
        cls, spec: ModelSpec, codec: TextCodec | None, context_length: int, *, eos_ids: tuple[int, ...], seed: int
    ) -> Intake:
        """An intake whose unseeded requests draw from ``seed``."""
        return cls(spec, codec, context_length, eos_ids, seed, count(), uuid.uuid4().hex, count())

    def parse(self, raw: object) -> tuple[GenerateBody, list[Request], bool]:
        """Body and requests of one call, and whether the reply is a list (a batch, or ``n`` above 1).

        Raises ``BadRequest`` naming the field.
        """
        body = GenerateBody.parse(raw)
        prompts, batched = self._prompts(body)
        params = SamplingParams.parse(body.sampling_params, vocab_size=self.spec.vocab_size, codec=self.codec)
        rids = self._rids(body.rid, len(prompts), params.n)
        made = [
            self._request(body, prompt, params, rids[i * params.n + sample], sample)
            for i, prompt in enumerate(prompts)
            for sample in range(params.n)
        ]
        return body, made, batched or params.n > 1

    def _request(
        self, body: GenerateBody, prompt: NDArray[np.int32], params: SamplingParams, rid: str, sample: int
    ) -> Request:
        watch = None
        if params.stops and self.codec is not None:
            watch = StopWatch(self.codec, params.stops, skip_special=params.skip_special_tokens)
        ends = {*self.eos_ids, *(params.stop_token_ids or ())}
        seeded = params.sampling_seed is not None
        seed = mix_seed(params.sampling_seed or 0, sample) if seeded else mix_seed(self.base_seed, next(self._arrivals))
        routes_start = body.routed_experts_start_len or 0
        if not 0 <= routes_start <= len(prompt):
            raise BadRequest(
                f"routed_experts_start_len {routes_start} is outside [0, {len(prompt)}], the prompt's length",
                param="routed_experts_start_len",
            )
        start = -1 if body.logprob_start_len is None else body.logprob_start_len
        if body.return_logprob and start >= len(prompt):
            raise BadRequest(
                f"logprob_start_len {start} is not below the prompt length {len(prompt)}", param="logprob_start_len"
            )
        return Request(
            rid=rid,
            prompt=prompt,
            params=params,
            namespace="\0".join((body.extra_key or "", body.cache_salt or "")),
            limit=self._limit(len(prompt), params.max_new_tokens),
            seed=seed,
            stop_ids=() if params.ignore_eos else tuple(sorted(ends)),
            watch=watch,
            return_logprob=body.return_logprob,
            logprob_start=start,
            top_logprobs=min(body.top_logprobs_num or 0, self.spec.vocab_size) if body.return_logprob else 0,
            return_routes=body.return_routed_experts and self.spec.experts > 0,
            routes_start=routes_start,
            stream=body.stream,
        )

    def _limit(self, prompt: int, wanted: int | None) -> int:
        limit = self.context_length
        if prompt >= limit:
            raise BadRequest(f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens).")
        if wanted is None:
            return limit - prompt
        if prompt + wanted > limit:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested "
                f"a total of {prompt + wanted} tokens: {prompt} tokens from the input and {wanted} tokens for the "
                "completion; this is longer than the model's context length. Shorten the input or lower max_new_tokens."
            )
        return wanted

    def _prompts(self, body: GenerateBody) -> tuple[list[NDArray[np.int32]], bool]:
        if (body.input_ids is None) == (body.text is None):
            raise BadRequest("give exactly one of input_ids and text", param="input_ids")
        if body.text is not None:
            if self.codec is None:
                raise BadRequest(
                    "text needs a tokenizer, and this server runs without one: use input_ids", param="text"
                )
            texts = [body.text] if isinstance(body.text, str) else body.text
            return [self._ids(self.codec.encode(text)) for text in texts], not isinstance(body.text, str)
        ids = body.input_ids or []
        if ids and isinstance(ids[0], list):
            return [self._ids(one) for one in ids], True
        return [self._ids(ids)], False

    def _ids(self, ids: object) -> NDArray[np.int32]:
        if not isinstance(ids, list) or set(map(type, ids)) != {int}:
            raise BadRequest("input_ids must be a non-empty list of integers", param="input_ids")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.spec.vocab_size:
            bad = low if low < 0 else high
            raise BadRequest(f"token id {bad} is outside the vocabulary of {self.spec.vocab_size}", param="input_ids")
        return np.array(ids, np.int32)

    def _rids(self, given: str | Sequence[str] | None, prompts: int, n: int) -> list[str]:
        total = prompts * n
        if given is None:
            # Not uuid4 per request: reading the system's randomness lets go of the interpreter lock.
            return [f"{self._run_id}-{next(self._unnamed):x}" for _ in range(total)]
        if isinstance(given, str):
            return [given] if total == 1 else [f"{given}_{i}" for i in range(total)]
        if len(given) != prompts:
            raise BadRequest(f"rid lists {len(given)} ids for {prompts} inputs", param="rid")
        return list(given) if n == 1 else [f"{rid}_{i}" for rid in given for i in range(n)]
