"""One run of the routing simulator: a trace, a policy, some engines, virtual time.

Accounts every call as the cache ledger does: prompt P, cached C, possible I = min(parent's prompt + output - 1, P - 1),
waste I - C with the first cause that holds: lost (its engine died), moved (another engine), flushed (a refit), evicted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sim_engine import Call, EngineModel, SimEngine
from sim_policies import Policy
from sim_traces import TraceSession

__all__ = ["Fault", "Outcome", "Simulation"]

SAMPLE_S = 5.0
"""Virtual seconds between two readings of the loads."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something happens once ``after`` sessions have ended."""

    after: int
    kind: str
    """``lose`` (the busiest engine), ``join`` or ``refit`` (all engines flush)."""


@dataclass(slots=True)
class Outcome:
    """Sums of one run. Tokens and virtual seconds."""

    policy: str
    calls: int = 0
    prompt: int = 0
    cached: int = 0
    """min(C, I) of all calls."""
    possible: int = 0
    full_prompt: int = 0
    full_cached: int = 0
    """The same while every agent's place was taken: from the first arrival to the last."""
    shared: int = 0
    """C beyond I: a sibling's prompt."""
    computed: int = 0
    """Prompt tokens computed, those of lost and interrupted calls included."""
    waste: Counter[str] = field(default_factory=Counter)
    makespan_s: float = 0.0
    last_start_s: float = 0.0
    """When the last session could start: what is left is the tail of the long ones."""
    load_ratios: list[float] = field(default_factory=list)
    """Largest over mean resident tokens of the engines, at every reading while new sessions still came."""
    resident_peak: int = 0
    """Largest sum of its live sessions' tokens that an engine had."""
    admission_waits_s: list[float] = field(default_factory=list)
    redispatched: int = 0
    ended: int = 0

    @property
    def efficiency(self) -> float:
        return self.cached / self.possible if self.possible else 1.0

    @property
    def efficiency_without_faults(self) -> float:
        """Leaves out what a lost engine, a move or a flush cost."""
        kept = self.possible - self.waste["lost"] - self.waste["moved"] - self.waste["flushed"]
        return self.cached / kept if kept else 1.0

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt

    @property
    def full_hit_rate(self) -> float:
        """Hit rate while all places were taken."""
        return self.full_cached / self.full_prompt if self.full_prompt else 0.0

    @property
    def ceiling(self) -> float:
        return self.possible / self.prompt

    @property
    def load_max_mean(self) -> float:
        return sum(self.load_ratios) / len(self.load_ratios) if self.load_ratios else 1.0


@dataclass(slots=True)
class _Agent:
    """A session that has arrived."""

    trace: TraceSession
    arrived: float
    turn: int = 0
    length: int = 0
    """Tokens after its last reply: what the next call continues."""
    engine: int | None = None
    """Of its last reply."""
    epoch: int = 0
    sent_at: float = 0.0


