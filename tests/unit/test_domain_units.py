import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import steady

from tunewright.domain.units import Seconds, Share, format_duration, format_share, parse_duration, parse_share


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("30s", 30), ("1h30m", 5400), ("7d", 604800), ("1.5h", 5400), ("0s", 0), ("500us", 0.0005)],
)
def test_a_duration_is_read_as_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("value", [5, 5.0, "5", "", "s", "-5s", "5 s", "1h 30m", "5s\n", "1e3s", None, True, ["5s"]])
def test_a_duration_without_a_clear_unit_is_refused_with_an_example(value):
    with pytest.raises(ValueError, match="such as 250ms, 30s"):
        parse_duration(value)


@pytest.mark.parametrize("value", ["36501d", "999999999999999999h", "9" * 400 + "s"])
def test_a_duration_that_no_clock_can_wait_is_refused(value):
    with pytest.raises(ValueError, match="at most 36500d") as refused:
        parse_duration(value)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.1%", 0.001), ("100%", 1.0), ("250%", 2.5), ("0%", 0)])
def test_a_share_is_read_between_0_and_1(text, share):
    assert parse_share(text) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("value", [0.05, 5, "5", "0.05", "", "%", "-5%", "5 %", "5%\n", "1e-3%", None, False])
def test_a_share_without_its_sign_is_refused_with_an_example(value):
    with pytest.raises(ValueError, match=r"such as 5% or 0\.1%"):
        parse_share(value)


@steady
@given(st.integers(min_value=0, max_value=10**15))
def test_a_formatted_duration_is_read_back_to_the_microsecond(microseconds):
    assert round(parse_duration(format_duration(microseconds / 1e6)) * 1e6) == microseconds


@steady
@given(st.floats(min_value=0, max_value=1e4, allow_subnormal=False))
def test_a_formatted_share_is_read_back(share):
    assert math.isclose(parse_share(format_share(share)), share, rel_tol=1e-9, abs_tol=1e-14)


@pytest.mark.parametrize("text", ["5%", "0.1%", "7%", "0.00001%", "33.333333%", "250%", "0%", "1000000%"])
def test_a_share_is_written_as_it_was_read(text):
    assert format_share(parse_share(text)) == text


def test_what_was_read_is_not_read_twice():
    assert parse_duration(Seconds(5.0)) == 5.0
    assert parse_share(Share(0.05)) == 0.05
