"""Drift: 0 for the same traffic, symmetric, and blind to what a faster configuration alone changes."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.observe.drift import drift

EDGES = (10.0, 100.0, 1000.0)


def profile(**given_: Any) -> TrafficProfile:
    fields: dict[str, Any] = {
        "start": 0,
        "end": 600,
        "replicas": 1,
        "via": "a test",
        "source": Source.SIMULATED,
        "finished_requests": 100,
        "saturated": False,
        "demand": 2.0,
        "concurrency": 10.0,
        "concurrency_p95": 12.0,
        "running": 10.0,
        "waiting": 0.0,
        "prompt_tokens": Histogram(edges=EDGES, counts=(10, 80, 10)),
        "output_tokens": Histogram(edges=EDGES, counts=(10, 80, 10)),
        "prompt_tokens_mean": 80.0,
        "output_tokens_mean": 80.0,
        "prefix_reuse": 0.5,
        "error_rate": 0.0,
        "output_tokens_per_second": 160.0,
    }
    return TrafficProfile(**(fields | given_))


counts = st.lists(st.integers(0, 100), min_size=3, max_size=3)
profiles = st.builds(
    profile,
    saturated=st.booleans(),
    demand=st.floats(0, 1e4),
    concurrency=st.floats(0, 1e4),
    prompt_tokens=counts.map(lambda c: Histogram(edges=EDGES, counts=tuple(c), overflow=1)),
    output_tokens=counts.map(lambda c: Histogram(edges=EDGES, counts=tuple(c))),
    prompt_tokens_mean=st.floats(0, 1e5),
    prefix_reuse=st.none() | st.floats(0, 1),
)


@given(profiles)
def test_the_same_traffic_has_no_drift(a: TrafficProfile) -> None:
    assert drift(a, a).value == 0


@given(profiles, profiles)
def test_it_is_symmetric_finite_and_explained(a: TrafficProfile, b: TrafficProfile) -> None:
    there, back = drift(a, b), drift(b, a)
    assert there.value == pytest.approx(back.value)
    assert there.value >= 0
    assert math.isfinite(there.value)
    assert there.reason


def test_twice_the_traffic_drifts() -> None:
    found = drift(profile(), profile(demand=4.0, concurrency=22.0))
    assert found.value == pytest.approx(math.log(2))
    assert found.reason == "demand 2 to 4 requests/s and replica, concurrency 10 to 22"


@pytest.mark.parametrize("change", [{"concurrency": 4.0}, {"demand": 5.0}])
def test_a_faster_configuration_is_no_drift_of_the_traffic(change: dict[str, float]) -> None:
    """Clients that come by themselves wait less; clients that wait for answers come more often."""
    assert drift(profile(), profile(**change)).value == 0


def test_a_lower_bound_of_demand_is_no_drift_while_it_holds() -> None:
    full = profile(saturated=True, demand=2.0, concurrency=100.0)
    assert drift(full, profile(demand=5.0)).value == 0
    assert drift(full, profile(demand=5.0, saturated=True)).value == 0
    assert drift(full, profile(demand=1.0, concurrency=5.0)).value == pytest.approx(math.log(2))


def test_other_lengths_drift() -> None:
    moved = drift(profile(), profile(output_tokens=Histogram(edges=EDGES, counts=(70, 20, 10))))
    assert moved.value == pytest.approx(0.6)
    assert moved.reason == "60% of the outputs are of another length"
    longer = drift(profile(), profile(prompt_tokens_mean=120.0))
    assert longer.value == pytest.approx(math.log(1.5))
    assert longer.reason == "prompts of 80 to 120 tokens on average"


def test_lengths_are_compared_at_common_edges() -> None:
    """The same lengths seen by a server with a longer context are the same lengths."""
    more = Histogram(edges=(10.0, 50.0, 100.0, 1000.0, 10000.0), counts=(10, 40, 40, 10, 0))
    assert drift(profile(), profile(prompt_tokens=more)).value == 0
    other = Histogram(edges=(7.0,), counts=(100,))
    assert drift(profile(), profile(prompt_tokens=other)).value == 0


def test_prefixes_drift_and_unknown_is_none() -> None:
    assert drift(profile(), profile(prefix_reuse=0.1)).value == pytest.approx(0.4)
    assert drift(profile(), profile(prefix_reuse=None)).value == 0
