"""What people decide by the command line: kept with who, when and why, or refused with the reason."""

import json
from pathlib import Path

import pytest
from restapi import START, WINNER, Clock, waiting
from typer.testing import CliRunner

from tunewright.api.auth import own_name
from tunewright.cli.app import app
from tunewright.controller.decisions import bound
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.state import PromotionState, TuningRecord
from tunewright.exits import Exit
from tunewright.store.sqlite import SqliteStore

RUNNER = CliRunner()


def stored(folder: Path, record: TuningRecord) -> Path:
    store = SqliteStore(folder / "store.sqlite", Clock())
    store.save(record)
    store.close()
    return folder


def promoted() -> TuningRecord:
    state = PromotionState(candidate=WINNER, baseline=Candidate(values={"max_num_seqs": 4}), replicas=2, updated=2)
    return waiting(phase=Phase.PROMOTED, promotion=state)


def test_what_somebody_approved_is_not_approved_again(tmp_path: Path) -> None:
    folder = stored(tmp_path, waiting())
    store = SqliteStore(folder / "store.sqlite", Clock())
    store.decide("demo", bound(waiting(), "approve", at=START + 1, by="ben", reason="mine"))
    store.close()
    done = RUNNER.invoke(app, ["approve", "demo", "--state", str(folder)])
    assert done.exit_code == Exit.REFUSED
    assert "demo: approve refused: ben approved it already: mine" in done.output
    assert len(decided(folder)) == 1


def decided(folder: Path) -> list[tuple[str, str, str]]:
    store = SqliteStore(folder / "store.sqlite", Clock())
    try:
        return [(d.action, d.by, d.reason) for d in store.decisions("demo")]
    finally:
        store.close()


@pytest.mark.parametrize(
    ("action", "record"),
    [
        ("approve", waiting()),
        ("reject", waiting()),
        ("suspend", waiting(phase=Phase.SEARCHING)),
        ("resume", waiting(phase=Phase.SEARCHING, suspended_since=START)),
        ("abort", waiting(phase=Phase.SEARCHING)),
        ("rollback", promoted()),
    ],
)
def test_a_decision_is_kept_with_who_and_why(tmp_path: Path, action: str, record: TuningRecord) -> None:
    state = stored(tmp_path, record)
    result = RUNNER.invoke(app, [action, "demo", "--reason", "because", "--state", str(state)])
    assert result.exit_code == Exit.DONE, result.stderr
    assert f"demo: {action}" in result.stdout
    assert decided(state) == [(action, own_name(), "because")]


@pytest.mark.parametrize(
    ("action", "record", "why"),
    [
        ("approve", waiting(phase=Phase.SEARCHING), "nothing waits for approval: the tuning is Searching"),
        ("reject", promoted(), "nothing waits for approval: the tuning is Promoted; `rollback` brings production back"),
        ("reject", waiting(phase=Phase.CANARY), "the tuning is Canary; `rollback` brings production back"),
        ("reject", waiting(phase=Phase.CONFIRMING), "the tuning is Confirming; `abort` ends it"),
        ("reject", waiting(phase=Phase.FAILED), "the tuning is Failed\n"),
        ("suspend", waiting(suspended_since=START), "suspended already"),
        ("resume", waiting(), "not suspended"),
        ("abort", promoted(), "it has ended: Promoted; `rollback` brings production back"),
        ("rollback", waiting(), "production was not changed"),
    ],
)
def test_a_decision_without_effect_is_refused_and_not_kept(
    tmp_path: Path, action: str, record: TuningRecord, why: str
) -> None:
    state = stored(tmp_path, record)
    result = RUNNER.invoke(app, [action, "demo", "--state", str(state)])
    assert result.exit_code == Exit.REFUSED
    assert why in result.stderr
    assert decided(state) == []


def test_an_approval_of_another_candidate_than_the_one_that_waits_is_refused(tmp_path: Path) -> None:
    state = stored(tmp_path, waiting())
    stale = RUNNER.invoke(app, ["approve", "demo", "--candidate", "0123456789", "--state", str(state)])
    assert stale.exit_code == Exit.REFUSED
    assert f"the candidate is {WINNER.hash}, not 0123456789" in stale.stderr
    assert decided(state) == []
    right = RUNNER.invoke(app, ["approve", "demo", "--candidate", WINNER.hash, "--state", str(state)])
    assert right.exit_code == Exit.DONE


def test_a_decision_as_json_names_what_it_is_bound_to(tmp_path: Path) -> None:
    state = stored(tmp_path, waiting())
    result = RUNNER.invoke(app, ["approve", "demo", "--json", "--state", str(state)])
    told = json.loads(result.stdout)
    assert told["tuning"] == "demo"
    assert told["action"] == "approve"
    assert told["candidate"] == WINNER.hash
    assert told["spec"] == waiting().spec_hash
    assert told["baseline"] == waiting().baseline.hash  # type: ignore[union-attr]


