"""The controller's benchmark: its arithmetic, and that what it writes is what the loop reads."""

import importlib
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_kube import client_of, fake_kube
from world import FakeClock

from tunewright.domain.phases import Phase
from tunewright.kube.resources import TUNINGS
from tunewright.store.kubernetes import KubernetesStore

sys.path.insert(0, str(Path(__file__).parents[2]))
bench, changes, process, world = (
    importlib.import_module(f"benchmarks.controller{part}") for part in ("", "_changes", "_process", "_world")
)


def look(at: float, **fields: Any) -> Any:
    requests = Counter({("get", "tunings"): int(20 * at), ("update", "leases"): 5})
    given = {"cpu_seconds": at / 10, "rss_mib": 100.0 + at, "threads": 9, "requests": requests, "passes": 10 * at}
    return process.Look(at=at, scrape_seconds=0.1, **(given | fields))


def test_the_cost_is_per_tuning_and_minute_and_of_one_core() -> None:
    found = bench.at_rest(look(0.0), look(60.0), tunings=100, slowest_scrape=0.2)
    assert found["requests_per_tuning_and_minute"] == 12.0
    assert found["by_verb_and_resource"] == {"get tunings": 12.0}
    assert (found["passes_per_tuning_and_minute"], found["cpu_share"], found["rss_mib"]) == (6.0, 0.1, 160.0)


def test_percentiles_are_values_that_were_seen() -> None:
    hundred = [float(n) for n in range(1, 101)]
    assert bench.percentile(hundred, 0.99) == 99.0
    assert bench.percentile(hundred, 1.0) == 100.0
    assert bench.percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert bench.percentile([7.0], 0.5) == 7.0


def change(kind: str, seconds: float | None) -> Any:
    seen = None if seconds is None else 5.0 + seconds
    return changes.Change(kind, "a", lambda _found: True, sent=5.0, seen=seen)


def test_a_reaction_that_never_came_counts_as_the_longest() -> None:
    found = bench.reactions([change("a", 0.1), change("a", None), change("b", 0.3)])
    assert found["all"] == {"samples": 3, "p50": 0.3, "p99": changes.LOST, "max": changes.LOST, "lost": 1}
    assert found["b"] == {"samples": 1, "p50": 0.3, "p99": 0.3, "max": 0.3, "lost": 0}


def test_the_table_has_a_row_for_each_size() -> None:
    rest = bench.at_rest(look(0.0), look(60.0), tunings=100, slowest_scrape=0.2)
    one = {"tunings": 100, "hanging": 0, "at_rest": rest, "reactions": bench.reactions([change("a", 0.1)])}
    rows = bench.table([one, one | {"hanging": 20}]).splitlines()
    assert rows[2] == "| 100 | 0.10 s | 0.10 s | 1 | 12.0 | 160 MiB | 10.0% | 0.20 s |"
    assert rows[3].startswith("| 100, 20 with a hanging Prometheus |")


def test_what_it_writes_is_what_the_loop_reads() -> None:
    kinds = [*dict.fromkeys(world.MIX), "hanging"]
    urls = {"": "http://127.0.0.1:1", "hanging": "http://127.0.0.1:2"}
    with fake_kube() as fake, client_of(fake.url) as kube:
        world.populate(kube, "bench", kinds, urls, 3)
        store = KubernetesStore(kube, "bench", FakeClock())
        read = {one.kind: (store.load(one.name), store.trials(one.name)) for one in world.names(kinds)}
        assert len(kube.list(TUNINGS, "bench").items) == len(kinds)
    phases = {kind: record.phase for kind, (record, _) in read.items() if record is not None}
    assert phases == {
        "awaiting": Phase.AWAITING_APPROVAL,
        "promoted": Phase.PROMOTED,
        "searching": Phase.SEARCHING,
        "suspended": Phase.SEARCHING,
        "profiling": Phase.PROFILING,
        "hanging": Phase.PROFILING,
        "rejected": Phase.REJECTED,
        "noImprovement": Phase.NO_IMPROVEMENT,
        "recommended": Phase.RECOMMENDED,
        "failed": Phase.FAILED,
    }
    assert {kind: len(trials) for kind, (_, trials) in read.items()} == {
        kind: 0 if kind in world.LEARNING else 3 + (kind in ("searching", "suspended")) for kind in kinds
    }
    record = read["suspended"][0]
    assert record is not None
    assert record.tuning.spec.suspend
    assert record.suspended_since is not None
    assert read["hanging"][0].tuning.spec.metrics.prometheus == "http://127.0.0.1:2"


def test_what_stands_in_for_prometheus_answers_with_what_it_has() -> None:
    source = importlib.import_module("tunewright.observe.prometheus")
    with bench.prometheus(0, hangs=False) as url:
        window = source.PrometheusSource(url, "", interval=15.0, timeout=5.0).fetch(["x"], 0.0, time.time() + 1)
    assert [series.name for series in window.series] == ["vllm:num_requests_running"]


@pytest.mark.parametrize(("wanted", "status"), [(True, "True"), (False, "False")])
def test_a_reaction_is_seen_in_the_condition(wanted: bool, status: str) -> None:
    shown = changes._suspended(wanted)
    assert shown({"status": {"conditions": [{"type": "Suspended", "status": status}]}})
    other = {True: "False", False: "True"}[wanted]
    assert not shown({"status": {"conditions": [{"type": "Suspended", "status": other}]}})
    assert not shown({})
