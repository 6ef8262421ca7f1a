"""The highest rate under the SLO: bracketed on one server, each level judged to its interval."""

from collections.abc import Sequence

import numpy as np
import pytest
from loadtest_server import Behaviour, stream_server

from tunewright.controller.deadlines import deadline
from tunewright.domain.load import Load
from tunewright.domain.measurement import Estimate, GeneratorHealth, Latency, Measurement
from tunewright.domain.profile import Source
from tunewright.domain.tuning import Slo
from tunewright.domain.workload import MOST_RUNS, Lengths, Workload, time_limit
from tunewright.loadtest import statistics
from tunewright.loadtest.highest import RATIO, Verdict, highest_rate, judge_level
from tunewright.loadtest.job import LoadFailure, LoadJob, Overloaded
from tunewright.loadtest.measure import Answer
from tunewright.loadtest.run import execute, main

SLO = Slo.model_validate({"ttft_p95": "1s"})


def job(rate: float = 4.0, slo: Slo = SLO, **more) -> LoadJob:
    workload = Workload(rate=rate, highest=True, prompt_tokens=Lengths(fixed=8), output_tokens=Lengths(fixed=4))
    return LoadJob(url="http://x", workload=workload, slo=slo, seed=1, **{"duration": 60.0, "max_warmup": 60.0} | more)


