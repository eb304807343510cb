"""What a scripted engine was sent and returned, and the proof that an export is exactly that.

Each reply holds a number, ``#n#`` in plain bytes. What a client read, what the engine returned and what the export
has are compared by these numbers, and each row by its digest.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import vocabularies
import xxhash
from fuzz_odd import BREAK
from fuzz_talk import Talk

from tollway.records import Trajectory
from tollway.router.fake import FakeReply, FakeRequest
from tollway.session_server.tokens import ControlTokenizer

__all__ = ["Camp", "Witness", "numbers_in"]

_NUMBER = re.compile(r"#(\d+)#")
_TAIL = 64
_KEPT = 10_000


@dataclass
class Camp:
    """One session and what happened in it."""

    session_id: str
    token: str
    talks: list[Talk] = field(default_factory=list)
    """Conversations that nobody is at."""
    seen: set[str] = field(default_factory=set)
    """Numbers of replies that a client got to their end."""
    keys: int = 0


def numbers_in(text: str) -> set[str]:
    """Numbers of the replies that a text came from."""
    return set(_NUMBER.findall(text))


class Witness:
    """The script of an engine, and its memory."""

    def __init__(self, family: str, *, delay_s: float = 0.0) -> None:
        self.qwen = family == "qwen"
        self._delay_s = delay_s
        """Between the pieces of a reply."""
        self._numbers = itertools.count()
        self._random = Random(0)
        self._control = ControlTokenizer(vocabularies.small(), name="small-qwen3").control if self.qwen else {}
        self._sent: defaultdict[str, set[bytes]] = defaultdict(set)
        """Beginning of a session's id -> digests of prompt and reply of its calls."""
        self._replied: defaultdict[str, set[str]] = defaultdict(set)
        """The same -> numbers that were returned whole."""
        self._sequences: OrderedDict[str, bytes] = OrderedDict()
        """Number -> prompt and reply that it is in; the latest ones."""

    def script(self, request: FakeRequest) -> FakeReply:
        prompt = np.array(request.input_ids, np.int32)
        tail = bytes(token if token < 256 else 32 for token in request.input_ids[-_TAIL:])
        ids, finish = self._ids(request)
        camp = request.rid[:12]
        reply = FakeReply(
            ids=ids, finish=finish, cached_tokens=request.prompt_tokens - 1, chunk=self._random.choice((1, 3, 50))
        )
        if (found := re.search(re.escape(BREAK.encode()) + rb"(\d)!", tail)) is not None:
            return _spoiled(reply, int(found[1]), streaming=bool(request.body.get("stream")))
        sequence = np.concatenate([prompt, np.array(ids, np.int32)])
        self._sent[camp].add(_digest(sequence))
        numbers = numbers_in("".join(chr(token) if token < 256 else " " for token in ids))
        self._replied[camp] |= numbers
        for number in numbers:
            self._sequences[number] = sequence.tobytes()
        while len(self._sequences) > _KEPT:
            self._sequences.popitem(last=False)
        return reply

    def _ids(self, request: FakeRequest) -> tuple[list[int], str]:
        """A reply of one of the shapes that models write, no longer than asked for."""
        rng, number = self._random, next(self._numbers)
        mark = list(b"#%d#" % number)
        noise = [rng.randrange(256) for _ in range(rng.randrange(4))]
        kind = rng.random()
        if self.qwen:
            control = self._control
            ids = [*mark, *noise]
            if kind < 0.2:
                ids = [control["<think>"], *mark, control["</think>"], *noise]
            elif kind < 0.5:
                inner = rng.choice((b'{"a": %s}', b'{"a": "\\ud800", "b": %s}', b'{"a": 1e999, "b": %s}', b"[%s]"))
                call = b'\n{"name": "plan", "arguments": ' + inner % b'"#%d#"' % number + b"}\n"
                ids = [control["<tool_call>"], *call, control["</tool_call>"]]
            elif kind < 0.55:
                ids = [control["<tool_call>"], *mark]
            end = control["<|im_end|>"]
        else:
            ids = [*mark, *noise]
            if kind < 0.3:
                ids = [263, *b"edit", 265, *mark]
            elif kind < 0.45:
                ids = [263, *b"plan", 265, *b"[]", 265, *rng.choice((b'{"a":"\\ud800"}', b'{"a":1e999}')), 263, *b"run"]
            elif kind < 0.5:
                ids = [*mark, 263, *noise, 265]
            end = 261
        most = int(str(request.body["sampling_params"].get("max_new_tokens", 10**6)))  # type: ignore[attr-defined]
        if len(ids) >= most or rng.random() < 0.05:
            return ids[:most], "length"
        return [*ids, end], "stop"

    def follow(self, before: str, after: str) -> None:
        """The prompt of reply ``after`` has to begin with all that was sent and returned for ``before``."""
        one, two = self._sequences.get(before), self._sequences.get(after)
        if one is not None and two is not None and not two.startswith(one):
            parted = next(at for at, (x, y) in enumerate(zip(one, two, strict=False)) if x != y) // 4
            ends = [np.frombuffer(each, np.int32)[max(0, parted - 40) : parted + 60].tolist() for each in (one, two)]
            raise AssertionError(f"#{after}# does not go on from #{before}#, they part at {parted}: {ends}")

    def prove(self, camp: Camp, rows: Iterable[Trajectory], sampled: int) -> set[str]:
        """The numbers of a session's export, which is what the engine saw, once, and lacks nothing.

        ``sampled``: ids that the session's state says were sampled.
        """
        name = camp.session_id[:12]
        numbers: Counter[str] = Counter()
        trained = 0
        for row in rows:
            assert _digest(row.token_ids) in self._sent[name], "a row is not what one call sent and returned"
            numbers.update(_check_row(row))
            trained += int(row.loss_mask.sum())
        assert trained == sampled, "each sampled id once"
        assert all(count == 1 for count in numbers.values()), "a reply is trained twice"
        assert camp.seen <= set(numbers), f"lost: {sorted(camp.seen - set(numbers))[:5]}"
        assert set(numbers) <= self._replied[name], "a number that the engine never returned"
        return set(numbers)


