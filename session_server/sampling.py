"""How one turn samples: what the session fixed, what the request asks, what the server and the model allow.

Refuses by name what cannot be honoured. Pure over its arguments; depends on the kernel and a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tollway.errors import BadRequest, ContextLengthExceeded
from tollway.records import Ids, Sampling
from tollway.router.service import Router
from tollway.session_server.config import ServerConfig
from tollway.session_server.families.base import Family
from tollway.session_server.request import Wish
from tollway.session_server.session import Session

__all__ = ["sampling_of"]

_DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""What shapes the distribution: a session that sets one of them keeps it, whatever a harness asks for."""


def sampling_of(
    session: Session,
    wish: Wish,
    prompt_tokens: int,
    *,
    config: ServerConfig,
    family: Family,
    router: Router,
    prompt_end: Ids,
) -> Sampling:
    """Sampling of one call. Raises ``BadRequest`` and ``ContextLengthExceeded``."""
    own = session.settings.sampling
    base = session.sampling()
    used: dict[str, Any] = {}  # fields of Sampling by name
    for name in _DISTRIBUTION:
        asked, fixed = getattr(wish, name), getattr(base, name)
        used[name] = fixed if asked is None or name in own else asked
        session.tally.sampling_overridden += int(asked is not None and asked != used[name])
    limit = config.context_length or router.context_length(session.settings.model)
    room = limit - prompt_tokens if limit is not None else None
    if limit is not None and room is not None and room < 1:
        raise ContextLengthExceeded(prompt_tokens, limit)
    known = [
        most for most in (wish.max_new_tokens, base.max_new_tokens, config.max_new_tokens, room) if most is not None
    ]
    if not known:
        raise BadRequest("the engine does not say how long its context is; send max_tokens", param="max_tokens")
    stops = (*family.stop_ids, *base.stop_token_ids, *_single_call(wish, family))
    return Sampling(
        **used,
        logit_bias=_bias(wish, family),
        max_new_tokens=min(known),
        seed=base.seed if wish.seed is None or "seed" in own else wish.seed,
        stop=(*base.stop, *wish.stop),
        stop_token_ids=tuple(dict.fromkeys(stops)),
        constraint=_constraint(wish, family, prompt_end),
    )


def _single_call(wish: Wish, family: Family) -> tuple[int, ...]:
    """Ids that end a reply which may hold one tool call at most; none when a grammar has to see to it."""
    return family.call_end_ids if _one_at_most(wish) else ()


def _one_at_most(wish: Wish) -> bool:
    return not wish.parallel_tool_calls and bool(wish.tools) and wish.tool_choice.mode != "none"


def _bias(wish: Wish, family: Family) -> tuple[tuple[int, float], ...]:
    for token in wish.logit_bias:
        if not 0 <= int(token) < family.vocab_size:
            raise BadRequest(
                f"logit_bias names token {token}, ids go up to {family.vocab_size - 1}", param="logit_bias"
            )
    return tuple((int(token), bias) for token, bias in wish.logit_bias.items())


def _constraint(wish: Wish, family: Family, prompt_end: Ids) -> tuple[tuple[str, str], ...]:
    choice = wish.tool_choice
    if choice.mode in ("auto", "none"):
        if wish.schema is None:
            return _free(wish, family, prompt_end)
        if wish.tools and choice.mode == "auto":
            raise BadRequest(
                "a response format constrains the whole reply, so no tool could be called; "
                "set tool_choice none, or leave out tools or the format",
                param="response_format",
            )
        return _pairs(family.content_constraint(wish.schema, prompt_end=prompt_end))
    if wish.schema is not None:
        raise BadRequest("a forced tool call and a response format exclude each other", param="tool_choice")
    if not wish.tools:
        raise BadRequest(f"tool_choice {choice.mode} needs tools", param="tool_choice")
    forced = family.tool_constraint(wish.tools, choice, parallel=wish.parallel_tool_calls, prompt_end=prompt_end)
    if forced is None:
        raise BadRequest(
            f"model family {family.name} cannot force a tool call; use tool_choice auto or none", param="tool_choice"
        )
    return _pairs(forced)


def _free(wish: Wish, family: Family, prompt_end: Ids) -> tuple[tuple[str, str], ...]:
    """The grammar of a reply that may say what it likes, with one call at most where no id ends a call."""
    if not _one_at_most(wish) or family.call_end_ids:
        return ()
    found = family.tool_constraint(wish.tools, wish.tool_choice, parallel=False, prompt_end=prompt_end)
    if found is None:
        raise BadRequest(
            f"model family {family.name} cannot be kept to one tool call; leave parallel_tool_calls out",
            param="parallel_tool_calls",
        )
    return _pairs(found)


def _pairs(found: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple((name, cast(str, value)) for name, value in found.items())
