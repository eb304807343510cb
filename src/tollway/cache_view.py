"""The prefix cache of a running server in the terminal: ``tollway cache``. rich draws it.

Owns no figure: all of them come from ``GET /cache``. Live, it also shows the last minute, which sums since the
start hide. Colours repeat what the text says. Only the command line uses it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tollway.errors import EngineLost, TollwayError
from tollway.session_server.client import SessionClient

__all__ = ["CacheView", "show_cache"]

Figures = Mapping[str, object]
SESSIONS = 8
"""Most wasteful sessions shown."""
_ENGINES = 12
"""Engines shown; of more than these the most wasteful ones."""
_RECENT_S = 60.0
_WIDE = 104
"""Columns from which on what to do about a cause fits beside it."""
_BAR = 20
_FIRST = 22
"""Columns of names."""
_MIN_WIDTHS = {"calls": 7, "tokens": 7, "prompt": 7, "share": 7, "wasted": 7}
_MARKS, _ASCII_MARKS = ("█", "▓", "░"), ("#", "!", ".")
_STYLES = {"cached": "green", "wasted": "red", "not possible": "bright_black"}

CAUSES: dict[str, tuple[str, str]] = {
    "moved": ("session moved", "see GET /engines: why it had to move"),
    "moved/engine_lost": ("moved: engine lost", "an engine died; its last words are in GET /engines"),
    "moved/migration": ("moved: migration", "waiting cost more than computing again"),
    "moved/drain": ("moved: drain", "its engine was drained or removed"),
    "moved/version": ("moved: version", "its engine had not the wanted weights"),
    "moved/gateway": ("moved: gateway", "the outer gateway chose another engine"),
    "moved/rank": ("moved: other rank", "keep routed_dp_rank on the way to the engine"),
    "moved/server_restarted": ("moved: server restart", "its engine was gone when the server came back"),
    "moved/unrecorded": ("moved: not recorded", "branches of a session that moved earlier"),
    "engine_restarted": ("engine restarted", "it came back empty; see its log"),
    "refit_flush": ("refit flush", "one prefill per live session and refit"),
    "namespace": ("other namespace", "extra_key changed within a session"),
    "parent_in_flight": ("parent in flight", "branches start before the call they continue ends"),
    "page_alignment": ("page alignment", "less than a page a call; a smaller --page-size"),
    "host_tier": ("host tier", "kept on the host or in storage, not on the GPU"),
    "eviction": ("evicted", "fewer sessions at once, more KV, or more engines"),
    "server_restarted": ("server restarted", "what it knew of the cache went with it"),
    "unknown": ("UNKNOWN", "no cause found: look into it, see docs/cache.md"),
}
"""Title and what to do, by cause of waste."""
BEYOND: dict[str, tuple[str, str]] = {
    "first_call": ("first prompts", "shared among a group's sessions at best"),
    "new": ("new since then", "what tools and users added: has to be computed"),
    "thinking_stripped": ("thinking dropped", "--strip-thinking-cache on the engine"),
    "prefix_mismatch": ("prefix changed", "the harness rewrote its history: compaction, edits"),
    "embeds": ("sent as embeddings", "no cache knows them"),
    "logprob_cap": ("prompt logprobs", "logprob_start_len must be -1"),
    "page_alignment": ("page rests", "tails that do not fill a page"),
}
"""Title and explanation, by reason why a token could not have been cached."""


@dataclass(slots=True)
class CacheView:
    """Draws one answer of ``GET /cache`` after the other."""

    url: str
    ascii_only: bool = False
    """Bars of ``#`` for terminals without block characters."""
    problem: str = ""
    """Why the last question got no answer."""
    _answers: deque[tuple[float, Figures]] = field(default_factory=deque)
    """(monotonic seconds, answer), oldest first, of the last minute."""

    def take(self, answer: Figures, now: float) -> None:
        """A new answer, at ``now`` in monotonic seconds."""
        self.problem = ""
        if self._answers and _number(self._answers[-1][1], "calls") > _number(answer, "calls"):
            self._answers.clear()  # the server began anew
        self._answers.append((now, answer))
        while len(self._answers) > 2 and self._answers[1][0] <= now - _RECENT_S:
            self._answers.popleft()

    def render(self, width: int) -> RenderableType:
        """Everything known by now, for a terminal of ``width`` columns."""
        head = Text.assemble(("prefix cache", "bold"), f"  {self.url}", no_wrap=True, overflow="ellipsis")
        parts: list[RenderableType] = [head]
        if self.problem:
            parts.append(Text(self.problem, style="bold red"))
        if not self._answers:
            return Group(*parts)
        answer = self._answers[-1][1]
        if not _number(answer, "calls"):
            parts.append(Text("no call yet whose engine said what was cached"))
        else:
            parts += [self._strip(answer, width), Text(), self._places(answer, width), Text()]
            parts += [self._causes(answer, width), Text(), self._beyond(answer, width)]
            if answer.get("sessions"):
                parts += [Text(), self._sessions(answer, width)]
        parts += [Text(note, style="dim") for note in ("", *_notes(answer))]
        return Group(*parts)

    def _strip(self, answer: Figures, width: int) -> Text:
        """All prompt tokens as one line, and what its parts are."""
        prompt = _number(answer, "prompt_tokens")
        sizes = {
            "cached": _number(answer, "useful_tokens"),
            "wasted": _number(answer, "wasted_tokens"),
            "not possible": prompt - _number(answer, "possible_tokens"),
        }
        marks = dict(zip(sizes, _ASCII_MARKS if self.ascii_only else _MARKS, strict=True))
        cells = {name: round(min(width, _WIDE) * size / prompt) if prompt else 0 for name, size in sizes.items()}
        cells |= {name: 1 for name, size in sizes.items() if size and not cells[name]}
        cells["cached"] = max(0, min(width, _WIDE) - cells["wasted"] - cells["not possible"])
        line = Text(no_wrap=True, overflow="crop")
        for name, count in cells.items():
            line.append(marks[name] * count, style=_STYLES[name])
        line.append("\n")
        for name, size in sizes.items():
            line.append(f"{marks[name]} ", style=_STYLES[name])
            line.append(f"{name} {_percent(size, prompt)}    ")
        return line

    def _places(self, answer: Figures, width: int) -> Table:
        """The run, its last minute, engines, and models when there are several."""
        table = _table(width, "", "calls", "prompt", "hit rate", "ceiling", "efficiency", "wasted")
        table.add_row("run", *_place(answer), style="bold")
        if (recent := self._recent()) is not None:
            seconds, figures = recent
            table.add_row(f"last {seconds:.0f} s", *_place(figures))
        engines, models = (cast("Mapping[str, Figures]", answer[kind]) for kind in ("engines", "models"))
        worst = sorted(engines, key=lambda name: -_number(engines[name], "wasted_tokens"))[:_ENGINES]
        for name in sorted(worst, key=lambda name: (len(name), name)):  # e2 before e10
            table.add_row(f"engine {name}", *_place(engines[name]))
        if len(engines) > len(worst):
            table.add_row(f"{len(engines) - len(worst)} more engines", style="dim")
        for name, figures in models.items() if len(models) > 1 else ():
            table.add_row(f"model {name or 'policy'}", *_place(figures))
        return table

    def _recent(self) -> tuple[float, Figures] | None:
        """(seconds, sums of that time) up to the last answer; ``None`` without two answers."""
        if len(self._answers) < 2:
            return None
        (start, before), (end, now) = self._answers[0], self._answers[-1]
        names = ("calls", "prompt_tokens", "possible_tokens", "useful_tokens", "wasted_tokens")
        return end - start, {name: _number(now, name) - _number(before, name) for name in names}

    def _causes(self, answer: Figures, width: int) -> RenderableType:
        if not _number(answer, "wasted_tokens"):
            return Text("nothing wasted: whatever could be cached was cached", style="green")
        return self._shares("wasted, by cause", "what to do", dict(_causes_of(answer)), CAUSES, width)

    def _beyond(self, answer: Figures, width: int) -> Table:
        return self._shares("not possible, by cause", "why", _counts(answer, "beyond"), BEYOND, width)

    def _shares(
        self, title: str, said: str, counts: Mapping[str, int], words: Mapping[str, tuple[str, str]], width: int
    ) -> Table:
        """Counts by cause, the largest first, with their shares; wide ones with what is ``said`` of each."""
        whole, wide = sum(counts.values()), width >= _WIDE
        table = _table(width, title, "tokens", "share", "", *([said] if wide else []))
        for cause, tokens in sorted(counts.items(), key=lambda each: -each[1]):
            name, text = words.get(cause, (cause, ""))
            table.add_row(
                name,
                _short(tokens),
                _percent(tokens, whole),
                self._bar(tokens, whole),
                *([text] if wide else []),
                style="bold red" if cause == "unknown" else "",
            )
        return table

    def _sessions(self, answer: Figures, width: int) -> Table:
        table = _table(width, "most wasteful sessions", "calls", "prompt", "efficiency", "wasted", "mostly")
        for figures in cast("list[Figures]", answer["sessions"]):
            causes = sorted(_causes_of(figures), key=lambda each: -each[1])
            mostly = CAUSES.get(causes[0][0], (causes[0][0], ""))[0] if causes else ""
            possible = _number(figures, "possible_tokens")
            table.add_row(
                str(figures["session_id"])[:16],
                f"{_number(figures, 'calls'):,}",
                _short(_number(figures, "prompt_tokens")),
                _percent(_number(figures, "useful_tokens"), possible),
                _short(_number(figures, "wasted_tokens")),
                mostly,
            )
        return table

    def _bar(self, part: int, whole: int) -> Text:
        filled = max(round(_BAR * part / whole) if whole else 0, int(part > 0))  # what there is shows, however little
        full, _, empty = _ASCII_MARKS if self.ascii_only else _MARKS
        return Text.assemble(full * filled, (empty * (_BAR - filled), "not bold bright_black"))


