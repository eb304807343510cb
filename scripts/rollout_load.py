"""The two clients of the rollout benchmark, each in processes of their own.

``gateway`` is what a harness is: it opens sessions, sends its whole conversation as text with every call, and
answers each reply with tool results. ``direct`` is what an ideal harness would be that works with token ids: it
sends the same ids to the engine itself, in the bodies that the router writes, on the engines that the router
chose. Processes wait for each other before they begin, so that several are one load. Owns no process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.synchronize import Barrier

import aiohttp
import numpy as np
import orjson
import session_load as load
import uvloop

from tollway.records import Ids, Sampling, Trajectory
from tollway.router.wire import GenerateCall, Prompt, encode_call, ids_json
from tollway.session_server.client import SessionClient

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
TURN_TIMEOUT_S = 600.0
START_S = 120.0
"""Longest wait of one client process for the others: imports and texts take seconds on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one session looks like, in tokens."""

    turns: int = 6
    prompt: int = 1024
    """Of the first call, about."""
    new: int = 256
    """Of a reply, on average."""
    spread: float = 0.0
    """Replies have between ``new`` less and ``new`` more this share of it, evenly. 0: sessions that began together
    stay in step, and whatever stands between two turns leaves the engines idle."""
    tool: int = 256
    """Of what follows a reply, about."""
    chars_per_token: float = 1.0
    """Of the family's text."""

    @property
    def total(self) -> int:
        """Tokens that a session holds at its end, about."""
        return self.prompt + self.turns * self.new + (self.turns - 1) * self.tool


@dataclass(frozen=True, slots=True)
class DirectTurn:
    """One call of the direct client."""

    engine: str
    """Address of the engine that the router chose for it."""
    added: Ids
    """[n] ids that stand between the reply before and this reply."""
    sampling: Sampling
    """As the router sent it, with the tokens that it got as the limit."""


@dataclass(frozen=True, slots=True)
class SessionRun:
    """How one session went."""

    name: str
    began_s: list[float]
    """Monotonic seconds of each turn's request; one clock for all processes of a machine."""
    latencies_s: list[float]
    """Of each turn, from the request to the last byte of its reply."""
    prompt_tokens: list[int]
    output_tokens: list[int]
    cached_tokens: list[int]
    """Of the direct client's calls as engines said; the gateway's are in its ledger."""


