"""A model of one inference engine: continuous batching, prefill before decode, and a prefix cache with LRU eviction.

What is modelled: prefill of uncached tokens stops decoding meanwhile; a decode step costs a constant plus the reading
of every running request's KV; a request starts when its prompt and reply fit beside those that run; KV of requests
that do not run stays until room is needed, and goes by least recent use, newest tokens first, as a radix tree's leaves
do; siblings share the KV of their first prompt; a flush drops all KV, and running requests are computed again. What is
not: retraction, host and disk tiers, chunked prefill mixed with decode, network time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LARGE", "SMALL", "Call", "EngineModel", "SimEngine"]


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speeds and sizes of an engine: a dense 32B model on four H200, by default.

    Scaled from the dense 0.6B model measured on one H200 (``SMALL``): prefill by arithmetic (155 TFLOP/s a GPU), step
    by layers (64 against 28) plus reading the weights, KV by its bytes over the memory's bandwidth.
    """

    kv_tokens: int = 1_500_000
    prefill_tokens_per_s: float = 9_450.0
    step_s: float = 0.0092
    """A decode step, or a prefill batch, without any token."""
    kv_read_s: float = 13.65e-9
    """Per token of context and step: 262,144 bytes of KV at 4 * 4.8 TB/s."""
    prefill_batch_tokens: int = 8192
    max_running: int = 256


LARGE = EngineModel()
SMALL = EngineModel(prefill_tokens_per_s=130_000.0, step_s=0.00278, kv_read_s=23.9e-9)
"""As measured: with 1,024 prompt and 256 sampled tokens 1, 64 and 256 requests at once gave 352, 9,847 and 14,132
tokens/s, which fits 2.78 ms a step and 14.9 ms a request; of the latter 7 ms are KV reading (114,688 bytes a token)."""


@dataclass(slots=True, eq=False)
class Call:
    """One model call."""

    session: str
    group: str
    prompt: int
    sampled: int
    shared: int = 0
    """Leading tokens that all siblings of the group have."""
    cached: int | None = None
    """Prompt tokens found in the cache at its first prefill."""
    generated: int = 0
    """Tokens sampled before a flush interrupted it."""
    finish_at: float = 0.0
    """Value of the engine's step counter at which it ends."""

    @property
    def room(self) -> int:
        """KV that it takes at its end."""
        return self.prompt + self.sampled


