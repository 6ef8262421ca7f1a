"""`show`, `trials`, `report`, `export`, `profile`: what they print, and what they say when they can't."""

import json
import sqlite3
import threading
from pathlib import Path

import pytest
from restapi import BASELINE, START, WINNER, Clock, trials, waiting
from typer.testing import CliRunner

from tunewright.cli.app import app
from tunewright.domain.phases import Phase
from tunewright.domain.state import PromotionState
from tunewright.domain.step import enter, update
from tunewright.exits import Exit
from tunewright.store.lock import agent_lock
from tunewright.store.sqlite import SqliteStore

RUNNER = CliRunner()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder with one tuning that waits for approval."""
    folder = tmp_path / "state"
    store = SqliteStore(folder / "store.sqlite", Clock())
    store.save(waiting())
    for trial in trials():
        store.save_trial("demo", trial)
    store.close()
    return folder


def run(state: Path, *words: str, code: Exit = Exit.DONE) -> str:
    result = RUNNER.invoke(app, [*words, "--state", str(state)])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout if code is Exit.DONE else result.stderr


def test_show_tells_phase_sentence_and_what_would_change(state: Path) -> None:
    for words in (["show"], ["show", "demo"]):
        shown = run(state, *words)
        assert shown.startswith("demo: AwaitingApproval\n  Waiting for approval.\n")
        assert f"finalist {WINNER.hash}: +98 % (3 rounds)" in shown
        assert "max_num_seqs: 4 -> 64" in shown


def test_show_tells_what_an_approver_should_know(state: Path) -> None:
    assert "note:" not in run(state, "show", "demo")
    store = SqliteStore(state / "store.sqlite", Clock())
    record = store.load("demo")
    assert record is not None
    store.save(update(record, notes=("helm owns the arguments",)))
    store.close()
    assert "  note: helm owns the arguments\n" in run(state, "show", "demo")
    assert json.loads(run(state, "show", "demo", "--json"))["notes"] == ["helm owns the arguments"]


def test_show_tells_whether_anybody_works_on_it(state: Path) -> None:
    """After Ctrl-C it looked as while it ran."""
    nobody = "nobody works on it: `tunewright tune` with its file goes on"
    assert nobody in run(state, "show", "demo")
    with agent_lock(state / "store.sqlite"):
        assert nobody not in run(state, "show", "demo")
    assert nobody in run(state, "show", "demo")


ROLLOUT = PromotionState(candidate=WINNER, baseline=BASELINE, replicas=3, updated=1)
OLD, NEW, BACK = f"the baseline {BASELINE.hash}", f"the winner {WINNER.hash}", "; back: tunewright rollback demo"


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        (Phase.CANARY, f"{OLD}, and a canary of {NEW}{BACK}"),
        (Phase.ROLLING, f"{NEW} on 1 of 3, {OLD} on the rest{BACK}"),
        (Phase.WATCHING, f"{NEW} on 1 of 3, {OLD} on the rest{BACK}"),
        (Phase.PROMOTED, f"{NEW}{BACK}"),
        (Phase.ROLLING_BACK, OLD),
        (Phase.ROLLED_BACK, OLD),
        (Phase.FAILED, None),
    ],
)
def test_show_tells_what_production_is_to_run_and_how_to_go_back(state: Path, phase: Phase, told: str | None) -> None:
    assert f"  production is to run: {OLD}, as before\n" in run(state, "show", "demo")
    store = SqliteStore(state / "store.sqlite", Clock())
    record = store.load("demo")
    assert record is not None
    store.save(update(record, phase=phase, promotion=ROLLOUT))
    store.close()
    shown = run(state, "show", "demo")
    assert f"  production is to run: {told}\n" in shown if told else "production is to run" not in shown


def test_show_as_json_is_the_record(state: Path) -> None:
    one = json.loads(run(state, "show", "demo", "--json"))
    assert one["phase"] == "AwaitingApproval"
    assert one["winner"]["values"] == dict(WINNER.values)
    assert json.loads(run(state, "show", "--json")) == [one]


def test_show_watch_tells_each_change_once_and_ends_with_the_tuning(state: Path) -> None:
    store = SqliteStore(state / "store.sqlite", Clock())

    def end() -> None:
        record = store.load("demo")
        assert record is not None
        store.save(enter(record, Phase.REJECTED, "Rejected by ana.", START + 5))

    timer = threading.Timer(0.5, end)
    timer.start()
    result = RUNNER.invoke(app, ["show", "demo", "--watch", "--state", str(state)])
    timer.join()
    store.close()
    assert result.exit_code == Exit.NO_CHANGE
    assert result.stdout.count("demo: AwaitingApproval") <= 1
    assert result.stdout.count("demo: Rejected") == 1


def test_watch_wants_one_name(state: Path) -> None:
    assert "name of one tuning" in run(state, "show", "--watch", code=Exit.USAGE)


def test_nothing_there_yet_and_looking_makes_nothing(tmp_path: Path) -> None:
    state = tmp_path / "none"
    assert "Start one with: tunewright tune FILE" in run(state, "show")
    assert json.loads(run(state, "show", "--json")) == []
    assert "there are: none" in run(state, "trials", "demo", code=Exit.USAGE)
    assert not state.exists()


@pytest.mark.parametrize(
    "words",
    [["show", "other"], ["trials", "other"], ["report", "other"], ["export", "other", "--storage", "sqlite://"]],
)
def test_an_unknown_tuning_names_those_that_there_are(state: Path, words: list[str]) -> None:
    told = run(state, *words, code=Exit.USAGE)
    assert "no tuning 'other'" in told
    assert "there are: demo" in told


def test_trials_as_a_table_and_as_json(state: Path) -> None:
    table = run(state, "trials", "demo")
    assert "complete" in table
    assert "simulated" in table
    rows = json.loads(run(state, "trials", "demo", "--json"))
    assert [row["number"] for row in rows] == list(range(7))
    assert {row["candidate"]["values"]["max_num_seqs"] for row in rows} == {4, 64}
    assert rows[0]["candidate"]["values"] == dict(BASELINE.values)


def test_trials_before_the_first_one(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite", Clock())
    store.save(waiting(phase=Phase.PROFILING))
    store.close()
    assert run(tmp_path, "trials", "demo") == "demo has no trials yet: it is Profiling.\n"


def test_report_is_printed_or_written(state: Path, tmp_path: Path) -> None:
    assert run(state, "report", "demo").startswith("<!doctype html>")
    file = tmp_path / "report.html"
    assert str(file) in run(state, "report", "demo", "--output", str(file))
    assert file.read_text().startswith("<!doctype html>")
    nowhere = tmp_path / "no" / "report.html"
    assert "No such file" in run(state, "report", "demo", "-o", str(nowhere), code=Exit.USAGE)


def test_export_writes_a_study_once(state: Path, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    assert "7 trials of demo" in run(state, "export", "demo", "--storage", storage)
    assert "already has a study" in run(state, "export", "demo", "--storage", storage, code=Exit.USAGE)
    assert "study second" in run(state, "export", "demo", "--storage", storage, "--study", "second")
    assert "can't use the storage" in run(state, "export", "demo", "--storage", "nonsense://x", code=Exit.USAGE)


@pytest.mark.parametrize("words", [["show"], ["trials", "demo"], ["approve", "demo"], ["report", "demo"]])
def test_a_store_that_is_damaged_or_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, words: list[str]
) -> None:
    file = tmp_path / "store.sqlite"
    for content, told in ((b"this is no database " * 50, "damaged or no SQLite file"), (None, "of something else")):
        if content is None:
            file.unlink()
            with sqlite3.connect(file) as other:
                other.execute("CREATE TABLE customers (id INTEGER)")
            other.close()
        else:
            file.write_bytes(content)
        before = file.read_bytes()
        assert told in run(tmp_path, *words, code=Exit.USAGE)
        assert file.read_bytes() == before


def test_a_state_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_text("a file")
    assert "is a file, not a folder" in run(file, "show", code=Exit.USAGE)
    assert file.read_text() == "a file"


def test_a_state_folder_of_another_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", exists)
    told = run(tmp_path / "state", "show", code=Exit.USAGE)
    assert "no permission" in told
    assert "sudo -u" in told


def test_profile_refuses_what_is_no_span_and_names_a_prometheus_that_does_not_answer() -> None:
    result = RUNNER.invoke(app, ["profile", "http://127.0.0.1:9", "--window", "30"])
    assert (result.exit_code, "30" in result.stderr) == (Exit.USAGE, True)
    result = RUNNER.invoke(app, ["profile", "http://127.0.0.1:9"])
    assert result.exit_code == Exit.UNREACHABLE, result.stderr
    assert "127.0.0.1:9" in result.stderr


def test_recommend_prints_or_writes_files_and_overwrites_nothing(state: Path, tmp_path: Path) -> None:
    shown = run(state, "recommend", "demo")
    assert f"# demo: {WINNER.hash} instead of {BASELINE.hash}" in shown
    assert "# command.sh: what starts each server of production" in shown
    assert "vllm serve m --max-num-seqs 64" in shown
    assert json.loads(run(state, "recommend", "demo", "--json"))["form"] == "args"
    folder = tmp_path / "patches"
    assert "Written" in run(state, "recommend", "demo", "--output", str(folder))
    assert (folder / "command.sh").read_text() == "vllm serve m --max-num-seqs 64\n"
    assert "File exists" in run(state, "recommend", "demo", "--output", str(folder), code=Exit.USAGE)
    assert "use --as args" in run(state, "recommend", "demo", "--as", "kustomize", code=Exit.USAGE)