@dataclass(slots=True)
class Round:
    """One load, whole: all its places, each with the sessions that were there one after the other."""

    places: list[list[SessionRun]] = field(default_factory=list)
    wall_s: float = 0.0
    """From the common start to the last reply of all."""

    @property
    def sessions(self) -> list[SessionRun]:
        """Of all places."""
        return [session for place in self.places for session in place]

    @property
    def output_tokens(self) -> int:
        """Sampled by all."""
        return sum(sum(each.output_tokens) for each in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        """Sent by all."""
        return sum(sum(each.prompt_tokens) for each in self.sessions)

    @property
    def turns(self) -> int:
        """Calls of all."""
        return sum(len(each.latencies_s) for each in self.sessions)

    @property
    def tokens_s(self) -> float:
        """Output tokens per second, with the start, when all come at once, and the end, when the last is alone."""
        return self.output_tokens / self.wall_s

    @property
    def steady_tokens_s(self) -> float:
        """Output tokens per second while every place is in the middle of its work.

        From the moment when each has its first reply until one has its last; the tokens of a reply count evenly over
        its turn. 0 where there is no such time.
        """
        turns = [
            [
                (began, began + latency, tokens)
                for each in place
                for began, latency, tokens in zip(each.began_s, each.latencies_s, each.output_tokens, strict=True)
            ]
            for place in self.places
        ]
        left, right = max(place[0][1] for place in turns), min(place[-1][1] for place in turns)
        if right <= left:
            return 0.0
        within = (
            tokens * max(0.0, min(ended, right) - max(began, left)) / (ended - began)
            for place in turns
            for began, ended, tokens in place
        )
        return sum(within) / (right - left)

    def latency_s(self, share: float) -> float:
        """The turn latency that ``share`` of all turns stay below."""
        ordered = sorted(latency for each in self.sessions for latency in each.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@dataclass(frozen=True, slots=True)
class Part:
    """What one process played."""

    places: list[list[SessionRun]]
    began: float
    ended: float
    """Monotonic seconds of the start and of the last reply."""


def joined(parts: Sequence[Part]) -> Round:
    """The parts of several processes as one round."""
    places = [place for part in parts for place in part.places]
    return Round(places, max(part.ended for part in parts) - min(part.began for part in parts))


def schedule(row: Trajectory) -> list[DirectTurn]:
    """What the direct client does in the place of an exported session."""
    turns, at = [], 0
    for turn, span in enumerate(row.turn_spans):
        sampling = row.turn_sampling[turn] if row.turn_sampling else row.sampling
        engine = row.engine_ids[turn].rpartition("#")[0]
        count = span.end - span.start
        turns.append(DirectTurn(engine, row.token_ids[at : span.start], replace(sampling, max_new_tokens=count)))
        at = span.end
    return turns


# -- processes ------------------------------------------------------------------------------------------


_barrier: list[Barrier] = []
"""Of the processes of one load; each is told of it when it starts."""


def join(barrier: Barrier) -> None:
    """Called once in each client process."""
    _barrier.append(barrier)


def gateway(url: str, key: str, places: Sequence[Sequence[tuple[int, int]]], sizes: Sizes) -> Part:
    """Play sessions through the session server, as one client process of those that ``join``ed.

    Each place plays its sessions one after the other. Of (number, seat) of a session the number seeds its texts, no
    two of a run alike, and the seat the lengths of its replies, the same in every round. Raises ``RuntimeError`` for
    any answer that is not a reply.
    """
    texts = load.Texts(places[0][0][0] if places else 0)
    talks = [[_Talk(number, seat, sizes, texts) for number, seat in place] for place in places]
    return uvloop.run(_together([[talk.play(url, key) for talk in place] for place in talks]))


def direct(places: Sequence[Sequence[tuple[str, Sequence[DirectTurn]]]]) -> Part:
    """Play (name, calls) straight to the engines; otherwise as ``gateway``."""
    return uvloop.run(_together([[_direct(name, plan) for name, plan in place] for place in places]))


Player = Callable[[aiohttp.ClientSession], Awaitable[SessionRun]]


async def _together(places: Sequence[Sequence[Player]]) -> Part:
    timeout = aiohttp.ClientTimeout(total=TURN_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        _barrier[0].wait(START_S)  # nothing else runs in this loop yet
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one_by_one(players, http)) for players in places]
        ended = time.monotonic()
    return Part([task.result() for task in tasks], began, ended)


async def _one_by_one(players: Sequence[Player], http: aiohttp.ClientSession) -> list[SessionRun]:
    return [await player(http) for player in players]


# -- through the session server ---------------------------------------------------------------------------


class _Talk:
    """One session as its harness sees it. Texts are made before the clock runs."""

    def __init__(self, number: int, seat: int, sizes: Sizes, texts: load.Texts) -> None:
        self._sizes = sizes
        chance = random.Random(seat)
        self.replies = [
            max(1, round(sizes.new * (1 + sizes.spread * chance.uniform(-1, 1)))) for _ in range(sizes.turns)
        ]
        # The numbers make sure that no two sessions of a run share a prefix.
        self._first = _cut(f"Session {number}. " + texts.piece(self._chars(sizes.prompt)), self._chars(sizes.prompt))
        self._results = [
            _cut(texts.piece(self._chars(sizes.tool)), self._chars(sizes.tool)) for _ in range(sizes.turns - 1)
        ]

    def play(self, url: str, key: str) -> Player:
        """All of it: the session's opening and its turns."""

        async def run(http: aiohttp.ClientSession) -> SessionRun:
            client = SessionClient(url, key, http=http)
            session = await client.create()
            target = f"{session.openai_base_url}/chat/completions"
            headers = {"authorization": f"Bearer {session.token}", "content-type": "application/json"}
            messages: list[dict[str, object]] = [{"role": "user", "content": self._first}]
            out = SessionRun(session.session_id, [], [], [], [], [])
            for turn in range(self._sizes.turns):
                body = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": self.replies[turn]}
                began = time.monotonic()
                async with http.post(target, data=orjson.dumps(body), headers=headers) as response:
                    data = await response.read()
                out.began_s.append(began)
                out.latencies_s.append(time.monotonic() - began)
                if response.status != 200:
                    raise RuntimeError(f"turn {turn} of {session.session_id}: {response.status} {data[:500]!r}")
                value = orjson.loads(data)
                out.prompt_tokens.append(value["usage"]["prompt_tokens"])
                out.output_tokens.append(value["usage"]["completion_tokens"])
                if turn < len(self._results):
                    messages += answered(value["choices"][0]["message"], self._results[turn])
            await client.close(session.session_id)  # the next one of this place may want its room
            return out

        return run

    def _chars(self, tokens: int) -> int:
        return max(1, round(tokens * self._sizes.chars_per_token))


def answered(message: dict[str, object], result: str) -> list[dict[str, object]]:
    """A reply and what its harness says to it: a result for each call, or text when it made none."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not calls:
        return [message, {"role": "user", "content": result}]
    size = max(1, len(result) // len(calls))
    return [
        message,
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": result[at * size : (at + 1) * size]}
            for at, call in enumerate(calls)
        ),
    ]


def _cut(text: str, chars: int) -> str:
    return text.encode("ascii", "replace").decode()[:chars]


# -- straight to the engines ------------------------------------------------------------------------------


def _direct(name: str, plan: Sequence[DirectTurn]) -> Player:
    async def run(http: aiohttp.ClientSession) -> SessionRun:
        out = SessionRun(name, [], [], [], [], [])
        prompt = Prompt((), 0)
        for turn, step in enumerate(plan):
            prompt = prompt.extended(ids_json(step.added), int(step.added.size))
            call = GenerateCall(rid=f"{name[:12]}-{turn}", prompt=prompt, sampling=step.sampling, routing_key=name)
            headers = {"content-type": "application/json", "X-SMG-Routing-Key": name}
            began = time.monotonic()
            async with http.post(f"{step.engine}/generate", data=encode_call(call), headers=headers) as response:
                data = await response.read()
            out.began_s.append(began)
            out.latencies_s.append(time.monotonic() - began)
            if response.status != 200:
                raise RuntimeError(f"{step.engine}: {response.status} {data[:500]!r}")
            value = orjson.loads(data)
            sampled = np.array(value["output_ids"], np.int32)
            out.prompt_tokens.append(prompt.size)
            out.output_tokens.append(int(sampled.size))
            out.cached_tokens.append(int(value["meta_info"]["cached_tokens"]))
            prompt = prompt.extended(ids_json(sampled), int(sampled.size))
        return out

    return run