def test_an_unknown_tuning_is_refused(tmp_path: Path) -> None:
    state = stored(tmp_path, waiting())
    result = RUNNER.invoke(app, ["approve", "other", "--state", str(state)])
    assert result.exit_code == Exit.USAGE
    assert "there are: demo" in result.stderr


def test_a_store_that_may_only_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = stored(tmp_path, waiting())
    # Root may write whatever the mode says, so the file is opened as SQLite opens one of another user's.
    import sqlite3

    real = sqlite3.connect

    def read_only(path: Path, **options: object) -> sqlite3.Connection:
        return real(f"file:{path}?mode=ro&immutable=1", uri=True, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(sqlite3, "connect", read_only)
    result = RUNNER.invoke(app, ["approve", "demo", "--state", str(state)])
    assert result.exit_code == Exit.USAGE, result.stderr
    assert "check its rights" in result.stderr


def test_a_candidate_is_asked_for_with_its_knobs(tmp_path: Path) -> None:
    state = stored(tmp_path, waiting(phase=Phase.SEARCHING))
    asked = ["propose", "demo", "max_num_seqs=64", "enable_prefix_caching=true", "--state", str(state)]
    result = RUNNER.invoke(app, [*asked, "--reason", "seen elsewhere"])
    assert result.exit_code == Exit.DONE, result.stderr
    assert "propose of max_num_seqs 64, enable_prefix_caching true" in result.stdout
    store = SqliteStore(state / "store.sqlite", Clock())
    (kept,) = store.decisions("demo")
    store.close()
    assert (kept.action, kept.values) == ("propose", {"max_num_seqs": "64", "enable_prefix_caching": "true"})


@pytest.mark.parametrize(
    ("words", "phase", "code", "told"),
    [
        (["max_num_seq=64"], Phase.SEARCHING, Exit.REFUSED, "did you mean max_num_seqs"),
        (["max_num_seqs=many"], Phase.SEARCHING, Exit.REFUSED, "is not a number"),
        (["kv_cache_dtype=fp8"], Phase.SEARCHING, Exit.REFUSED, "allowLossy"),
        (["max_num_seqs=64"], Phase.CONFIRMING, Exit.REFUSED, "the search is over"),
        (["max_num_seqs"], Phase.SEARCHING, Exit.USAGE, "write each knob once"),
        (["max_num_seqs=1", "max_num_seqs=2"], Phase.SEARCHING, Exit.USAGE, "write each knob once"),
    ],
)
def test_a_candidate_that_makes_no_sense_is_refused(tmp_path: Path, words, phase, code, told) -> None:
    state = stored(tmp_path, waiting(phase=phase))
    result = RUNNER.invoke(app, ["propose", "demo", *words, "--state", str(state)])
    assert result.exit_code == code
    assert told in result.stderr
    assert decided(state) == []


@pytest.mark.parametrize(
    "text", ["\x1b[2Jcleared", "two\nlines", "right to left \u202e", "no UTF-8 \udcff", " ", "x" * 1001]
)
def test_what_could_command_a_terminal_is_no_reason(tmp_path: Path, text: str) -> None:
    state = stored(tmp_path, waiting())
    result = RUNNER.invoke(app, ["approve", "demo", "--reason", text, "--state", str(state)])
    assert result.exit_code == Exit.USAGE, result.exception
    assert "--reason: one line of at most 1000 characters is wanted" in result.stderr
    assert decided(state) == []


@pytest.mark.parametrize("text", ["\x1b[2J", "\udcff", "x" * 201])
def test_nor_is_it_a_knobs_value(tmp_path: Path, text: str) -> None:
    state = stored(tmp_path, waiting(phase=Phase.SEARCHING))
    result = RUNNER.invoke(app, ["propose", "demo", f"max_num_seqs={text}", "--state", str(state)])
    assert result.exit_code == Exit.USAGE, result.exception
    assert "the value of max_num_seqs: one line" in result.stderr


def test_what_is_shown_can_not_command_the_terminal(tmp_path: Path) -> None:
    state = stored(tmp_path, waiting(sentence="It died: \x1b[31mred\x07\nsecond line"))
    shown = RUNNER.invoke(app, ["show", "demo", "--state", str(state)]).stdout
    assert all(sign.isprintable() for line in shown.splitlines() for sign in line)
    assert shown.splitlines()[1].startswith("  It died:")
    assert shown.splitlines()[1].endswith("second line")