def show_cache(url: str, key: str, *, watch: bool, as_json: bool, interval_s: float = 2.0) -> int:
    """Print the figures once, or keep them on the screen until Ctrl-C. Returns the exit status.

    Raises the client's errors: no server there, a wrong key. While watching they are shown, and it goes on.
    """
    return asyncio.run(_show(url.rstrip("/"), key, watch=watch and not as_json, as_json=as_json, interval_s=interval_s))


async def _show(url: str, key: str, *, watch: bool, as_json: bool, interval_s: float) -> int:
    async with aiohttp.ClientSession() as http:
        client = SessionClient(url, key, http=http, timeout_s=10.0, retry_s=0.0)
        answer = await client.cache(sessions=SESSIONS)
        if as_json:
            sys.stdout.write(json.dumps(answer, indent=2) + "\n")
            return 0
        console = Console(highlight=False)
        view = CacheView(url, ascii_only=console.options.ascii_only)
        view.take(answer, time.monotonic())
        if not watch:
            console.print(view.render(console.width))
            return 0
        with Live(view.render(console.width), console=console, auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(interval_s)
                try:
                    view.take(await client.cache(sessions=SESSIONS), time.monotonic())
                except EngineLost as error:
                    view.problem = f"{error} (these figures are the last ones)"
                except TollwayError as error:
                    view.problem = str(error)
                live.update(view.render(console.width), refresh=True)


def _table(width: int, *titles: str) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0) if width >= _WIDE else (0, 1, 0, 0)
    )
    for at, title in enumerate(titles):
        left = at == 0 or title in ("", "what to do", "why", "mostly")
        table.add_column(
            title,
            justify="left" if left else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=_FIRST if at == 0 else _MIN_WIDTHS.get(title),
        )
    return table


