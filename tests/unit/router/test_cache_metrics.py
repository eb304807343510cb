"""The cache's instruments say what the ledger says, from one process and from several; so does the dashboard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from tollway.router import metrics
from tollway.router.cache_ledger import CacheFigures, Entry
from tollway.router.causes import CAUSES, MOVES, Miss
from tollway.router.metrics import count_cache
from tollway.telemetry import METRICS

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "docs" / "grafana" / "tollway-cache.json"
SUMS = {
    "calls": "calls",
    "first_calls": "first_calls",
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "possible_tokens": "possible_tokens",
    "useful_tokens": "useful_tokens",
    "shared_tokens": "shared_tokens",
    "first_prompt_tokens": "first_prompt_tokens",
    "host_tokens": "host_tokens",
    "storage_tokens": "storage_tokens",
    "lost_prefix_tokens": "lost_prefix_tokens",
    "unreported_calls": "unreported_calls",
    "unreported_prompt_tokens": "unreported_prompt_tokens",
    "retractions": "retractions",
    "spanning_calls": "spanning_calls",
    "resumed_tokens": "resumed_tokens",
}
"""Instrument and figure of the ledger."""


def entries(engine: str) -> list[Entry]:
    """One call for every cause and reason, a first one, one that did not say, one that was cancelled."""
    misses = [Miss(cause, 7 + at) for at, cause in enumerate(CAUSES) if cause != "moved"]
    misses += [Miss("moved", 3 + at, reason) for at, reason in enumerate(MOVES)]
    made = [
        Entry(
            engine_id=engine, prompt=120, cached=100 - miss.tokens, host=5, storage=2, possible=100, misses=(miss,),
            beyond=(Miss("new", 15), Miss("prefix_mismatch", 5)), lost_prefix=9, retractions=1, versions=2, resumed=1,
            resumed_tokens=4,
        )
        for miss in misses
    ]  # fmt: skip
    made.append(Entry(engine_id=engine, prompt=50, cached=30, first=True, beyond=(Miss("first_call", 50),)))
    made.append(Entry(engine_id=engine, prompt=60, cached=None, outcome="failed"))
    made.append(Entry(engine_id=engine, prompt=10, cached=9, possible=9, beyond=(Miss("new", 1),), outcome="cancelled"))
    return made


def check(samples: dict[tuple[str, tuple[str, ...]], float], engine: str, figures: CacheFigures) -> None:
    for instrument, name in SUMS.items():
        assert samples[f"tollway_cache_{instrument}_total", (engine,)] == getattr(figures, name), name
    wasted: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    beyond: Counter[str] = Counter()
    for (name, labels), value in samples.items():
        if labels[:1] != (engine,):
            continue
        if name == "tollway_cache_wasted_tokens_total":
            wasted[labels[1]] += int(value)
            moved[labels[2]] += int(value)
        if name == "tollway_cache_beyond_tokens_total":
            beyond[labels[1]] += int(value)
    del moved[""]
    assert (wasted, moved, beyond) == (figures.waste, figures.moved, figures.beyond)
    assert samples["tollway_cache_unfinished_calls_total", (engine, "failed")] == figures.failed_calls
    assert samples["tollway_cache_unfinished_calls_total", (engine, "cancelled")] == figures.cancelled_calls


def in_order(labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in ("engine", "cause", "reason", "outcome") if name in labels)


def test_the_instruments_say_what_the_ledger_says() -> None:
    figures = CacheFigures()
    for entry in entries("only-here"):
        figures.add(entry)
        count_cache(entry)
    found = {
        (sample.name, in_order(sample.labels)): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("tollway_cache_")
    }
    check(found, "only-here", figures)


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_cache_metrics import entries
from tollway.router.metrics import count_cache
for entry in entries(sys.argv[2]):
    count_cache(entry)
"""


def test_workers_add_up(tmp_path: Path) -> None:
    """Two processes that counted and ended, one that renders what they left."""
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": ""}
    here = str(Path(__file__).parent)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", WORKER, here, "e0"], env=environment, check=True)
    render = (
        "import sys; from tollway.session_server.metrics import metrics_text; sys.stdout.buffer.write(metrics_text())"
    )
    done = subprocess.run([sys.executable, "-c", render], env=environment, check=True, capture_output=True, text=True)
    figures = CacheFigures()
    for entry in [*entries("e0"), *entries("e0")]:
        figures.add(entry)
    found = {
        (sample.name, in_order(sample.labels)): sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
    }
    check(found, "e0", figures)


# -- the dashboard -------------------------------------------------------------------------------------


def queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*asked, *(each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query")]


def test_every_metric_of_the_dashboard_is_declared_and_every_cache_metric_is_on_it() -> None:
    named = {name for query in queries() for name in re.findall(r"\b(?:tollway|sglang)[:_]\w+", query)}
    declared = {f"{name}_total" for name, spec in METRICS.items() if spec.kind == "counter"}
    assert named <= declared
    cache = {name for name in declared if name.startswith("tollway_cache_")}
    assert cache - named == {"tollway_cache_unreported_prompt_tokens_total"}


def test_every_label_of_the_dashboard_exists() -> None:
    labels = {
        f"{instrument._name}_total": set(instrument._labelnames)
        for instrument in vars(metrics).values()
        if isinstance(instrument, prometheus_client.Counter)
    }
    for query in queries():
        for name, selector in re.findall(r"(tollway_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=", selector)) <= labels[name]
        for label, name in re.findall(r"by \((\w+)\) \((?:rate|increase)\((tollway_\w+)", query):
            assert label in labels[name]
        assert query.count("(") == query.count(")")


def test_panels_have_titles_descriptions_and_places_of_their_own() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells


@pytest.mark.parametrize("name", sorted(name for name in METRICS if name.startswith("tollway_cache_")))
def test_every_instrument_has_unit_and_meaning(name: str) -> None:
    assert METRICS[name].unit in ("tokens", "calls", "retractions")
    assert METRICS[name].meaning
