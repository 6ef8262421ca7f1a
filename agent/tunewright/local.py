"""One tuning on one machine: the adapters put together, and production supervised while the loop runs."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from tunewright.controller.context import Context
from tunewright.controller.loop import run
from tunewright.controller.trials import put_back, run_id, running
from tunewright.domain.answers import QualityPrompt
from tunewright.domain.phases import TERMINAL, TOUCHES_PRODUCTION, Phase
from tunewright.domain.state import TrialPhase, TrialRecord, TuningRecord
from tunewright.domain.step import start_anew, update
from tunewright.domain.tuning import Tuning
from tunewright.knobs import asking, binary, commandline
from tunewright.knobs.facts import ModelFacts, from_config
from tunewright.loadtest.files import write_atomic
from tunewright.observe.prometheus import PrometheusSource
from tunewright.observe.scrape import ScrapeSource, ScrapeTarget
from tunewright.platform.process.adopted import AdoptedTarget
from tunewright.platform.process.command import Command
from tunewright.platform.process.loadtest import ProcessLoadTest
from tunewright.platform.process.machine import with_machine
from tunewright.platform.process.offline import OfflineTarget
from tunewright.platform.process.separate import shared_gpus, simulated, spare_environment
from tunewright.platform.process.spare import ProcessSpare
from tunewright.platform.process.target import ProcessTarget
from tunewright.ports import Clock, LoadPhase, MetricsSource, PortError, Refused, Spare, Stop
from tunewright.promptsfile import QUALITY, read_prompts
from tunewright.propose.proposer import OptunaProposer
from tunewright.store.lock import agent_lock
from tunewright.store.one import OneStore
from tunewright.store.sqlite import SqliteStore
from tunewright.telemetry.console import Doing, LiveStatus
from tunewright.telemetry.metrics import Metrics
from tunewright.telemetry.report import render_report
from tunewright.telemetry.source import WatchedSource

SWEEP_WITHIN = 60.0
"""Seconds in which servers of the spare must have ended: they get 15 s after SIGTERM, and SIGKILL then."""

TROUBLE_WAIT, TROUBLE_LIMIT = 5.0, 900.0
"""Seconds between two tries while the store can't be written, and after which it is given up."""

SUPERVISE_EVERY = 2.0
"""Seconds between two looks at production outside the phases that move it: what died is brought back."""


def store_path(state: Path) -> Path:
    """The one file that holds all records of a state folder."""
    return state / "store.sqlite"


