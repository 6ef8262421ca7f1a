import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import latency, measurement, steady

from tunewright.domain.measurement import Measurement
from tunewright.domain.objective import gain, judge, objective_unit, objective_value
from tunewright.domain.tuning import LATENCIES, PERCENTILES, Objective, Slo

RATE = Objective(maximize="outputTokensPerSecond")


def test_every_objective_that_a_file_can_name_has_a_value_and_a_unit():
    measured = measurement()
    for minimize in (f"{name}{p.upper()}" for name in LATENCIES for p in PERCENTILES):
        objective = Objective(minimize=minimize)
        assert objective_value(objective, measured) == -measured.latency(minimize[:-3], minimize[-3:].lower())
        assert objective_unit(objective) == "s"
    assert objective_value(RATE, measured) == 1000.0
    goodput = Objective(maximize="goodput")
    assert objective_value(goodput, measured) == pytest.approx(1000 / 130)
    assert objective_unit(goodput) == "good requests/s"
    dollars = Objective(maximize="tokensPerDollar", gpu_price_per_hour=3.6)
    assert objective_value(dollars, measured) == pytest.approx(1_000_000)
    assert objective_unit(dollars) == "output tokens per dollar"


def test_goodput_without_an_slo_is_all_that_completed():
    measured = measurement(goodput=None)
    assert objective_value(Objective(maximize="goodput"), measured) == measured.requests_per_second


@steady
@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_margin_is_negative_exactly_when_the_slo_is_missed(p95, bound):
    measured = measurement(ttft=p95 / 1.8)
    judged = judge(RATE, Slo(ttft_p95=f"{bound:.6f}s"), measured)
    wanted = float(f"{bound:.6f}")
    assert judged.feasible == (measured.ttft.p95 <= wanted)
    assert (judged.margin >= 0) == judged.feasible
    assert bool(judged.missed) != judged.feasible


def test_every_bound_counts_and_what_missed_is_named():
    slo = Slo(ttft_p95="100ms", itl_p99="5ms", e2e_p50="1h", error_rate="1%")
    judged = judge(RATE, slo, measurement(ttft=0.2, completed=90, failed=10))
    assert not judged.feasible
    assert len(judged.missed) == 3
    assert judged.missed[0] == "TTFT p95 360 ms against 100 ms"
    assert judged.missed[2] == "error rate 10.00% against 1.00%"


def test_a_measurement_that_completed_nothing_is_infeasible_whatever_its_percentiles_say():
    nothing = measurement(completed=0, failed=0, ttft=1e-6, itl=latency(0.0))
    assert nothing.error_rate == 1.0
    assert not judge(RATE, Slo(error_rate="50%"), nothing).feasible
    assert not judge(RATE, Slo(error_rate="99.9%"), nothing).feasible


def test_no_error_is_allowed_where_none_is():
    assert judge(RATE, Slo(error_rate="0%"), measurement(failed=0)).feasible
    assert not judge(RATE, Slo(error_rate="0%"), measurement(failed=1)).feasible


def test_a_gain_is_a_ratio_and_for_a_latency_how_much_shorter_it_is():
    assert gain(RATE, 1500, 1000) == pytest.approx(0.5)
    assert gain(RATE, 500, 1000) == pytest.approx(-0.5)
    latency_objective = Objective(minimize="ttftP95")
    assert gain(latency_objective, -0.1, -0.2) == pytest.approx(0.5)
    assert gain(latency_objective, -0.4, -0.2) == pytest.approx(-1.0)
    assert gain(RATE, 1, 0) == 0.0


def test_a_measurement_survives_its_json_with_the_names_of_the_outside():
    measured = measurement()
    text = measured.model_dump_json()
    assert '"outputTokensPerSecond"' in text
    assert Measurement.model_validate_json(text) == measured


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused_by_the_record(bad):
    with pytest.raises(ValueError, match="finite"):
        measurement(input_tokens_per_second=bad)