class Simulation:
    """Replays a trace: ``live`` agents at once, the next one arrives when one ends."""

    def __init__(
        self,
        trace: Sequence[TraceSession],
        policy: Callable[..., Policy],
        *,
        engines: int,
        live: int,
        model: EngineModel,
        faults: Sequence[Fault] = (),
        seed: int = 0,
    ) -> None:
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = 0
        self._now = 0.0
        self._model = model
        self._policy = policy(model, seed, start=self._start, send=self._send)
        self._trace = iter(trace)
        self._sizes = {each.group: each.turns[0][0] for each in trace if each.group}
        self._agents: dict[str, _Agent] = {}
        self._arriving = True
        self._live = live
        self._faults = sorted(faults, key=lambda each: each.after)
        self.engines: list[SimEngine] = []
        self.out = Outcome(self._policy.name)
        for _ in range(engines):
            self._join()

    def run(self) -> Outcome:
        """To the end of the trace."""
        for _ in range(self._live):
            self._arrive()
        self._after(SAMPLE_S, self._sample)
        events = self._events
        while events:
            self._now, _, act = heapq.heappop(events)
            act(self._now)
        self.out.computed = sum(each.computed_tokens for each in self.engines)
        if self._agents:
            raise RuntimeError(f"{len(self._agents)} sessions never ended: the policy lost them")
        return self.out

    # -- events ------------------------------------------------------------------------------------

    def _at(self, at: float, act: Callable[[float], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at, self._numbers, act))

    def _after(self, seconds: float, act: Callable[[float], None]) -> None:
        self._at(self._now + seconds, act)

    def _arrive(self) -> None:
        session = next(self._trace, None)
        if session is None:
            self._arriving = False
            return
        self._agents[session.name] = _Agent(session, self._now)
        self._policy.arrive(self._now, session.name, session.group, session.turns[0][0])

    def _start(self, name: str) -> None:
        self.out.last_start_s = self._now
        self.out.admission_waits_s.append(self._now - self._agents[name].arrived)
        self._after(0.0, lambda _: self._call(name))

    def _call(self, name: str) -> None:
        agent = self._agents[name]
        added, sampled, _ = agent.trace.turns[agent.turn]
        group = agent.trace.group
        shared = self._sizes.get(group, 0)
        agent.sent_at = self._now
        self._policy.call(self._now, Call(name, group, agent.length + added, sampled, shared))

    def _send(self, call: Call, engine: int) -> None:
        if self.engines[engine].alive:
            self.engines[engine].submit(self._now, call)
        else:
            self._failed(call, engine)

    def _failed(self, call: Call, engine: int) -> None:
        self.out.redispatched += 1
        self._policy.failed(self._now, call, engine)
        call.generated, call.cached = 0, None
        self._policy.call(self._now, call)

    def _replied(self, now: float, engine: SimEngine, call: Call) -> None:
        agent = self._agents[call.session]
        self._account(agent, engine, call)
        agent.length, agent.engine, agent.epoch = call.room, engine.number, engine.epoch
        self._policy.replied(now, call, engine.number, now - agent.sent_at)
        wait_s = agent.trace.turns[agent.turn][2]
        agent.turn += 1
        if agent.turn < len(agent.trace.turns):
            self._after(wait_s, lambda _: self._call(call.session))
        else:
            self._end(call.session)

    def _end(self, name: str) -> None:
        del self._agents[name]
        self.out.ended += 1
        self.out.makespan_s = self._now
        self._policy.ended(self._now, name)
        while self._faults and self.out.ended >= self._faults[0].after:
            self._fault(self._faults.pop(0))
        self._arrive()

    # -- accounts ----------------------------------------------------------------------------------

    def _account(self, agent: _Agent, engine: SimEngine, call: Call) -> None:
        out, hit = self.out, call.cached or 0
        possible = max(0, min(agent.length - 1, call.prompt - 1))
        out.calls += 1
        out.prompt += call.prompt
        if self._arriving:
            out.full_prompt += call.prompt
            out.full_cached += min(hit, possible)
        out.possible += possible
        out.cached += min(hit, possible)
        out.shared += max(0, hit - possible)
        if hit < possible:
            out.waste[self._cause(agent, engine)] += possible - hit

    def _cause(self, agent: _Agent, engine: SimEngine) -> str:
        if agent.engine is not None and agent.engine != engine.number:
            return "moved" if self.engines[agent.engine].alive else "lost"
        return "flushed" if agent.epoch != engine.epoch else "evicted"

    def _sample(self, now: float) -> None:
        loads = {each.number: 0 for each in self.engines if each.alive}
        for agent in self._agents.values():
            if agent.engine in loads:
                loads[agent.engine] += agent.length
        mean = sum(loads.values()) / len(loads)
        if self._arriving and mean:
            self.out.load_ratios.append(max(loads.values()) / mean)
            self.out.resident_peak = max(self.out.resident_peak, *loads.values())
        if self._agents:
            self._after(SAMPLE_S, self._sample)

    # -- faults ------------------------------------------------------------------------------------

    def _join(self) -> None:
        engine = SimEngine(
            len(self.engines),
            self._model,
            wake=lambda at, engine, tick: self._at(at, lambda now: engine.event(now, tick)),
            done=self._replied,
        )
        self.engines.append(engine)
        self._policy.engine_joined(self._now, engine.number)

    def _fault(self, fault: Fault) -> None:
        alive = [each for each in self.engines if each.alive]
        if fault.kind == "refit":
            for each in alive:
                each.flush(self._now, REFIT_S)
        elif fault.kind == "join":
            self._join()
        else:
            victim = max(alive, key=lambda each: (each.load, -each.number))
            lost = victim.lose()
            self._policy.engine_lost(self._now, victim.number)
            for call in lost:
                self._failed(call, victim.number)


REFIT_S = 2.0
"""Seconds for which a refit pauses an engine."""