class LocalTuning:
    """Use as a context manager: it holds the store's lock, and its threads end with it; production goes on serving."""

    def __init__(self, state: Path, tuning: Tuning, clock: Clock) -> None:
        self.tuning, self.clock = tuning, clock
        self.folder = state / tuning.metadata.name
        self.state = state
        self._prompts()  # refused before anything is touched
        self._facts = asked_facts(tuning, state)
        self._proposer = OptunaProposer(tuning.spec.search, self._facts, tuning.spec.load)
        self._exits = ExitStack()
        self._supervised = float("-inf")
        self._reported = ""
        self._spare_told = ""

    def __enter__(self) -> "LocalTuning":
        with ExitStack() as exits:
            exits.enter_context(agent_lock(store_path(self.state)))
            make_folder(self.folder)
            self.store = SqliteStore(store_path(self.state), self.clock)
            exits.callback(self.store.close)
            self.target = self._make_target()
            self.metrics = Metrics(OneStore(self.store), self.clock)
            self.metrics.instruments.leads(lambda: True)  # as long as it lives it holds the lock
            spec = self.tuning.spec
            self.context = Context(
                clock=self.clock,
                store=self.store,
                metrics=WatchedSource(self._metrics_source(exits), self.metrics.instruments),
                spare=ProcessSpare(self.folder / "spare", spec.target, spec.spare, self.clock),
                load=ProcessLoadTest(self.folder / "load", self.clock),
                target=self.target,
                proposer=self._proposer,
                prompts=self._prompts,
            )
            self.record = self._open_record()
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    @property
    def report_path(self) -> Path:
        """Where the report is written, again at every change of phase."""
        return self.folder / "report.html"

    @property
    def prometheus_targets(self) -> Path:
        """A `file_sd` file that names the servers of production as they come and go."""
        return self.folder / "production" / "prometheus-targets.json"

    @property
    def spare_targets(self) -> Path:
        """The same for servers under test: their traffic is the load tests', so they need a scrape job of their own."""
        return self.folder / "spare-targets.json"

    def start_production(self, stop: Stop) -> bool:
        """Start production and wait until it is whole; False when `stop` came first.

        Raises `PortError` with what is missing when it is not whole within `target.startTimeout`.
        """
        if not isinstance(self.target, ProcessTarget):
            return True
        deadline = self.clock.monotonic() + self.tuning.spec.target.start_timeout
        while not (status := self.target.ensure_started()).settled:
            if status.failure is not None:
                raise PortError(f"production did not start: {status.failure.cause}")
            if self.clock.monotonic() > deadline:
                raise PortError(f"production was not whole in time: {status.detail}")
            if stop.wait(0.1):
                return False
        return True

    def run(
        self, stop: Stop, on_step: Callable[[TuningRecord, LiveStatus], None], *, keep_going: bool = False
    ) -> TuningRecord | None:
        """Drive the tuning to its end, or until `stop`; production is started first and kept alive meanwhile."""

        def step(record: TuningRecord) -> None:
            self._supervise(record)
            self._write_report(record)
            on_step(record, self.live(record))

        self._supervise(self.record)
        record = self._run_through_trouble(stop, step, keep_going)
        if record is not None and record.phase not in TERMINAL:
            self._free_spare()
        elif self.record.phase in TERMINAL:
            self.start_production(stop)  # an ended tuning that is started again brings back what died meanwhile
        return record

    def _run_through_trouble(
        self, stop: Stop, step: Callable[[TuningRecord], None], keep_going: bool
    ) -> TuningRecord | None:
        """A full disk or a busy store may pass: nothing is lost by trying again, and production is kept meanwhile."""
        good = self.clock.monotonic()

        def noted(record: TuningRecord) -> None:
            nonlocal good
            step(record)
            good = self.clock.monotonic()

        while True:
            try:
                return run(
                    self.tuning.metadata.name,
                    self.context,
                    stop,
                    noted,
                    keep_going=keep_going,
                    observe=self.metrics.instruments.reconciled,
                )
            except PortError as error:
                if self.clock.monotonic() - good > TROUBLE_LIMIT:
                    raise
                with suppress(OSError):
                    print(f"Trying again in {TROUBLE_WAIT:.0f} s: {error}", file=sys.stderr, flush=True)
                if stop.wait(TROUBLE_WAIT):
                    raise
                self._supervise(self.record)

    def start_anew(self) -> None:
        """Let a tuning that has ended begin again from the start. Raises `Refused` while it has not."""
        if self.record.phase is Phase.PENDING:
            return
        if self.record.phase not in TERMINAL:
            raise Refused(
                f"{self.record.name} is {self.record.phase}; only one that has ended can start anew: abort it first"
            )
        self.record = self.store.save(start_anew(self.record, "Started anew by hand.", self.clock.now()))

    def live(self, record: TuningRecord) -> LiveStatus:
        """What the running trials do just now."""
        present = running(self.store.trials(record.name))
        self._publish_spares([trial for trial in present if trial.phase is TrialPhase.MEASURING])
        doing = {trial.id: self._doing(trial) for trial in present}
        report = str(self.report_path) if record.phase in TERMINAL else None
        return LiveStatus(report=report, trials=doing)

    def _doing(self, trial: TrialRecord) -> Doing:
        if trial.phase is not TrialPhase.MEASURING:
            return Doing(stage=str(trial.phase))
        load = self.context.load.poll(run_id(trial))
        return Doing(load.detail or "measuring", load.progress if load.phase is LoadPhase.RUNNING else None)

    def _publish_spares(self, measuring: Sequence[TrialRecord]) -> None:
        """Tell Prometheus (`file_sd_configs`, a job of its own) where servers under test are, for the dashboards."""
        groups = []
        for trial in measuring:
            url = self.context.spare.poll(run_id(trial)).url
            labels = {"role": "spare", "candidate": trial.candidate.hash, "tuning": self.tuning.metadata.name}
            groups += [{"targets": [url.removeprefix("http://")], "labels": labels}] if url else []
        text = json.dumps(groups, indent=1)
        if text == self._spare_told:
            return
        with suppress(OSError):  # a full disk costs a panel, not the tuning
            write_atomic(self.spare_targets, text.encode())
            self._spare_told = text

    def _prompts(self) -> Sequence[QualityPrompt]:
        file = self.tuning.spec.quality.prompts_file
        return read_prompts(Path(file), "quality.promptsFile", QUALITY) if file else ()

    def _make_target(self) -> ProcessTarget | AdoptedTarget | OfflineTarget:
        spec = self.tuning.spec
        if shared := shared_gpus(spec.target, spec.spare):
            raise Refused(shared)
        if spec.target.urls:
            return AdoptedTarget(spec.target, spec.spare, self.clock)
        if spec.offline:
            return OfflineTarget(spec.target, spec.spare)
        return ProcessTarget(
            self.folder / "production",
            spec.target,
            self.clock,
            canary_environment=spec.spare.environment,
            tuning=self.tuning.metadata.name,
            facts=self._facts,
        )

    def _metrics_source(self, exits: ExitStack) -> MetricsSource:
        metrics = self.tuning.spec.metrics
        token = Path(metrics.bearer_token_file) if metrics.bearer_token_file else None
        if metrics.prometheus is not None:
            return PrometheusSource(
                metrics.prometheus, metrics.selector, interval=metrics.interval, bearer_token_file=token
            )
        key = self.tuning.spec.target.api_key_file
        source = ScrapeSource(
            self._scrape_targets,
            metrics.interval,
            self.clock,
            history=max(3600.0, 2 * metrics.window),
            bearer_token_file=Path(key) if key else None,
        )
        stop = threading.Event()
        thread = threading.Thread(target=source.run, args=(stop,), name="scrape", daemon=True)
        thread.start()
        exits.callback(source.close)
        exits.callback(thread.join, 10.0)
        exits.callback(stop.set)
        return source

    def _scrape_targets(self) -> Sequence[ScrapeTarget]:
        return [ScrapeTarget(f"http://{address}", labels) for address, labels in self.target.scrape_targets().items()]

    def _open_record(self) -> TuningRecord:
        """The record as it was left, with the file as it is now; a new one when there is none."""
        known = self.store.load(self.tuning.metadata.name)
        if known is None:
            now = self.clock.now()
            new = TuningRecord(tuning=self.tuning, spec_hash=self.tuning.spec.spec_hash, phase_since=now)
            return self.store.save(new)
        return known if known.tuning == self.tuning else self.store.save(update(known, tuning=self.tuning))

    def _supervise(self, record: TuningRecord) -> None:
        if not isinstance(self.target, ProcessTarget) or record.phase in TOUCHES_PRODUCTION:
            return
        if self.clock.monotonic() - self._supervised < SUPERVISE_EVERY:
            return
        self._supervised = self.clock.monotonic()
        try:
            self.target.ensure_started()
        except PortError:
            return  # the phase's own look at production tells what is wrong, and its deadline ends it

    def _free_spare(self) -> None:
        """We stop half-way: running trials are put back, to be run again, so that they hold no GPU meanwhile."""
        name = self.tuning.metadata.name
        for current in running(self.store.trials(name)):
            if current.phase is not TrialPhase.PENDING:
                self.store.save_trial(name, put_back(current, self.context))
        sweep_spare(self.context.spare, self.clock)

    def _write_report(self, record: TuningRecord) -> None:
        state = f"{record.phase}{record.phase_since}{len(record.decisions)}"
        if state == self._reported:
            return
        try:
            write_atomic(self.report_path, self.render_report(record).encode())
        except OSError:
            return  # tried again at the next step; what is wrong with the disk the store tells
        self._reported = state

    def render_report(self, record: TuningRecord) -> str:
        """The report page as of now."""
        to_do = record.winner if record.phase is not Phase.PROMOTED else None
        how = self.target.recommend(to_do) if to_do is not None else ""
        decisions = self.store.decisions(record.name)
        return render_report(record, self.store.trials(record.name), decisions=decisions, how_to_apply=how)


