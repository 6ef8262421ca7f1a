"""Live progress of a tuning in the terminal; plain lines, each fact once, where it is not a terminal."""

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from types import TracebackType
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tunewright.controller.deadlines import deadline
from tunewright.controller.trials import running
from tunewright.domain.oneline import clean
from tunewright.domain.phases import TERMINAL, Phase
from tunewright.domain.state import Gain, TrialOutcome, TrialPhase, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.step import age
from tunewright.telemetry.facts import (
    baseline_objective,
    best_trial,
    difference_text,
    gain_over,
    leading_finalist,
    objective_text,
    percent,
    runs,
    seconds,
)

TABLE_ROWS = 12
"""Trials shown while it runs, the latest ones: a live table must not be taller than the terminal."""

_SPANS = re.compile(r"\d+(\.\d+)? ?s\b")

_OUTCOME_STYLE = {
    TrialOutcome.COMPLETE: "green",
    TrialOutcome.INFEASIBLE: "yellow",
    TrialOutcome.STOPPED: "blue",
    TrialOutcome.FAILED: "red",
}
_GOOD_ENDS = {Phase.PROMOTED, Phase.RECOMMENDED}


@dataclass(frozen=True)
class Doing:
    """What a trial or a promotion does just now (`waiting for the server`, `warming up`).

    `progress` is how far that is (0 to 1; None: not known).
    """

    stage: str = ""
    progress: float | None = None

    def __str__(self) -> str:
        share = f" {min(max(self.progress, 0.0), 1.0):.0%}" if self.progress is not None else ""
        return f"{clean(self.stage)}{share}"


@dataclass(frozen=True)
class LiveStatus:
    """What only the running loop knows: nothing of it is in the records.

    `stage` and `progress` are those of the trial that runs, or of the promotion; where several trials run, `trials` has
    each one's by id. `report` is where the report was written.
    """

    stage: str = ""
    progress: float | None = None
    report: str | None = None
    trials: Mapping[str, Doing] = field(default_factory=dict)