def _spoiled(reply: FakeReply, kind: int, *, streaming: bool) -> FakeReply:
    """A reply that cannot be recorded, or none; the engine stays alive."""
    if kind == 2:
        return replace(reply, raw=b"data: {broken\n\n" if streaming else b"{broken")
    if kind == 3:
        return replace(reply, status=500, error="boom")

    def edit(value: dict[str, Any]) -> None:
        meta = value["meta_info"]
        if kind == 0:
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:-1]
        elif kind == 1:
            meta["output_token_logprobs"][0][0] = None
        elif kind == 4:
            meta["weight_versions"][0]["start"] = 1
        elif kind == 5:
            meta["weight_versions"][0]["version"] = "v1"
        elif kind == 6:
            meta["cached_tokens"] = 10**9
        elif kind == 7:
            meta["finish_reason"] = {"type": "magic"}
        elif kind == 8:
            value["output_ids"] = [str(token) for token in value["output_ids"]]
        else:
            meta["prompt_tokens"] += 1

    return replace(reply, edit=edit)


def _digest(ids: np.ndarray[Any, np.dtype[np.int32]]) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(ids, np.int32).tobytes())


def _check_row(row: Trajectory) -> list[str]:
    """Mask, log-probabilities and versions of a row; the numbers among its trained ids."""
    assert row.turn_spans[-1].end == row.token_ids.size, "tokens behind the last sampled id"
    masked = np.zeros(row.token_ids.size, bool)
    found: list[str] = []
    for span in row.turn_spans:
        part = slice(span.start, span.end)
        trained = row.loss_mask[part]
        assert trained.min() == trained.max(), "a reply is trained whole or not at all"
        if not trained[0]:
            continue
        masked[part] = True
        ids = row.token_ids[part].astype(np.int64)
        want = (-(1 + (np.arange(ids.size) * 31 + ids) % 97) / 100).astype(np.float32)
        assert np.array_equal(row.logprobs[part], want), "log-probabilities are the engine's"
        found += _NUMBER.findall("".join(chr(token) if token < 256 else " " for token in ids.tolist()))
    assert np.array_equal(masked, row.loss_mask == 1), "a token that was not sampled is trained"
    assert np.isnan(row.logprobs[~masked]).all()
    assert np.array_equal(row.weight_version, np.where(masked, 0, -1))
    return found