def make_folder(folder: Path) -> None:
    """Make a folder that only this user can read; raises `Refused` when that can't be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Refused(f"can't make the folder {folder} ({error.strerror}); use another --state") from error


def sweep_spare(spare: Spare, clock: Clock) -> None:
    """End whatever is on the spare and wait until it is gone. Raises `PortError` when something does not end."""
    deadline = clock.monotonic() + SWEEP_WITHIN
    while left := spare.sweep(keep=[]):
        if clock.monotonic() > deadline:
            raise PortError(f"not gone within {SWEEP_WITHIN:.0f} s: {', '.join(left)} on the spare; end it by hand")
        time.sleep(0.1)


def stop_servers(state: Path, tuning: Tuning, clock: Clock) -> bool:
    """End production, the spare and a running load test of a tuning whose agent does not run.

    False when there was nothing. Raises `Refused` while an agent runs, `PortError` when something does not end.
    """
    spec, folder = tuning.spec, state / tuning.metadata.name
    if spec.target.urls:
        raise Refused("target.urls names servers that somebody else runs: there is nothing to stop")
    if not folder.is_dir():
        return False
    with agent_lock(store_path(state)):
        ProcessLoadTest(folder / "load", clock).cancel_all()
        sweep_spare(ProcessSpare(folder / "spare", spec.target, spec.spare, clock), clock)
        if not spec.offline:
            production = folder / "production"
            ProcessTarget(production, spec.target, clock, canary_environment=spec.spare.environment).stop_all()
    return True


def asked_facts(tuning: Tuning, state: Path) -> ModelFacts:
    """Facts of model and GPUs, and the flags that the very vLLM in the command takes, as it says itself."""
    spec = tuning.spec
    environment = {**spec.target.environment, **spec.spare.environment}
    command = Command(spec.spare.command or spec.target.command, environment)
    words, variables = command.filled(command.baseline, port=0, replica=spec.target.replicas)
    flags, unknown = binary.ask(words, variables, state / "binaries")
    return replace(model_facts(tuning), flags=flags, flags_unknown=unknown)


def model_facts(tuning: Tuning) -> ModelFacts:
    """What the model's own `config.json` tells, where the command names its folder or a hub id that is cached, and what
    the spare's GPUs are.
    """
    spec = tuning.spec
    command = list(spec.spare.command or spec.target.command)
    environment = spare_environment(spec.target, spec.spare)
    named = commandline.model_of(command)
    folder = next((following for word, following in pairwise(command) if word == "--download-dir"), "")
    config = asking.config_of(named, {**os.environ, **environment}, folder) if named else None
    known = from_config(config) if config is not None else ModelFacts()
    # This machine's own GPUs are not a simulated server's.
    return known if simulated(command) else with_machine(known, environment)