class SimEngine:
    """One engine in virtual time. ``wake(at, engine, tick)`` asks to be called back by ``event``."""

    def __init__(
        self,
        number: int,
        model: EngineModel,
        *,
        wake: Callable[[float, SimEngine, int], None],
        done: Callable[[float, SimEngine, Call], None],
    ) -> None:
        self.number, self.model = number, model
        self.alive = True
        self.epoch = 0
        """Flushes so far."""
        self.evicted_tokens = 0
        self.computed_tokens = 0
        self.busy_s = 0.0
        self._wake, self._done = wake, done
        self._waiting: deque[Call] = deque()
        self._batch: list[Call] = []
        self._running: list[tuple[float, int, Call]] = []
        self._steps, self._step_s, self._since = 0.0, model.step_s, 0.0
        self._cached: OrderedDict[str, int] = OrderedDict()
        """Tokens by session, and by group for shared first prompts; least recently used first."""
        self._cached_tokens = self._locked = 0
        self._users: dict[str, int] = {}
        """Running calls by shared first prompt; while there is one the prompt is locked."""
        self._rooms, self._ends = 0, 0.0
        """Sums of ``room`` and ``finish_at`` over the running calls."""
        self._tick = self._numbers = 0
        self._stalled_until = 0.0

    @property
    def load(self) -> int:
        """Calls that run or wait."""
        return len(self._waiting) + len(self._batch) + len(self._running)

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, now: float, call: Call) -> None:
        """A call arrives."""
        self._waiting.append(call)
        if not self._batch and now >= self._stalled_until:
            self._advance(now)
            self._schedule(now)

    def event(self, now: float, tick: int) -> None:
        """A prefill or the next reply is done, unless something came between."""
        if tick != self._tick or not self.alive:
            return
        self._advance(now)
        if self._batch:
            for call in self._batch:
                call.finish_at = self._steps + call.sampled - call.generated - 1
                self._numbers += 1
                heapq.heappush(self._running, (call.finish_at, self._numbers, call))
                self._rooms += call.room
                self._ends += call.finish_at
            self._batch = []
        ended = []
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            ended.append(heapq.heappop(self._running)[2])
        for call in ended:
            self._rooms -= call.room
            self._ends -= call.finish_at
            self._unlock(call)
        self._schedule(now)
        for call in ended:
            self._done(now, self, call)

    def _advance(self, now: float) -> None:
        """Bring the running replies up to ``now``; they stand still during a prefill."""
        if self._running and not self._batch and now > self._since >= self._stalled_until:
            self._steps += (now - self._since) / self._step_s
        if (self._running or self._batch) and now > self._since:
            self.busy_s += now - self._since
        self._since = now

    def _schedule(self, now: float) -> None:
        self._tick += 1
        tokens = self._start_waiting()
        if self._batch:
            self._wake(now + self.model.step_s + tokens / self.model.prefill_tokens_per_s, self, self._tick)
        elif self._running:
            context = self._rooms - (self._ends - len(self._running) * self._steps)
            self._step_s = self.model.step_s + self.model.kv_read_s * context
            left = max(0.0, self._running[0][0] - self._steps)
            self._wake(now + left * self._step_s, self, self._tick)

    def _start_waiting(self) -> int:
        """Move the calls that fit into the prefill batch; tokens to compute."""
        tokens = 0
        while self._waiting and tokens < self.model.prefill_batch_tokens:
            if len(self._running) + len(self._batch) >= self.model.max_running:
                break
            hit = self._admit(self._waiting[0])
            if hit is None:
                break
            call = self._waiting.popleft()
            self._batch.append(call)
            if call.cached is None:
                call.cached = hit
            tokens += call.prompt + call.generated - hit
        self.computed_tokens += tokens
        return tokens

    # -- the cache ---------------------------------------------------------------------------------

    def _admit(self, call: Call) -> int | None:
        """Lock room for a call and return its cached tokens; ``None`` when it does not fit now."""
        prompt = f"/{call.group}"  # the shared first prompt is a node of its own, above those of its sessions
        locked = bool(call.shared) and prompt in self._users
        need = call.room - call.shared + (0 if locked else call.shared)
        if self._locked and self._locked + need > self.model.kv_tokens:
            return None
        have = call.shared if locked else self._cached.get(prompt, 0)
        if have == call.shared:
            have += self._cached.get(call.session, 0)
        self._drop(call.session)
        if call.shared:
            self._drop(prompt)
            self._users[prompt] = self._users.get(prompt, 0) + 1
        self._locked += need
        self._evict(self._cached_tokens + self._locked - self.model.kv_tokens)
        return min(have, call.prompt + call.generated - 1)

    def _unlock(self, call: Call) -> None:
        """The KV of an ended call stays in the cache; that of its last sampled token was never computed."""
        self._locked -= call.room - call.shared
        self._keep(call.session, call.room - 1 - call.shared)
        if not call.shared:
            return
        prompt = f"/{call.group}"
        self._users[prompt] -= 1
        if not self._users[prompt]:
            del self._users[prompt]
            self._locked -= call.shared
            self._keep(prompt, call.shared)  # after its sessions: a node is never older than what hangs on it

    def _keep(self, name: str, tokens: int) -> None:
        self._drop(name)
        self._cached[name] = tokens
        self._cached_tokens += tokens

    def _drop(self, name: str) -> None:
        self._cached_tokens -= self._cached.pop(name, 0)

    def _evict(self, tokens: int) -> None:
        while tokens > 0 and self._cached:
            name = next(iter(self._cached))
            held = self._cached[name]
            taken = min(held, tokens)
            if taken == held:
                del self._cached[name]
            else:
                self._cached[name] = held - taken
            self._cached_tokens -= taken
            self.evicted_tokens += taken
            tokens -= taken

    # -- faults ------------------------------------------------------------------------------------

    def flush(self, now: float, pause_s: float) -> None:
        """New weights: nothing runs for ``pause_s``, all KV is dropped, running replies are computed again."""
        self._advance(now)
        self.epoch += 1
        interrupted = [call for _, _, call in sorted(self._running)]
        for call in interrupted:
            call.generated = max(
                call.generated, min(call.sampled - 1, int(call.sampled - (call.finish_at - self._steps)))
            )
        self._waiting.extendleft(reversed(self._batch + interrupted))
        self._batch, self._running = [], []
        self._forget()
        self._stalled_until = now + pause_s
        self._tick += 1
        self._wake(now + pause_s, self, self._tick)

    def lose(self) -> list[Call]:
        """The process dies; the calls that it had."""
        self.alive = False
        self._tick += 1
        lost = [call for _, _, call in self._running] + self._batch + list(self._waiting)
        self._waiting.clear()
        self._batch, self._running = [], []
        self._forget()
        return lost

    def _forget(self) -> None:
        self._cached.clear()
        self._users.clear()
        self._cached_tokens = self._locked = self._rooms = 0
        self._ends = 0.0