class Console:
    """Shows one tuning after another state; call `update` as often as you like, it finds out what is new.

    `plain=None` means plain lines unless `stream` is a terminal. Times are local, or of `zone`.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        plain: bool | None = None,
        zone: tzinfo | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        stream = stream if stream is not None else sys.stdout
        self._plain = plain if plain is not None else not stream.isatty()
        self._zone = zone
        self._now = now
        # Plain stays plain: FORCE_COLOR and the like, as CI systems set them, must not put codes into a log.
        terminal = False if self._plain else None
        self._rich = RichConsole(file=stream, highlight=False, soft_wrap=self._plain, force_terminal=terminal)
        self._live: Live | None = None
        self._history = 0
        self._sentence = ""
        self._trials: dict[str, str] = {}
        self._notes: tuple[str, ...] = ()
        self._ended = False

    def update(self, record: TuningRecord, trials: Sequence[TrialRecord], live: LiveStatus) -> None:
        """Show what is new since the last call. Calling it again with the same changes nothing.

        What can't be written (a full disk, a terminal that is gone) is left out: it is in the records.
        """
        with suppress(OSError):
            self._update(record, trials, live)

    def tell(self, line: str) -> None:
        """One line as it is; left out where it can't be written."""
        with suppress(OSError):
            self._rich.print(Text(line))

    def _update(self, record: TuningRecord, trials: Sequence[TrialRecord], live: LiveStatus) -> None:
        if len(record.history) < self._history or not {trial.id for trial in trials} >= self._trials.keys():
            self._history, self._trials, self._ended = 0, {}, False  # the tuning was started anew
        told = self._new_phases(record) + (self._new_trials(record, trials) if self._plain else [])
        for at, what, sentence in sorted(told, key=lambda one: one[0]):
            self._say(at, what, sentence)
        if record.sentence and _timeless(record.sentence) != _timeless(self._sentence):
            self._say(None, str(record.phase), record.sentence)
            self._sentence = record.sentence
        if record.notes != self._notes:
            self._notes = record.notes
            for note in record.notes:
                self._say(None, "Note", note)
        if not self._plain and record.phase not in TERMINAL:
            self._refresh(progress_view(record, trials, live, self._now()))
        if record.phase in TERMINAL and not self._ended:
            self._ended = True
            self._finish(record, trials, live)
        elif record.phase not in TERMINAL:
            self._ended = False

    def close(self) -> None:
        """Take the live view away and leave the terminal as it was; lines that were told stay. May be called again."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    def __enter__(self) -> "Console":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_phases(self, record: TuningRecord) -> list[tuple[float, str, str]]:
        new = record.history[self._history :]
        self._history = len(record.history)
        if new:
            self._sentence = new[-1].sentence
        return [(change.at, str(change.phase), change.sentence) for change in new]

    def _new_trials(self, record: TuningRecord, trials: Sequence[TrialRecord]) -> list[tuple[float, str, str]]:
        new = []
        for trial in sorted(trials, key=lambda trial: trial.number):
            state = f"{trial.attempt} {trial.phase}"
            if self._trials.get(trial.id) == state:
                continue
            self._trials[trial.id] = state
            if trial.phase in (TrialPhase.STARTING, TrialPhase.DONE):
                new.append((trial.phase_since, trial_title(trial), trial_line(record, trials, trial)))
        return new

    def _say(self, at: float | None, what: str, sentence: str) -> None:
        text = Text()
        if at is not None:
            text.append(f"{datetime.fromtimestamp(at, self._zone):%H:%M:%S} ", style="dim")
        else:
            text.append(" " * 9)
        text.append(f"{clean(what)}: ", style="bold")
        text.append(clean(sentence))
        self._rich.print(text)

    def _refresh(self, view: RenderableType) -> None:
        if self._live is None:
            self._live = Live(console=self._rich, refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(view, refresh=True)

    def _finish(self, record: TuningRecord, trials: Sequence[TrialRecord], live: LiveStatus) -> None:
        self.close()
        lines = end_lines(record, trials, live)
        if self._plain:
            for line in lines:  # the sentence was told with its phase
                self._rich.print(Text(line))
            return
        if trials:
            self._rich.print(trials_table(record, trials))
        style = "green" if record.phase in _GOOD_ENDS else "yellow"
        text = "\n".join([clean(record.sentence), *lines] if record.sentence else lines)
        self._rich.print(Panel(Text(text), title=f"{record.name}: {record.phase}", border_style=style))


def trial_title(trial: TrialRecord) -> str:
    """`trial 3`, `baseline (trial 0)`, `round 2 (trial 14)`."""
    match trial.purpose:
        case TrialPurpose.BASELINE:
            return f"baseline (trial {trial.number})"
        case TrialPurpose.CONFIRM:
            return f"round {trial.round} (trial {trial.number})"
        case TrialPurpose.LADDER:
            return f"ladder, step {trial.round} (trial {trial.number})"
        case TrialPurpose.SEARCH:
            return f"trial {trial.number}"


def trial_line(record: TuningRecord, trials: Sequence[TrialRecord], trial: TrialRecord) -> str:
    """All there is to say of one trial, in one line."""
    what = difference_text(record.baseline, trial.candidate)
    if trial.phase is not TrialPhase.DONE:
        again = f" on spare {trial.slot}" if record.tuning.spec.spare.parallelism > 1 else ""
        again += f", attempt {trial.attempt}" if trial.attempt > 1 else ""
        why = f" ({trial.reason})" if trial.reason else ""
        return f"starting{again}: {what}{why}"
    outcome = str(trial.outcome or "ended")
    if trial.failure is not None:
        return f"{outcome}: {what}: {trial.failure.kind}: {trial.failure.cause}"
    if trial.measurement is None or trial.objective is None:
        return f"{outcome}: {what}"
    measured = trial.measurement
    parts = [f"{objective_of(record, trial)}{_against(record, trials, trial)}"]
    parts.append(f"TTFT p95 {seconds(measured.ttft.p95)}")
    if trial.slo_margin is not None and trial.slo_margin < 0:
        parts.append(f"misses the SLO by {-trial.slo_margin:.0%}")
    if trial.start_seconds is not None:
        parts.append(f"started in {seconds(trial.start_seconds)}")
    if trial.stopped is not None:
        parts.append(trial.stopped)
    return f"{outcome}: {what}: {', '.join(parts)} [{measured.source}, 1 run]"


def objective_of(record: TuningRecord, trial: TrialRecord) -> str:
    """The objective with its 95 % interval where it has one (throughput, over the steady window)."""
    if trial.objective is None or trial.measurement is None:
        return "–"
    text = objective_text(record.tuning.spec.objective, trial.objective)
    if record.tuning.spec.objective.maximize != "outputTokensPerSecond":
        return text
    rate = trial.measurement.output_tokens_per_second
    figure, unit = text.split(" ", 1)
    return f"{figure} ± {(rate.high - rate.low) / 2:,.0f} {unit}"


def _against(record: TuningRecord, trials: Sequence[TrialRecord], trial: TrialRecord) -> str:
    if trial.purpose is not TrialPurpose.SEARCH:
        return ""
    gain = gain_over(record.tuning.spec.objective, trial.objective, baseline_objective(trials))
    return f" ({percent(gain)})" if gain is not None else ""


def gain_text(gain: Gain) -> str:
    """A gain with its interval and what it rests on."""
    interval = (
        f"from {percent(gain.estimate.low)} to {percent(gain.estimate.high)}" if gain.bounded else "not bounded yet"
    )
    return f"{percent(gain.estimate.value)} ({interval}, {gain.rounds} fresh starts of each side)"


def end_lines(record: TuningRecord, trials: Sequence[TrialRecord], live: LiveStatus) -> list[str]:
    """The end of a tuning: what it came to, how sure that is, where the numbers come from, where to read on."""
    lines = []
    if record.winner is not None:
        lines.append(f"change:  {clean(difference_text(record.baseline, record.winner))}")
    lead = leading_finalist(record)
    if lead is not None and lead.gain is not None:
        lines.append(f"gain:    {gain_text(lead.gain)}")
    sources = sorted({str(trial.measurement.source) for trial in trials if trial.measurement is not None})
    if sources:
        measured = sum(trial.measurement is not None for trial in trials)
        lines.append(f"source:  {', '.join(sources)}; {runs(measured)} measured in all")
    if live.report:
        lines.append(f"report:  {clean(live.report)}")
    return lines


def best_text(record: TuningRecord, trials: Sequence[TrialRecord]) -> str:
    """The best so far: the confirmed gain where there is one, else the best single run; empty before the first."""
    lead = leading_finalist(record)
    if lead is not None and lead.gain is not None:
        return f"ahead: {difference_text(record.baseline, lead.candidate)}: {gain_text(lead.gain)}"
    best, objective = best_trial(trials), record.tuning.spec.objective
    if best is None or best.objective is None:
        return ""
    gain = gain_over(objective, best.objective, baseline_objective(trials))
    against = f" ({percent(gain)}, 1 run)" if gain is not None and best.purpose is TrialPurpose.SEARCH else ""
    value = objective_text(objective, best.objective)
    return f"best so far: {value}{against}: {difference_text(record.baseline, best.candidate)}"


def left_text(record: TuningRecord, trials: Sequence[TrialRecord], now: float) -> str:
    """How long the phase has taken and may take, and what is left of the search's time and GPU minutes."""
    parts, limit, budget = [], deadline(record, trials), record.tuning.spec.budget
    parts.append(
        f"in {record.phase} for {seconds(age(record, now))}" + (f" of {seconds(limit)} at most" if limit else "")
    )
    if record.phase is Phase.SEARCHING and record.search_since is not None and budget.wall_time is not None:
        parts.append(f"{seconds(max(0.0, budget.wall_time - (now - record.search_since)))} of the search left")
    used = sum(trial.gpu_seconds for trial in trials) / 60
    if budget.gpu_minutes is not None:
        parts.append(f"{max(0.0, budget.gpu_minutes - used):.1f} of {budget.gpu_minutes:g} GPU minutes left")
    elif used:
        parts.append(f"{used:.1f} minutes of the spare used")
    return ", ".join(parts)


