"""Records to a measurement and its reasons, without a network."""

import subprocess
import sys

import pytest

from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.counters import Scrape, ServerFacts
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.judge import measurement, notes
from tunewright.loadtest.prompts import Planned
from tunewright.loadtest.recording import NANO, Record, pack_stamp
from tunewright.loadtest.session import Raw

START = 1_790_000_000 * NANO
FACTS = ServerFacts("0.32.0", "m", None, 16)
TOKENS = 10
SECOND = NANO


def record(number: int, sent: float, ttft: float = 0.1, itl: float = 0.1, tokens: int = TOKENS) -> Record:
    made = Record(Planned(number, 20, tokens, b""), START + round(sent * SECOND), ramp=False)
    made.sent_ns = made.intended_ns
    times = [sent + ttft + itl * i for i in range(tokens)]
    for at in [*times, times[-1], times[-1]]:
        made.stamps += pack_stamp(START + round(at * SECOND))
    made.reads = tokens + 2
    made.finished_ns = START + round(times[-1] * SECOND)
    made.ending = b'{"usage":{"prompt_tokens":20,"completion_tokens":%d}}' % tokens
    return made


def steady(streams: int = 4, **shape) -> list[Record]:
    """Four streams from 5 s before the window to its end, each request one second long."""
    made = [record(s * 100 + i, -5 + i + s / streams, **shape) for s in range(streams) for i in range(15)]
    for one in made:
        if one.finished_ns > START + 10 * SECOND:  # cut off at the end of the window
            whole = [one.stamps[i : i + 16] for i in range(0, len(one.stamps), 16)]
            kept = [stamp for stamp in whole[:-2] if stamp < pack_stamp(START + 10 * SECOND)]
            one.stamps, one.reads, one.finished_ns, one.ending = bytearray(b"".join(kept)), len(kept), 0, b""
    return made


def raw(records: list[Record], **more) -> Raw:
    given = {"start_ns": START, "end_ns": START + 10 * SECOND, "load_started_ns": START - 5 * SECOND, "settled": True}
    return Raw(records=records, **{**given, "cpu_seconds": 1.0, "reachable_reuse": 1.0, **more})


def job(**more) -> LoadJob:
    workload = more.pop("workload", {"concurrency": 4})
    full = Workload(prompt_tokens=Lengths(fixed=20), output_tokens=Lengths(fixed=TOKENS), **workload)
    given = {"url": "http://x", "duration": 10.0, "max_warmup": 10.0, "seed": 3, **more}
    return LoadJob(workload=full, **given)


def void(gathered: Raw, asked: LoadJob | None = None) -> str:
    return "; ".join(measurement(asked or job(), FACTS, gathered).void)


def test_a_steady_run_in_figures():
    found = measurement(job(), FACTS, raw(steady()))
    assert found.void == ()
    assert found.completed == 40
    assert found.output_tokens_per_second.value == pytest.approx(40, rel=0.03)
    assert found.requests_per_second == 4.0
    assert found.input_tokens_per_second == 80.0
    for latency, value in ((found.ttft, 0.1), (found.itl, 0.1), (found.tpot, 0.1), (found.e2e, 1.0)):
        assert latency.p50 == pytest.approx(value)
        assert latency.p99 == pytest.approx(value)
    assert found.generator.achieved == pytest.approx(4.0, rel=0.02)
    assert (found.warmup, found.seed, found.started_at) == (5.0, 3, START / NANO)


def test_ramp_requests_count_as_tokens_but_not_as_latencies():
    records = steady()
    for one in records:
        one.ramp = True
    with pytest.raises(LoadFailure, match="no request completed in the window"):
        measurement(job(), FACTS, raw(records))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"cpu_seconds": 9.6}, "96% of a core"),
        ({"steal": 0.22}, "22% of this machine's CPU time to others"),
        ({"clock_jumps": 1}, "clock of this machine was set"),
        ({"before": Scrape(START, START, "")}, "stopped answering"),
    ],
)
def test_a_generator_past_its_budget_voids(more, reason):
    assert reason in void(raw(steady(), **more))


def test_what_is_stolen_over_a_few_seconds_comes_and_goes_and_voids_nothing():
    assert "CPU time" not in void(raw(steady(), steal=0.18))
    assert "CPU time" not in void(raw(steady(), steal=0.22), job(duration=9.0))


def test_too_few_streams_void():
    assert "the generator delivered concurrency" in void(raw(steady()), job(workload={"concurrency": 5}))


def test_an_slo_on_what_was_not_seen_voids():
    slo = Slo.model_validate({"tpot_p99": "1s"})
    records = [record(i, -1 + i * 0.2, tokens=1) for i in range(60)]
    asked = job(slo=slo, workload={"concurrency": 1})
    assert "no sample of it" in void(raw(records), asked)


def test_late_sends_void_an_open_loop_and_are_part_of_its_latency():
    records = steady()
    for one in records:
        one.intended_ns -= SECOND // 2
    asked = job(workload={"rate": 4.0})
    found = measurement(asked, FACTS, raw(records, asked_rate=4.0))
    assert found.ttft.p50 == pytest.approx(0.6)
    assert any("later than intended" in reason for reason in found.void)
    assert not any("saturated" in reason for reason in found.void)


def test_an_open_loop_that_keeps_up_is_sound():
    assert void(raw(steady(), asked_rate=4.0), job(workload={"rate": 4.0})) == ""


def counters(tokens: float, finished: float) -> Scrape:
    text = f"vllm:generation_tokens_total {tokens}\nvllm:request_success_total {finished}\n"
    return Scrape(START, START, text)


def at(scrape: Scrape, second: float) -> Scrape:
    moment = START + round(second * SECOND)
    return Scrape(moment, moment, scrape.text)


def test_the_window_s_counts_are_compared_as_received_and_the_whole_run_s_as_ended():
    def scraped(extra: float, late: float = 0.0) -> Raw:
        return raw(
            steady(),
            before=at(counters(7, 3), -6),
            window=[at(counters(207, 20), 0), at(counters(607 + extra, 60), 10)],
            after=at(counters(607 + extra + late, 60), 11),
        )

    assert void(scraped(0)) == ""
    assert "the window" in void(scraped(60))
    reasons = void(scraped(0, late=120))
    assert "the whole run" in reasons
    assert "the window" not in reasons


def test_failed_requests_are_counted_by_kind_and_give_no_latency():
    records = steady()
    broken = record(9999, 1.0, ttft=5.0)
    broken.error = "connection reset"
    found = measurement(job(), FACTS, raw([*records, broken]))
    assert found.errors == {"connection reset": 1}
    assert found.failed == 1
    assert found.ttft.p99 == pytest.approx(0.1)


def test_notes_tell_what_is_no_fault():
    gathered = raw(steady(), settled=False, unstamped_reads=3, reachable_reuse=0.1)
    asked = job(workload={"concurrency": 4, "prefix_reuse": 0.5})
    found = notes(asked, gathered, measurement(asked, FACTS, gathered))
    assert len(found) == 3


def test_merged_reads_that_reach_the_percentiles_are_noted():
    records = steady()
    for one in records[:30]:
        del one.stamps[16 * 4 : 16 * 5]
        one.reads -= 1
        one.merged = [(4, 2)]
    gathered = raw(records)
    (note,) = notes(job(), gathered, measurement(job(), FACTS, gathered))
    assert "upper percentiles of ITL are upper bounds" in note


def test_the_command_starts_without_the_heavy_libraries():
    code = "import sys, tunewright.loadtest.run; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    assert not {"pandas", "optuna", "fastapi", "scipy", "kubernetes", "uvicorn"} & set(loaded.split())
