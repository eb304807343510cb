"""What a session server has to tell its placement service, collected until the next report.

Later words replace earlier ones, and what did not arrive is kept. Pure state. Depends on ``placement_wire``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tollway.router.placement_wire import EngineSaid, Grown, RefitNotice, Report, SessionRow

__all__ = ["News"]


@dataclass(slots=True)
class News:
    """Events since the last report; sessions are (key, model)."""

    grown: dict[tuple[str, str], int] = field(default_factory=dict)
    """Longest prompt plus reply so far."""
    rested: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    moved: set[tuple[str, str]] = field(default_factory=set)
    """Sessions that found a place without the service."""
    lost: dict[str, str] = field(default_factory=dict)
    """URL -> last words of engines."""
    added: dict[str, EngineSaid] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    drained: dict[str, bool] = field(default_factory=dict)
    refits: list[RefitNotice] = field(default_factory=list)

    def __bool__(self) -> bool:
        sessions = (self.grown, self.rested, self.released, self.moved)
        return any(map(bool, (*sessions, self.lost, self.added, self.removed, self.drained, self.refits)))

    def forget(self, key: str, model: str) -> None:
        """The session ended: nothing else of it matters."""
        self.grown.pop((key, model), None)
        self.moved.discard((key, model))

    def put_before(self, earlier: News) -> None:
        """Take back what did not arrive; what happened since wins."""
        self.grown = earlier.grown | self.grown
        self.rested |= earlier.rested
        self.released |= earlier.released
        self.moved |= earlier.moved
        self.lost, self.added = earlier.lost | self.lost, earlier.added | self.added
        self.removed |= earlier.removed
        self.drained = earlier.drained | self.drained
        self.refits = [*earlier.refits, *self.refits]

    def report(self, server: str, boot: str, moved: list[SessionRow], alive: list[str]) -> Report:
        """The message; ``moved`` says where the moved sessions are now, ``alive`` which engines sent tokens."""
        return Report(
            server=server,
            boot=boot,
            alive=alive,
            grown=[Grown(key=key, tokens=tokens, model=model) for (key, model), tokens in self.grown.items()],
            rested=list(self.rested),
            released=list(self.released),
            moved=moved,
            lost=self.lost,
            added=list(self.added.values()),
            removed=list(self.removed),
            drained=self.drained,
            refits=self.refits,
        )
