import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import steady

from tunewright.domain.candidate import Candidate, content_hash

VALUES = st.dictionaries(
    st.text("abcdef_", min_size=1, max_size=6),
    st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text('aé\n"\\→ ', max_size=8),
    max_size=6,
)


@steady
@given(VALUES)
def test_the_hash_does_not_depend_on_the_order(values):
    assert Candidate(values=values).hash == Candidate(values=dict(reversed(values.items()))).hash


@steady
@given(VALUES)
def test_a_candidate_survives_its_json(values):
    candidate = Candidate(values=values)
    assert Candidate.model_validate_json(candidate.model_dump_json()).hash == candidate.hash


@steady
@given(VALUES, VALUES)
def test_applying_the_differences_gives_the_other(one, other):
    here, there = Candidate(values=one), Candidate(values=other)
    changed = here
    for name, (old, new) in here.differences(there).items():
        assert here.values.get(name) == old
        changed = changed.with_value(name, new)
    assert changed.values == there.values
    assert here.differences(here) == {}


def test_the_hash_is_the_same_in_another_process():
    program = "from tunewright.domain.candidate import Candidate; print(Candidate(values={'a': 1, 'b': 'x'}).hash)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == Candidate(values={"b": "x", "a": 1}).hash


def test_a_hash_is_ten_hex_digits_and_tells_types_apart():
    names = {content_hash(value) for value in (1, "1", True, None, [1], {"a": 1})}
    assert len(names) == 6
    assert all(len(name) == 10 and int(name, 16) >= 0 for name in names)


def test_none_leaves_a_knob_to_its_default_without_touching_the_original():
    candidate = Candidate(values={"max_num_seqs": 64})
    assert candidate.with_value("max_num_seqs", None).values == {}
    assert candidate.values == {"max_num_seqs": 64}
