import io
import re
from datetime import UTC

import pytest
from rich.console import Console as RichConsole
from telemetry_samples import (
    BASELINE,
    FORWARD,
    T0,
    WINNER,
    confirm_trials,
    failed_trial,
    history,
    promoted,
    record,
    search_trials,
    trial,
    tuning,
)

from tunewright.domain.phases import Phase
from tunewright.domain.state import TrialPhase
from tunewright.telemetry.console import (
    Console,
    Doing,
    LiveStatus,
    best_text,
    clean,
    left_text,
    progress_view,
    trial_line,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def plain():
    stream = io.StringIO()
    return Console(stream, zone=UTC), stream


def running(number, candidate, phase=TrialPhase.STARTING, slot=0):
    return trial(
        number, candidate, phase=phase, outcome=None, measurement=None, objective=None, finished_at=None, reason="TPE",
        slot=slot,
    )  # fmt: skip


def test_every_phase_is_told_once_with_its_time_and_sentence():
    console, stream = plain()
    for upto in range(1, 4):
        for _ in range(3):
            held = history(*FORWARD[:upto])
            console.update(record(FORWARD[upto - 1], history=held, sentence=held[-1].sentence), [], LiveStatus())
    assert stream.getvalue().splitlines() == [
        "15:06:40 Pending: What happened in Pending.",
        "15:16:40 Profiling: What happened in Profiling.",
        "15:26:40 Baselining: What happened in Baselining.",
    ]


def test_a_new_sentence_within_a_phase_is_told_too():
    console, stream = plain()
    held = history(Phase.PROFILING)
    for sentence in (held[0].sentence, "40 of 100 requests so far.", "40 of 100 requests so far."):
        console.update(record(Phase.PROFILING, history=held, sentence=sentence), [], LiveStatus())
    assert stream.getvalue().count("\n") == 2
    assert stream.getvalue().endswith("Profiling: 40 of 100 requests so far.\n")


def test_what_an_approver_should_know_is_told_once():
    console, stream = plain()
    held = history(Phase.AWAITING_APPROVAL)
    for _ in range(3):
        noted = record(Phase.AWAITING_APPROVAL, history=held, sentence=held[0].sentence, notes=("helm\nowns it", "hpa"))
        console.update(noted, [], LiveStatus())
    assert [line.strip() for line in stream.getvalue().splitlines()[1:]] == ["Note: helm owns it", "Note: hpa"]


def test_a_sentence_that_only_counts_seconds_is_told_once():
    console, stream = plain()
    held = history(Phase.PROFILING)
    seen = ["1s of 1800s are seen.", "2s of 1800s are seen.", "40 s of 1800s are seen.", "9 of 10 requests in 2s."]
    for sentence in (held[0].sentence, *seen, "10 of 10 requests in 2s."):
        console.update(record(Phase.PROFILING, history=held, sentence=sentence), [], LiveStatus())
    assert [line.split(": ", 1)[1] for line in stream.getvalue().splitlines()[1:]] == [
        "1s of 1800s are seen.",
        "9 of 10 requests in 2s.",
        "10 of 10 requests in 2s.",
    ]


def test_each_trial_is_told_when_it_starts_and_when_it_ends_with_its_source_and_runs():
    console, stream = plain()
    held = record(Phase.SEARCHING, baseline=BASELINE, sentence="")
    base = trial(0, BASELINE, purpose="baseline")
    candidate = BASELINE.with_value("max_num_seqs", 128)
    for phase in (TrialPhase.PENDING, TrialPhase.STARTING, TrialPhase.MEASURING, TrialPhase.STOPPING):
        console.update(held, [base, running(1, candidate, phase)], LiveStatus(stage="warming up"))
    console.update(held, [base, trial(1, candidate, rate=1500.0)], LiveStatus())
    console.update(held, [base, trial(1, candidate, rate=1500.0)], LiveStatus())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("trial 1: starting: max_num_seqs 64 → 128 (TPE)")
    assert lines[2].endswith(
        "trial 1: complete: max_num_seqs 64 → 128: 1,500 ± 30 output tokens/s (+50.0%), TTFT p95 360 ms, "
        "started in 58 s [simulated, 1 run]"
    )


def test_a_failure_says_its_kind_and_cause_and_an_attempt_is_told_again():
    held = record(baseline=BASELINE)
    bad = failed_trial(3, BASELINE.with_value("max_num_seqs", 9))
    assert trial_line(held, [bad], bad) == (
        "infeasible: max_num_seqs 64 → 9: outOfMemory: torch.OutOfMemoryError: CUDA out of memory"
    )
    console, stream = plain()
    console.update(held, [running(1, BASELINE)], LiveStatus())
    again = running(1, BASELINE).model_copy(update={"attempt": 2})
    console.update(held, [again], LiveStatus())
    assert "starting, attempt 2: as the baseline (TPE)" in stream.getvalue()


def test_a_missed_slo_is_told():
    slow = trial(1, WINNER, ttft=0.5)
    assert "misses the SLO by 80%" in trial_line(record(baseline=BASELINE), [slow], slow)


def test_the_end_names_gain_interval_rounds_source_and_report(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console, stream = plain()
    done, trials = promoted()
    for _ in range(3):
        console.update(done, trials, LiveStatus(report="/var/lib/chat.html"))
    console.close()
    text = stream.getvalue()
    assert text.count("gain: ") == 1
    assert text.count(done.sentence) == 1
    assert "gain:    +58.4% (from +52.1% to +64.9%, 3 fresh starts of each side)" in text
    assert "source:  simulated; 16 runs measured in all" in text
    assert "report:  /var/lib/chat.html" in text
    assert "max_num_seqs 64 → 256" in text
    assert all("\x1b" not in line for line in text.splitlines())


def test_what_is_taken_up_again_is_told_in_the_order_it_happened():
    console, stream = plain()
    console.update(*promoted(), LiveStatus())
    times = [line[:8] for line in stream.getvalue().splitlines() if line[:2].isdigit()]
    assert len(times) == 10 + 18
    assert times == sorted(times)


def test_a_tuning_that_starts_anew_is_told_from_its_beginning():
    console, stream = plain()
    console.update(*promoted(), LiveStatus())
    stream.truncate(0)
    held = history(Phase.PENDING)
    console.update(record(history=held, sentence=held[0].sentence), [], LiveStatus())
    assert "Pending: What happened in Pending." in stream.getvalue()


def test_a_log_cannot_command_the_terminal():
    evil = "a\x1b[2J\x07\u202e b\nc\x9b31m"
    assert clean(evil).isprintable()
    console, stream = plain()
    bad = failed_trial(1, BASELINE, cause=evil)
    console.update(record(sentence=evil, history=()), [bad], LiveStatus(stage=evil, report=evil))
    assert all(line.isprintable() for line in stream.getvalue().splitlines())


def test_markup_in_a_sentence_is_shown_as_it_is():
    console, stream = plain()
    console.update(record(sentence="[red]x[/red] [link=http://a]b"), [], LiveStatus())
    assert "[red]x[/red] [link=http://a]b" in stream.getvalue()


def drawn(view, width):
    stream = io.StringIO()
    RichConsole(file=stream, width=width, color_system=None).print(view)
    return stream.getvalue()


def test_the_live_view_shows_budget_current_trial_stage_and_the_latest_trials():
    held = record(Phase.SEARCHING, baseline=BASELINE, tuning=tuning(budget={"trials": 30}))
    trials = [*search_trials(), running(12, BASELINE.with_value("max_num_seqs", 300), TrialPhase.MEASURING)]
    text = drawn(progress_view(held, trials, LiveStatus(stage="warming up", progress=0.4), T0 + 65), 140)
    assert "10/30 trials" in text
    assert "trial 12 Measuring, warming up 40%" in text
    assert "1,610 ± 32 output tokens/s" in text
    assert "outOfMemory" in text
    assert "simulated, 1 run" in text
    assert " 0  as the baseline" not in text
    for width in (20, 60, 80, 200):
        assert all(
            len(line) <= width for line in drawn(progress_view(held, trials, LiveStatus(), T0), width).splitlines()
        )


def test_the_live_view_shows_each_of_several_running_trials():
    held = record(Phase.SEARCHING, baseline=BASELINE, tuning=tuning(spare={"parallelism": 3}))
    trials = [running(n, BASELINE.with_value("max_num_seqs", n), TrialPhase.MEASURING) for n in (12, 13)]
    doing = {trials[0].id: Doing("warming up", 0.4), trials[1].id: Doing("measuring")}
    text = drawn(progress_view(held, trials, LiveStatus(trials=doing), T0 + 65), 140)
    assert "trial 12 Measuring, warming up 40%" in text
    assert "trial 13 Measuring, measuring" in text
    assert trial_line(held, [], running(3, BASELINE, slot=2)).startswith("starting on spare 2: ")
    assert "spare" not in trial_line(record(Phase.SEARCHING), [], running(3, BASELINE))


@pytest.mark.parametrize("phase", list(Phase))
def test_a_terminal_shows_every_phase_and_is_left_as_it_was(phase):
    stream = Terminal()
    with Console(stream, plain=False, zone=UTC) as console:
        for trials in ([], search_trials(), [*search_trials(), *confirm_trials()]):
            console.update(record(phase, baseline=BASELINE, phase_since=T0), trials, LiveStatus("x", 0.5))
    console.close()
    assert f"{phase}: It is {phase}." in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())


def test_on_a_terminal_the_end_is_a_panel_and_a_table_of_all_trials():
    stream = Terminal()
    done, trials = promoted()
    with Console(stream, plain=False) as console:
        console.update(done, trials, LiveStatus(report="r.html"))
    text = stream.getvalue()
    assert "chat: Promoted" in text
    assert "report:  r.html" in text
    assert text.count("1,010 ± 20") == 1


def test_the_best_so_far_is_told_with_what_it_rests_on():
    held = record(Phase.SEARCHING, baseline=BASELINE)
    assert best_text(held, []) == ""
    base = trial(0, BASELINE, purpose="baseline")
    assert best_text(held, [base]) == "best so far: 1,000 output tokens/s: as the baseline"
    better = trial(1, BASELINE.with_value("max_num_seqs", 128), rate=1500.0)
    assert best_text(held, [base, better]) == (
        "best so far: 1,500 output tokens/s (+50.0%, 1 run): max_num_seqs 64 → 128"
    )
    done, trials = promoted()
    assert best_text(done, trials).startswith("ahead: ")
    assert "3 fresh starts of each side" in best_text(done, trials)


def test_what_is_left_of_time_and_gpu_minutes_is_told():
    spec = tuning(budget={"trials": 8, "gpuMinutes": 10.0, "wallTime": "30m"})
    held = record(Phase.SEARCHING, tuning=spec, baseline=BASELINE, search_since=T0)
    text = left_text(held, [trial(0, BASELINE)], T0 + 90)
    assert text.startswith("in Searching for 1 min 30 s of ")
    assert "28 min 30 s of the search left" in text
    assert "8.2 of 10 GPU minutes left" in text
    waits = record(Phase.AWAITING_APPROVAL)
    assert left_text(waits, [trial(0, BASELINE)], T0 + 5) == (
        "in AwaitingApproval for 5 s, 1.8 minutes of the spare used"
    )


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_what_cant_be_written_is_left_out_and_the_tuning_goes_on():
    for is_plain in (True, False):
        console = Console(FullDisk(), plain=is_plain, zone=UTC)
        console.tell("a line")
        console.update(record(Phase.SEARCHING, baseline=BASELINE), search_trials(), LiveStatus())
        console.close()
