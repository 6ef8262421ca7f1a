"""The load benchmark: errors are told as they are, a goal can be missed, and what is missing is named."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import load_goals, load_seen, truth_server  # noqa: E402

NANO = 1_000_000_000


def truth(number: int, received: float = 0.0) -> tuple[str, truth_server.Truth]:
    times = received + 0.1 + 0.02 * np.arange(50)
    return f"bench-{number}", truth_server.Truth(round(received * NANO), np.round(times * NANO).astype(np.int64))


def seen(received: float = 0.0, late: float = 0.0, stretch: float = 1.0) -> load_seen.Seen:
    reads = received + 0.1 + late + 0.02 * stretch * np.arange(50)
    return load_seen.Seen(received, reads, np.ones(50, dtype=np.int64))


def compared(found: dict[str, load_seen.Seen], window: tuple[float, float] | None = (0.0, 2.0)) -> dict:
    return load_seen.compare(load_seen.Run(found, window), dict([truth(1), truth(2)]), 2)


def test_a_client_without_error_has_none():
    case = compared({"1": seen(), "2": seen()})
    assert case["requests"] == 2
    for name in ("receive_error_p99_ms", "ttft_p99_error_ms", "itl_p99_error_ms", "e2e_p99_error_ms"):
        assert case[name] == pytest.approx(0.0, abs=1e-4)
    assert case["tokens_per_second"] == pytest.approx(50)
    assert case["delivered"] == pytest.approx((0.1 + 0.98) / 2)


def test_lateness_is_told_where_it_is():
    late = compared({"1": seen(late=0.005), "2": seen(late=0.005)})
    assert late["ttft_p99_error_ms"] == pytest.approx(5.0)
    assert late["ttft_own_error_p99_ms"] == pytest.approx(5.0)
    assert late["itl_p99_error_ms"] == pytest.approx(0.0, abs=1e-4)
    stretched = compared({"1": seen(stretch=1.05), "2": seen(stretch=1.05)})
    assert stretched["itl_p99_error_ms"] == pytest.approx(1.0)
    assert stretched["e2e_p99_error_ms"] == pytest.approx(49.0)


def test_a_merged_read_is_an_error_of_its_earlier_tokens():
    one = seen()
    merged = load_seen.Seen(0.0, np.delete(one.reads, 10), np.array([1] * 10 + [2] + [1] * 38))
    case = compared({"1": merged, "2": merged})
    assert case["miscounted"] == 0
    assert case["receive_error_p99_ms"] == pytest.approx(20.0, rel=0.01)


def test_what_the_server_sent_late_is_judged_apart():
    """A stall of one and a half spacings: two tokens go together, and the client takes them for one read."""
    name, whole = truth(1)
    sent = whole.sent.copy()
    sent[10] = sent[11] - 10_000_000
    one = seen()
    merged = load_seen.Seen(0.0, np.delete(one.reads, 10), np.array([1] * 10 + [2] + [1] * 38))
    run = load_seen.Run({"1": merged}, (0.0, 2.0))
    case = load_seen.compare(run, {name: truth_server.Truth(whole.received, sent)}, 1, pace=0.02)
    assert case["receive_error_p99_ms"] > 4.0
    assert case["on_time"] == pytest.approx(49 / 50)
    assert case["on_time_error_p99_ms"] == pytest.approx(0.0, abs=1e-4)
    assert case["server_late_max_ms"] == pytest.approx(10.0, abs=0.01)


def test_only_what_ended_in_the_window_counts():
    assert compared({"1": seen(), "2": seen()}, (0.0, 1.0))["requests"] == 0


def test_a_run_comes_back_from_its_file_as_it_was(tmp_path):
    path = tmp_path / "run.npz"
    load_seen.write(path, load_seen.Run({"7": seen(), "8": seen(late=1.0)}, (1.0, 2.0), {"void": ["x"]}))
    back = load_seen.read(path)
    assert (back.window, back.notes) == ((1.0, 2.0), {"void": ["x"]})
    assert back.seen["8"].reads.tolist() == seen(late=1.0).reads.tolist()
    load_seen.write(path, load_seen.Run({}, None))
    assert load_seen.read(path).window is None


def case(**more):
    good = {"client": "ours", "streams": 256, "burst": False, "delivered": 1.0, "cpu_share": 0.2}
    errors = {"receive_error_ms": {}, "ttft_p99_error_ms": 0.1, "ttft_own_error_p99_ms": 0.1, "itl_p99_error_ms": 0.01}
    return good | errors | more


def missed(**found):
    return [
        goal["goal"] for goal in load_goals.goals({"errors": [], "highest": [], "stall": []} | found) if not goal["met"]
    ]


@pytest.mark.parametrize(
    ("more", "goal"),
    [
        ({"ttft_p99_error_ms": -0.6}, "TTFT p99"),
        ({"itl_p99_error_ms": 0.06}, "ITL p99"),
        ({"cpu_share": 0.3}, "share of a core"),
        ({"delivered": 0.98}, "delivered"),
        ({"burst": True, "ttft_own_error_p99_ms": 0.6}, "TTFT p99"),
    ],
)
def test_goals_can_be_missed(more, goal):
    assert missed(errors=[case()]) == []
    (found,) = missed(errors=[case(**more)])
    assert goal in found


def test_the_highest_rate_is_the_last_good_level():
    levels = [
        {"client": "ours", "asked_tokens_per_second": asked, "tokens_per_second": asked, "good": asked < 60_000}
        for asked in (50_000, 60_000)
    ]
    assert len(missed(highest=levels)) == 1
    assert missed(highest=[level | {"good": True} for level in levels]) == []


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(truth_server.Missing, match=r"mockllm.c is missing: name its folder with --truth-server"):
        truth_server.build(tmp_path, tmp_path)
