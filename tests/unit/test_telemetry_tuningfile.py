from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import steady

from tunewright.domain.tuning import Tuning
from tunewright.ports import Refused
from tunewright.tuningfile import MAX_BYTES, read_tuning

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
GOOD = """\
apiVersion: tunewright.dev/v1alpha1
kind: Tuning
metadata: {name: chat}
spec:
  target:
    command: [vllm, serve, m, --port, '{port}']
  objective: {maximize: outputTokensPerSecond}
  slo: {ttftP95: 500ms}
"""


def refusal(text):
    with pytest.raises(Refused) as caught:
        read_tuning(text, "chat.yaml")
    return str(caught.value)


def test_a_good_file_is_read():
    tuning = read_tuning(GOOD, "chat.yaml")
    assert tuning.metadata.name == "chat"
    assert tuning.spec.slo.ttft_p95 == 0.5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path):
    assert isinstance(read_tuning(path.read_text(), path.name), Tuning)


def test_there_is_an_example_for_the_simulator():
    assert "simulator.yaml" in {path.name for path in EXAMPLES}


def test_a_json_document_is_read_as_well():
    assert read_tuning(Tuning.model_validate(yaml.safe_load(GOOD)).model_dump_json(), "x").metadata.name == "chat"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("ttftP95: 500ms", "tfftP95: 500ms", "spec.slo: unknown field `tfftP95`; did you mean `ttftP95`?"),
        ("ttftP95: 500ms", "ttft_p99x: 1s", "spec.slo: unknown field `ttft_p99x`; did you mean `ttftP99`?"),
        ("ttftP95: 500ms", "ttftP95: 500", "spec.slo.ttftP95: a duration with its unit is wanted, such as 250ms, 30s, "
         "10m or 1h30m, not 500"),
        ("ttftP95: 500ms", "errorRate: 0.01", "spec.slo.errorRate: a percentage with its sign is wanted, such as 5% or "
         "0.1%, not 0.01"),
        ("  slo:", "  ttftP95: 1s\n  slo:", "spec: unknown field `ttftP95`; did you mean `spec.slo.ttftP95`?"),
        ("  slo:", "  zzz: 1\n  slo:", "spec: unknown field `zzz`; known here: target, spare, metrics, objective, slo, "
         "load, search, budget, confirm, quality, promotion, retune, suspend"),
        ("outputTokensPerSecond", "outputTokenPerSecond", "spec.objective.maximize: `outputTokenPerSecond` is not one "
         "of outputTokensPerSecond, goodput, tokensPerDollar; did you mean `outputTokensPerSecond`?"),
        ("  slo:", "  load: {mode: closedloop}\n  slo:", "spec.load.mode: `closedloop` is not one of profile, "
         "closedLoop, openLoop, sessions, trace, highestRate; did you mean `closedLoop`?"),
        ("  slo:", "  budget: {trials: many}\n  slo:", "spec.budget.trials: a whole number is wanted, not `many`"),
        ("  slo:", "  budget: {trials: 0}\n  slo:", "spec.budget.trials: must be greater than or equal to 1, not `0`"),
        ("  slo:", "  budget: []\n  slo:", "spec.budget: a mapping of fields is wanted, not a list"),
        ("  slo:", "  suspend: soon\n  slo:", "spec.suspend: true or false is wanted, not `soon`"),
        ("  slo:", "  search: {include: [64]}\n  slo:", "spec.search.include[0]: text is wanted, not `64`; write it in "
         'quotes: "64"'),
        ("serve, m,", "serve, 7,", 'spec.target.command[2]: text is wanted, not `7`; write it in quotes: "7"'),
        ("serve, m,", "serve, yes,", 'spec.target.command[2]: text is wanted, not true; write it in quotes: "true"'),
        ("{name: chat}", "{name: My Chat}", "metadata.name: `My Chat` is not valid: Name of the tuning: lower-case "
         "letters, digits and dashes, at most 63 characters."),
        ("{name: chat}", "{}", "metadata.name: is missing: Name of the tuning: lower-case letters, digits and dashes, "
         "at most 63 characters."),
        ("  objective: {maximize: outputTokensPerSecond}\n", "", "spec.objective: is missing: What is improved: "
         "exactly one of the two."),
        ("  slo: {ttftP95: 500ms}", "  slo: {ttftP50: 2s, ttftP95: 1s}", "spec.slo: ttftP50 (2s) is above ttftP95 "
         "(1s): a lower percentile can't be the larger one"),
        ("  slo: {ttftP95: 500ms}", "  slo: {errorRate: 100%}", "spec: slo.errorRate of 100% or more allows a server "
         "that answers nothing"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_path_and_what_would_be_right(old, new, line):
    assert old in GOOD
    assert refusal(GOOD.replace(old, new)) == f"chat.yaml: {line}"


def test_every_fault_has_its_own_line():
    text = GOOD.replace("500ms", "500").replace("outputTokensPerSecond", "speed").replace("{name: chat}", "{name: A}")
    lines = refusal(text).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["metadata.name", "spec.objective.maximize", "spec.slo.ttftP95"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "a mapping is wanted"),
        ("just text", "a mapping is wanted"),
        (f"{GOOD}---\n{GOOD}", "holds 2 documents"),
        (GOOD.replace("kind: Tuning", "kind: Deployment"), "kind: `Tuning` is wanted, not `Deployment`"),
        (GOOD.replace("kind: Tuning\n", ""), "kind: `Tuning` is wanted, which is missing"),
        (GOOD.replace("v1alpha1", "v1"), "apiVersion: `tunewright.dev/v1alpha1` is wanted, not `tunewright.dev/v1`"),
        (f"{GOOD}kind: Tuning\n", "line 9, column 1: `kind` is given twice in this block"),
        (GOOD.replace("500ms}", "500ms, ttftP95: 1s}"), "line 8, column 25: `ttftP95` is given twice in this block"),
        (GOOD.replace("{name: chat}", "{name: chat"), "line 4"),
        (GOOD + "\tx: 1\n", "line 9, column 1"),
        (GOOD.replace("chat", "&a chat") + "x: *a\n", "line 9, column 4: aliases (*name) can't be used here"),
        (GOOD + "1: x\n", "line 9, column 1: a field's name must be text, not `1`"),
        (GOOD + "[a]: x\n", "a field's name must be text, not a list"),
        (GOOD + "x: !!python/object/apply:os.system [ls]\n", "line 9, column 4: could not determine a constructor"),
        (GOOD + "x: 2024-13-45\n", "a value can't be read"),
        (GOOD + "x: \x07\n", "this is not YAML"),
        (GOOD + "x: " + "[" * 2000, "nested too deeply"),
        ("#" * (MAX_BYTES + 1), "is larger than 256 KiB"),
        ("apiVersion: !!bool x", "chat.yaml: a value can't be read: it does not fit its tag"),
        ("apiVersion: !!timestamp x", "chat.yaml: a value can't be read: it does not fit its tag"),
        ("apiVersion: !!map [a]", "chat.yaml: a value can't be read: it does not fit its tag"),
        ('apiVersion: !!int ""', "chat.yaml: a value can't be read: it does not fit its tag"),
        ("apiVersion: 1" + ":1" * 4000, "`tunewright.dev/v1alpha1` is wanted, not a very large number"),
        ("apiVersion: " + "a" * 9000, "a..."),
    ],
)
def test_what_is_no_tuning_file_is_refused_with_the_place(text, message):
    found = refusal(text)
    assert found.startswith("chat.yaml:")
    assert message in found
    assert "\n" not in found


@steady
@given(st.text("ab:[]{}&*!|>'\"%@`,?-# \n\t0\x00é", max_size=60))
def test_no_text_gets_past_or_crashes(text):
    refusal(text)


@steady
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-5, 5)
        | st.floats()
        | st.sampled_from(["", "5s", "5%", "x", "\n\x1b[31m"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["target", "slo", "ttftP95", "load", "mode", "a"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_any_document_is_refused_in_whole_lines_without_control_characters(spec):
    document = {**yaml.safe_load(GOOD), "spec": spec}
    for line in refusal(yaml.safe_dump(document)).splitlines():
        assert line.startswith("chat.yaml: spec")
        assert line.isprintable()
