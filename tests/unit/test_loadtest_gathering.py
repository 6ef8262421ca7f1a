"""Several generator processes: the load is shared out whole, begun and measured at once, and gathered as one."""

import pytest
from loadtest_server import Behaviour, stream_server

from tunewright.domain.traffic import Ramp, Sessions, Trace
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest import gathering, session
from tunewright.loadtest.counters import Observer
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.run import execute

LENGTHS = {"prompt_tokens": Lengths(fixed=16), "output_tokens": Lengths(fixed=4)}


def job(url: str = "http://x", **loop) -> LoadJob:
    workload = Workload(**(loop or {"concurrency": 5}), **LENGTHS)
    return LoadJob(url=url, workload=workload, duration=1.0, max_warmup=9.0 if workload.ramp else 0.4, seed=3)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(gathering.os, "sched_getaffinity", lambda _: {0, 1})


def test_the_shares_come_to_what_was_asked():
    parts = [gathering.share(job(concurrency=11), index, 4) for index in range(4)]
    assert sum(part.workload.concurrency or 0 for part in parts) == 11
    assert len({part.seed for part in parts}) == 4
    assert parts[0].seed == 3
    rates = [gathering.share(job(rate=3.0, burstiness=2.0), index, 3).workload for index in range(3)]
    assert sum(part.rate or 0 for part in rates) == pytest.approx(3.0)
    assert {part.burstiness for part in rates} == {2.0}
    ramp = Ramp(start_rate=1.5, duration="3s")
    asked = job(rate=3.0, ramp=ramp)
    ramps = [gathering.share(asked, index, 3).workload.ramp for index in range(3)]
    assert [(part.start_rate, part.duration) for part in ramps if part] == [(0.5, 3.0)] * 3
    shape = Sessions(concurrency=3, first_prompt=9, per_turn=2, output=2)
    asked = LoadJob(
        url="http://x", workload=Workload.of_sessions(shape), endpoint="chat", duration=1, max_warmup=1, seed=1
    )
    parts = [gathering.share(asked, index, 2) for index in range(2)]
    assert [LoadJob.model_validate_json(p.model_dump_json()).workload.concurrency for p in parts] == [2, 1]


def test_a_load_is_only_split_where_there_are_cores_and_streams_for_it(two_cores):
    assert gathering._can_split(job(concurrency=2), 2)
    assert gathering._can_split(job(rate=1.0), 2)
    assert not gathering._can_split(job(concurrency=1), 2)
    assert not gathering._can_split(job(concurrency=64), 4)
    assert not gathering._can_split(job(trace=Trace(file="t")), 2)


def test_a_full_core_is_shared_by_two_processes(two_cores, monkeypatch):
    monkeypatch.setattr(session, "_BUSY", 0.0)  # of this process alone: those it starts have a core each
    said = []
    behaviour = Behaviour()
    with stream_server(behaviour) as server:
        result = execute(job(server.url), lambda news: said.append(news.detail))
    found = result.measurement
    assert found is not None, result.failure
    assert any("2 processes share the load" in detail for detail in said)
    assert any("2 processes shared the load" in note for note in result.notes)
    assert not any("server counts" in reason for reason in found.void)
    assert found.generator.asked == 5
    assert found.generator.achieved == pytest.approx(5, rel=0.35)
    assert found.completed > 0
    assert found.server is not None
    runs = {headers["x-request-id"].rsplit("-", 1)[0] for headers in behaviour.headers if "x-request-id" in headers}
    assert len(runs) == 3  # the one that was given up, and the two


def test_a_failure_in_one_process_is_that_of_the_load(two_cores, monkeypatch):
    monkeypatch.setattr(session, "_BUSY", 0.0)
    behaviour = Behaviour(die_after=2)
    with stream_server(behaviour) as server:
        asked = job(server.url)
        observer = Observer(asked, None)
        facts = observer.facts()
        try:
            with pytest.raises(LoadFailure, match=r"is gone: connection refused|can't connect"):
                gathering._together(asked, 2, facts, observer, 1, None, lambda _: None, False)
        finally:
            observer.close()


def test_a_process_that_is_killed_ends_the_load(two_cores, monkeypatch):
    monkeypatch.setattr(gathering, "_child", _die)
    with stream_server() as server:
        asked = job(server.url)
        observer = Observer(asked, None)
        with pytest.raises(LoadFailure, match="ended without a word"):
            gathering._together(asked, 2, observer.facts(), observer, 1, None, lambda _: None, False)
        observer.close()


def _die(*_: object) -> None:
    import os

    os._exit(9)
