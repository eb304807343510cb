"""Log-probability listings of the OpenAI dialects. Made only for requests that ask for them.

Depends on a family for the bytes behind ids and on the kernel's records.
"""

from __future__ import annotations

from tollway.records import TurnRecord
from tollway.session_server.families.base import Family

__all__ = ["logprob_entries"]

_LEAST = -9999.0
"""What stands for minus infinity, which JSON cannot say."""


def logprob_entries(record: TurnRecord, top: int, family: Family) -> list[dict[str, object]]:
    """One entry for each sampled id, control ids too, with up to ``top`` alternatives."""
    ids: list[int] = record.sampled_ids.tolist()
    values: list[float] = record.logprobs.tolist()
    entries = [_entry(family, token, value) for token, value in zip(ids, values, strict=True)]
    rows = record.top_logprobs
    if rows is None or not top:
        for entry in entries:
            entry["top_logprobs"] = []
        return entries
    for entry, tokens, others in zip(entries, rows.ids.tolist(), rows.logprobs.tolist(), strict=True):
        pairs = [pair for pair in zip(tokens, others, strict=True) if pair[0] >= 0][:top]
        entry["top_logprobs"] = [_entry(family, *pair) for pair in pairs]
    return entries


def _entry(family: Family, token: int, value: float) -> dict[str, object]:
    data = family.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(value, _LEAST), "bytes": list(data)}