def _place(figures: Figures) -> tuple[str, ...]:
    prompt, possible = _number(figures, "prompt_tokens"), _number(figures, "possible_tokens")
    useful = _number(figures, "useful_tokens")
    return (
        f"{_number(figures, 'calls'):,}",
        _short(prompt),
        _percent(useful, prompt),
        _percent(possible, prompt),
        _percent(useful, possible),
        _short(_number(figures, "wasted_tokens")),
    )


def _notes(answer: Figures) -> Iterator[str]:
    """What is not in the tables, when there is any of it."""
    for name, text in (
        ("shared_tokens", "also cached, left by other sessions (tokens)"),
        ("unreported_calls", "calls in no figure, as their engines did not say what was cached"),
        ("failed_calls", "failed calls"),
        ("cancelled_calls", "cancelled calls"),
        ("retractions", "times that an engine took a running call's KV away"),
        ("resumed_tokens", "computed again to continue aborted replies (tokens)"),
        ("lost_prefix_tokens", "of earlier calls, useless since a prefix changed (tokens)"),
    ):
        if count := _number(answer, name):
            yield f"{text}: {count:,}"
    if down := answer.get("workers_down"):
        yield f"not counted: workers {', '.join(map(str, cast('list[int]', down)))}, which are down"


def _causes_of(figures: Figures) -> Iterator[tuple[str, int]]:
    """(cause, tokens); those of moves by the router's reason."""
    for cause, tokens in _counts(figures, "waste").items():
        if cause == "moved" and (reasons := _counts(figures, "moved")):
            yield from ((f"moved/{reason}", each) for reason, each in reasons.items())
        else:
            yield cause, tokens


def _counts(figures: Figures, name: str) -> Mapping[str, int]:
    return cast("Mapping[str, int]", figures[name])


def _number(figures: Figures, name: str) -> int:
    return cast(int, figures[name])


def _percent(part: int, whole: int) -> str:
    """Cut, not rounded: 100.0 % is all of it."""
    return f"{part * 1000 // whole / 10:.1f} %" if whole > 0 else "-"


def _short(number: int) -> str:
    """At most four digits and a unit: 1,234 as it is, 388.0 k, 12.3 M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 10 * size or (unit != "k" and number >= size):
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"