def progress_view(record: TuningRecord, trials: Sequence[TrialRecord], live: LiveStatus, now: float) -> RenderableType:
    """What stays at the bottom of the terminal while a tuning runs; `now` in seconds since the epoch."""
    parts: list[RenderableType] = [trials_table(record, trials, TABLE_ROWS)] if trials else []
    budget = record.tuning.spec.budget.trials
    done = sum(trial.purpose is TrialPurpose.SEARCH and trial.phase is TrialPhase.DONE for trial in trials)
    line = Table.grid(padding=(0, 1))
    label = Text(f"{clean(record.name)} {record.phase}", style="bold")
    line.add_row(label, ProgressBar(total=budget, completed=min(done, budget), width=24), f"{done}/{budget} trials")
    parts.append(line)
    parts += [Text(f"  {stage}", style="dim") for stage in _stages(trials, live)]
    if best := best_text(record, trials):
        parts.append(Text(f"  {clean(best)}"))
    parts.append(Text(f"  {left_text(record, trials, now)}", style="dim"))
    return Group(*parts)


def _stages(trials: Sequence[TrialRecord], live: LiveStatus) -> list[str]:
    """What each running trial does, or the promotion."""
    doing = Doing(live.stage, live.progress)
    named = [(f"{trial_title(trial)} {trial.phase}", live.trials.get(trial.id, doing)) for trial in running(trials)]
    lines = [", ".join(part for part in (name, str(own)) if part) for name, own in named or [("", doing)]]
    return [line for line in lines if line]


def trials_table(record: TuningRecord, trials: Sequence[TrialRecord], rows: int | None = None) -> Table:
    """The trials, or the latest `rows` of them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("differs from the baseline by", overflow="fold", ratio=1)
    table.add_column("outcome")
    table.add_column("objective ± 95 %", justify="right")
    table.add_column("TTFT p95", justify="right")
    table.add_column("start", justify="right")
    table.add_column("source")
    ordered = sorted(trials, key=lambda trial: trial.number)
    for trial in ordered[-rows:] if rows else ordered:
        outcome = str(trial.outcome) if trial.outcome else str(trial.phase).lower()
        if trial.failure is not None and trial.phase is TrialPhase.DONE:
            outcome = str(trial.failure.kind)
        measured = trial.measurement
        table.add_row(
            str(trial.number),
            Text(clean(_row_text(record, trial))),
            Text(outcome, style=_OUTCOME_STYLE.get(trial.outcome, "cyan") if trial.outcome else "cyan"),
            objective_of(record, trial),
            seconds(measured.ttft.p95) if measured else "–",
            seconds(trial.start_seconds) if trial.start_seconds is not None else "–",
            f"{measured.source}, 1 run" if measured else "–",
        )
    return table


def _row_text(record: TuningRecord, trial: TrialRecord) -> str:
    what = difference_text(record.baseline, trial.candidate)
    return f"round {trial.round}: {what}" if trial.purpose is TrialPurpose.CONFIRM else what


def _timeless(sentence: str) -> str:
    """A sentence that only counts seconds is no news: hours of it would bury a log."""
    return _SPANS.sub("", sentence)
