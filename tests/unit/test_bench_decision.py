"""The decision benchmark: its noise is what it says, and its goals can be missed."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import decision  # noqa: E402

from tunewright.domain.state import ConfirmStatus  # noqa: E402


@pytest.mark.parametrize("noise", decision.NOISES, ids=lambda noise: noise.name)
def test_noise_has_the_spread_and_drift_that_it_names(noise):
    rng = np.random.default_rng(1)
    starts = np.array([noise.starts(rng, 12) for _ in range(3000)])
    assert starts.std() == pytest.approx(noise.total, rel=0.1)
    neighbours = float(np.corrcoef(starts[:, 5], starts[:, 6])[0, 1])
    assert neighbours == pytest.approx(noise.drift * noise.between**2 / noise.total**2, abs=0.06)


def test_every_rule_sees_the_same_starts():
    seen = []

    def spy(baseline, candidate):
        seen.append((baseline.tolist(), candidate.tolist()))
        return ConfirmStatus.BETTER.value, 2

    for _ in range(2):
        decision.compare(decision.NOISES[0], 0.1, spy, 6, 3, seed=1)
    assert seen[:3] == seen[3:]
    assert seen[0] != seen[1]


def test_the_best_possible_bounds_what_was_found():
    noise = decision.NOISES[0]
    rule = decision.confirm_rule(0.05, 3, 6)
    found = decision.compare(noise, 0.10, rule, 6, 100, seed=3)["better"]
    assert 0.6 < found <= decision.best_possible(noise, 0.10, 12)
    assert decision.best_possible(decision.NOISES[3], 0.20, 12) < 0.5


def test_goals_can_be_missed():
    case = {"noise": decision.NOISES[0].name, "rule": "tunewright", "max_starts": 12, "starts_mean": 9.0}
    bad = [
        case | {"gain": 0.0, "better": 0.02, "better_upper_95": 0.03},
        case | {"gain": 0.10, "better": 0.5},
        case | {"gain": 0.05, "better": 0.8, "max_starts": 100},
    ]
    assert [goal["met"] for goal in decision.goals(bad)] == [False] * 3
    assert [goal["met"] for goal in decision.goals([one | {"better": 0.0} for one in bad[:1]])] == [True]
