import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import profile, steady

from tunewright.domain.profile import Histogram, Source


@st.composite
def histograms(draw):
    edges = sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=12)))
    counts = draw(st.lists(st.floats(0, 1e6), min_size=len(edges), max_size=len(edges)))
    return Histogram(edges=tuple(map(float, edges)), counts=tuple(counts), overflow=draw(st.floats(0, 1e6)))


@steady
@given(histograms(), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_and_stay_inside_the_edges(histogram, p, q):
    low, high = (histogram.quantile(at) for at in sorted((p, q)))
    if low is not None:
        assert 0 <= low <= histogram.edges[-1]
    if low is not None and high is not None:
        assert low <= high * (1 + 1e-9)


@steady
@given(histograms())
def test_the_mean_is_inside_the_edges(histogram):
    if histogram.total > 0:
        assert 0 <= histogram.mean <= histogram.edges[-1] * (1 + 1e-9)
    else:
        assert histogram.mean is None


def test_a_quantile_is_interpolated_inside_its_bucket():
    histogram = Histogram(edges=(10, 20), counts=(50, 50))
    assert histogram.quantile(0.25) == pytest.approx(5)
    assert histogram.quantile(0.75) == pytest.approx(15)


def test_what_is_beyond_the_last_edge_has_no_quantile():
    histogram = Histogram(edges=(10,), counts=(1,), overflow=99)
    assert histogram.quantile(0.5) is None
    assert histogram.quantile(0.005) == pytest.approx(5)
    assert Histogram(edges=(), counts=()).quantile(0.5) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"edges": (1, 2), "counts": (1,)}, "2 edges but 1 counts"),
        ({"edges": (2, 1), "counts": (1, 1)}, "must rise"),
        ({"edges": (1, 1), "counts": (1, 1)}, "must rise"),
        ({"edges": (1,), "counts": (-1,)}, "negative"),
        ({"edges": (1,), "counts": (1,), "overflow": -1}, "negative"),
        ({"edges": (1,), "counts": (float("nan"),)}, "finite"),
    ],
)
def test_an_inconsistent_histogram_is_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        Histogram(**fields)


@pytest.mark.parametrize(
    ("version", "source"),
    [("0.32.0+simulated", Source.SIMULATED), ("0.32.0+cpu", Source.CPU), ("0.26.0", Source.GPU), ("", Source.UNKNOWN)],
)
def test_the_source_is_read_from_the_version(version, source):
    assert Source.of_version(version) is source


def test_the_summary_says_when_demand_is_only_a_bound():
    seen = profile()
    assert "at least 1.2 requests/s" in seen.summary()
    assert "32% of it shared prefix" in seen.summary()
    calm = seen.model_copy(update={"saturated": False, "prefix_reuse": None})
    assert "at least" not in calm.summary()
    assert "prefix cache off" in calm.summary()
