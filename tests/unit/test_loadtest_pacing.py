import asyncio
import time

import numpy as np
import pytest

from tunewright.domain.traffic import Ramp
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.client import Client
from tunewright.loadtest.job import LoadJob
from tunewright.loadtest.pacing import ClosedLoop, OpenLoop, Schedule, Stock, Timer, gamma_gaps
from tunewright.loadtest.prompts import Planned, PromptSource
from tunewright.loadtest.protocol import Server
from tunewright.loadtest.recording import NANO, Record, Recorder


class Sink(Client):
    """Takes requests and sends them nowhere."""

    def __init__(self) -> None:
        super().__init__(Server.of("http://127.0.0.1:9", "/v1/completions", None, None), Recorder(), "t")
        self.sent: list[tuple[Record, int]] = []

    def submit(self, planned: Planned, intended_ns: int, ramp: bool = False) -> Record:
        record = Record(planned, intended_ns, ramp)
        self.sent.append((record, time.time_ns()))
        return record


def source() -> PromptSource:
    workload = Workload(concurrency=1, prompt_tokens=Lengths(fixed=4), output_tokens=Lengths(fixed=100))
    return PromptSource(LoadJob(url="http://x", workload=workload, duration=1, max_warmup=1, seed=1), "m", 1)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 4.0])
def test_arrivals_have_the_asked_rate_and_dispersion(burstiness):
    times = np.cumsum(gamma_gaps(np.random.default_rng(1), 50.0, burstiness, 500_000))
    assert len(times) / times[-1] == pytest.approx(50, rel=0.02)
    counts = np.histogram(times, bins=np.arange(0, times[-1], 5.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(burstiness, rel=0.15)


def test_a_closed_loop_replaces_what_ended_and_starts_out_of_step():
    async def scenario() -> None:
        client = Sink()
        prompts = source()
        loop = ClosedLoop(client, prompts, Stock(prompts, 4), 50, seed=1)
        loop.start()
        assert len(client.sent) == 50
        outputs = [record.output_tokens for record, _ in client.sent]
        assert all(record.ramp for record, _ in client.sent)
        assert min(outputs) < 30 < 80 < max(outputs) <= 100
        first = client.sent[0][0]
        first.finished_ns = 5
        loop.ended(first)
        follower = client.sent[-1][0]
        assert (follower.ramp, follower.output_tokens, follower.intended_ns) == (False, 100, 5)
        loop.stop()
        loop.ended(follower)
        assert len(client.sent) == 51

    asyncio.run(scenario())


def test_a_closed_loop_does_not_hammer_a_server_that_fails():
    async def scenario() -> None:
        client = Sink()
        prompts = source()
        loop = ClosedLoop(client, prompts, Stock(prompts, 4), 1, seed=1)
        loop.start()
        record = client.sent[0][0]
        record.error = "http 500"
        loop.ended(record)
        assert len(client.sent) == 1
        deadline = time.monotonic() + 20
        while len(client.sent) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        loop.stop()

    asyncio.run(scenario())


def test_an_open_loop_keeps_its_schedule_whatever_comes_back():
    async def scenario() -> None:
        client = Sink()
        loop = OpenLoop(client, Stock(source(), 200), rate=400.0, burstiness=1.0, seed=3)
        loop.start()
        deadline = time.monotonic() + 20
        while len(client.sent) < 100:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        loop.stop()
        gaps = np.diff([record.intended_ns for record, _ in client.sent]) / NANO
        expected = np.array(gamma_gaps(np.random.default_rng([3, 5]), 1.0, 1.0, 1024)[::-1]) / 400.0
        assert gaps[:90] == pytest.approx(expected[1:91], abs=1e-6)
        assert all(sent >= record.intended_ns for record, sent in client.sent)

    asyncio.run(scenario())


def arrivals(seconds: float, seed: int, **given) -> np.ndarray:
    schedule = Schedule(seed=seed, **given)
    found = [schedule.next()]
    while found[-1] < seconds:
        found.append(schedule.next())
    return np.array(found[:-1])


@pytest.mark.parametrize("start", [1e-3, 1.0, 30.0])
def test_a_ramp_rises_evenly_to_the_rate_and_stays_there(start):
    given = {"rate": 40.0, "burstiness": 1.0, "ramp": Ramp(start_rate=start, duration="20s")}
    times = np.concatenate([arrivals(40.0, seed, **given) for seed in range(100)])
    counts = np.histogram(times, bins=np.arange(0, 41, 4.0))[0] / 100 / 4.0
    middle = np.arange(2, 40, 4.0)
    expected = np.minimum(start + (40.0 - start) * middle / 20.0, 40.0)
    assert counts == pytest.approx(expected, abs=4 * (40.0 / 4 / 100) ** 0.5)


@pytest.mark.parametrize("burstiness", [0.2, 4.0])
def test_arrivals_in_a_ramp_bunch_as_those_after_it(burstiness):
    given = {"rate": 40.0, "burstiness": burstiness, "ramp": Ramp(start_rate=2.0, duration="20s")}
    counts = np.array([len(arrivals(20.0, seed, **given)) for seed in range(1500)])
    assert counts.mean() == pytest.approx(420, rel=0.01)
    assert counts.var() / counts.mean() == pytest.approx(burstiness, rel=0.15)


def test_a_ramp_moves_arrivals_and_draws_no_others():
    plain = [one.next() for one in [Schedule(40.0, 1.0, 3)] for _ in range(3000)]
    ramped = [one.next() for one in [Schedule(40.0, 1.0, 3, Ramp(start_rate=2, duration="20s"))] for _ in range(3000)]
    late = (20 * 40 - 420) / 40  # seconds that the ramp costs
    assert np.array(ramped[-500:]) - np.array(plain[-500:]) == pytest.approx(late)
    assert np.all(np.diff(ramped) >= 0)
    assert ramped[0] > plain[0]


def test_a_timer_fires_once_for_a_past_time_and_never_after_its_close():
    async def scenario() -> None:
        fired = asyncio.Event()
        timer = Timer(fired.set)
        timer.set(1)
        await asyncio.wait_for(fired.wait(), 20)
        timer.close()
        timer.set(1)
        timer.close()

    asyncio.run(scenario())


def test_a_stock_builds_ahead_and_counts_what_it_had_not():
    async def scenario() -> None:
        stock = Stock(source(), 3)
        stock.fill()
        assert [stock.take().number for _ in range(4)] == [0, 1, 2, 3]
        assert stock.empty == 1
        await asyncio.sleep(0.05)
        assert stock.take().number == 4
        stock.close()

    asyncio.run(scenario())