class FakeServer:
    """Keeps the SLO for all but a share of requests that rises past its capacity; saturates at twice of it."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.asked: list[tuple[float, float, float]] = []
        self.void: dict[float, str] = {}
        self.dead_from = float("inf")
        self.silent_from = float("inf")

    def __call__(self, job: LoadJob) -> tuple[Sequence[Answer], Measurement]:
        rate, duration = job.workload.rate or 0.0, job.duration
        assert not job.workload.highest
        self.asked.append((rate, duration, job.max_warmup))
        if rate >= self.dead_from:
            raise LoadFailure("the server is gone")
        if rate >= self.silent_from:
            raise Overloaded("no request completed in the window")
        slow = 0.02 if rate < self.capacity else 0.5
        rng = np.random.default_rng(round(rate * 1000))
        count = round(rate * duration)
        values = np.where(rng.random(count) < slow, 2.0, 0.1)
        found = [answer(at, value) for at, value in zip(rng.uniform(0, duration, count), values, strict=True)]
        void = ("saturated: requests in flight grew",) if rate >= 2 * self.capacity else ()
        return found, measurement(rate, duration, values, void + tuple(filter(None, [self.void.get(rate)])))


def answer(first: float, ttft: float) -> Answer:
    times = np.array([first, first + 0.1])
    made = Answer(first - ttft, first - ttft, first + 0.1, None, ramp=False, prompt_tokens=8, output_tokens=2)
    made.times, made.events = times, np.ones(2, dtype=np.int64)
    return made


def measurement(rate: float, duration: float, ttfts: np.ndarray, void: tuple[str, ...] = ()) -> Measurement:
    latency = statistics.latency(ttfts)
    none = Latency(count=0, mean=0, p50=0, p90=0, p95=0, p99=0)
    return Measurement(
        started_at=0.0,
        duration=duration,
        source=Source.CPU,
        vllm_version="0",
        seed=1,
        warmup=1.0,
        warmup_settled=True,
        completed=len(ttfts),
        failed=0,
        output_tokens_per_second=Estimate(value=4 * rate, low=rate, high=9 * rate),
        input_tokens_per_second=8 * rate,
        requests_per_second=rate,
        ttft=latency,
        tpot=none,
        itl=none,
        e2e=none,
        generator=GeneratorHealth(asked=rate, achieved=rate, schedule_lag_p99=0, cpu_share=0, merged_reads=0),
        void=void,
    )


@pytest.mark.parametrize("capacity", [1.3, 4.1, 11.0, 60.0])
@pytest.mark.parametrize("first", [2.0, 8.0])
def test_the_capacity_is_bracketed_from_below_and_above(capacity, first):
    server = FakeServer(capacity)
    found, notes = highest_rate(job(first), server)
    assert capacity / RATIO <= found.requests_per_second < capacity
    assert len(server.asked) <= MOST_RUNS
    assert len(notes) == len({rate for rate, _, _ in server.asked})
    assert not any("not bracketed" in note for note in notes)


def test_only_the_first_level_warms_the_server_up():
    server = FakeServer(5.0)
    highest_rate(job(), server)
    assert [warmup for _, _, warmup in server.asked] == [60.0] + [30.0] * (len(server.asked) - 1)


def test_where_no_rate_holds_the_lowest_that_was_tried_is_told_as_it_is():
    found, _ = highest_rate(job(4.0), FakeServer(1e-9))
    assert found.ttft.p95 > 1.0 or found.void


def test_a_dead_server_ends_the_search_and_an_overloaded_one_only_the_level():
    server = FakeServer(5.0)
    server.silent_from = 6.0
    found, notes = highest_rate(job(), server)
    assert 5 / RATIO <= found.requests_per_second < 5
    assert any("no request completed" in note for note in notes)
    server.dead_from = 4.5
    with pytest.raises(LoadFailure, match="is gone"):
        highest_rate(job(), server)
    server.dead_from, server.silent_from = float("inf"), 0.0
    with pytest.raises(Overloaded, match="at no rate from 4 requests/s down"):
        highest_rate(job(), server)


def test_a_level_that_the_generator_spoilt_is_void_and_decides_nothing():
    server = FakeServer(5.0)
    server.void[4.0] = "the generator used 99% of a core: it was the bottleneck"
    found, notes = highest_rate(job(4.0), server)
    assert found.void
    assert "could not be judged" in notes[-1]


def test_the_end_without_a_bracket_is_said():
    _, notes = highest_rate(job(0.5, duration=10.0), FakeServer(1e9))
    assert "was not bracketed in 14 runs" in notes[-1]


def judged(slow: int, count: int) -> tuple[Verdict, str, bool]:
    times = np.linspace(0, 60, count, endpoint=False)
    late = np.zeros(count, dtype=bool)
    late[np.linspace(0, count - 1, slow).astype(int)] = True
    values = np.where(late, 2.0, 0.1)
    return judge_level(SLO, [answer(t, v) for t, v in zip(times, values, strict=True)], measurement(1, 60, values))


@pytest.mark.parametrize(
    ("slow", "count", "verdict", "likely"),
    [
        (2, 400, Verdict.HOLDS, True),
        (60, 400, Verdict.MISSES, False),
        (18, 400, Verdict.OPEN, True),
        (22, 400, Verdict.OPEN, False),
        (0, 20, Verdict.OPEN, True),
    ],
)
def test_a_level_is_settled_only_when_its_interval_is(slow, count, verdict, likely):
    found = judged(slow, count)
    assert (found[0], found[2]) == (verdict, likely), found


def test_an_open_level_is_measured_longer_once():
    server = FakeServer(1e9)

    class Near(FakeServer):
        def __call__(self, job: LoadJob):  # type: ignore[no-untyped-def]
            self.asked.append((job.workload.rate, job.duration, 0))
            values = np.tile([0.1] * 24 + [2.0], round(job.workload.rate * job.duration / 25))
            times = np.linspace(0, job.duration, len(values), endpoint=False)
            found = [answer(t, v) for t, v in zip(times, values, strict=True)]
            return found, measurement(job.workload.rate, job.duration, values)

    server = Near(0)
    _, notes = highest_rate(job(4.0, duration=50.0), server)
    assert [duration for _, duration, _ in server.asked[:2]] == [50.0, 100.0]
    assert "taken as held by its estimates" in notes[0]


def test_bursts_make_the_share_less_sure_than_chance_would():
    times = np.linspace(0, 10, 1000, endpoint=False)
    spread = statistics.share(times, (np.arange(1000) % 20 == 0).astype(float), 0.0, 10.0)
    burst = statistics.share(times, (times < 0.5).astype(float), 0.0, 10.0)
    assert spread.value == burst.value == 0.05
    assert burst.high - burst.value > 3 * (spread.high - spread.value)
    assert statistics.share(np.empty(0), np.empty(0), 0.0, 1.0).high == 1.0


def test_a_real_server_s_highest_rate_is_found(monkeypatch):
    monkeypatch.setattr("tunewright.loadtest.highest.MOST_RUNS", 3)
    with stream_server(Behaviour(token_seconds=0.002)) as server:
        asked = job(20.0, Slo.model_validate({"ttft_p50": "60s"}), duration=0.6, max_warmup=0.1)
        result = execute(asked.model_copy(update={"url": server.url}), lambda _: None)
    assert result.measurement is not None, result.failure
    assert any("requests/s" in note for note in result.notes)


def test_people_name_the_slo(capsys):
    for words, reason in (
        (["--highest-rate", "--rate", "2"], "name a bound on a latency"),
        (["--highest-rate", "--slo", "ttftP95=1s"], "needs a rate to begin with"),
        (["--slo", "ttftP95"], "--slo wants NAME=BOUND"),
        (["--slo", "nonsense=1s"], "nonsense"),
    ):
        with pytest.raises(SystemExit):
            main(["http://x", *words])
        assert reason in capsys.readouterr().err


def test_the_file_asks_for_the_highest_rate_and_the_deadlines_allow_for_it():
    from telemetry_samples import profile
    from tunings import tuning

    from tunewright.domain.phases import Phase
    from tunewright.domain.state import TuningRecord
    from tunewright.domain.workload import workload_for

    workload = workload_for(Load.model_validate({"mode": "highestRate"}), profile())
    assert (workload.rate, workload.highest) == (profile().demand, True)
    assert workload_for(Load.model_validate({"mode": "highestRate", "rate": 7}), profile()).rate == 7
    with pytest.raises(ValueError, match="needs a latency in slo"):
        tuning(load={"mode": "highestRate"}, slo={})
    assert job().hard_limit == time_limit(60, 60, True) > MOST_RUNS * 2 * 60

    def allowed(mode: dict) -> float:
        made = tuning(load={"duration": "10s", "maxWarmup": "10s"} | mode)
        record = TuningRecord(tuning=made, spec_hash="x", phase=Phase.BASELINING, phase_since=0.0)
        return deadline(record, []) or 0.0

    assert allowed({"mode": "highestRate"}) - allowed({"mode": "profile"}) == pytest.approx(3 * 14 * 65)
