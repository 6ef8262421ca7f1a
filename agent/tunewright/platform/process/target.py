"""Production as a fleet of processes on this machine, behind our own reverse proxy.

Everything that must survive the agent lies in files of one directory; `apply` takes one idempotent step and returns.
"""

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tunewright.domain.candidate import Candidate
from tunewright.domain.model import Model
from tunewright.domain.recipe import Recipe
from tunewright.domain.tuning import Target
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.validity import problems as invalid
from tunewright.loadtest.files import write_atomic
from tunewright.platform.process import children, environ, gpu, records, sockets
from tunewright.platform.process.attempts import Attempts
from tunewright.platform.process.command import Command
from tunewright.platform.process.fleet import (
    CANARY,
    SURGE,
    Action,
    Do,
    View,
    decide,
    settled,
    wanted_servers,
    weights,
)
from tunewright.platform.process.front import Front
from tunewright.platform.process.records import Launch, Since
from tunewright.platform.process.routing import Route
from tunewright.platform.process.server import Server
from tunewright.ports import Clock, PortError, Refused, Replica, ServerPhase, ServerStatus, TargetPlan, TargetStatus

LOGS_KEPT = 20
_DEFAULT_MEMORY_SHARE = 0.92  # vLLM's
_DRIVER_MEMORY = 1024.0  # MiB that a GPU reports in use with nobody on it


class _Stable(Model):
    """What production runs since the last promotion. It holds only for the command that it was promoted on."""

    candidate: Candidate
    base: str
    commanded: str  # hash of the knobs in the command itself: a person who changes them there overrules us


class _Plan(Model):
    baseline: Candidate
    candidate: Candidate
    updated: int
    canary: bool
    canary_share: float
    base: str
    commanded: str


class _Seen:
    """One server, read once per step."""

    def __init__(self, server: Server, launch: Launch, status: ServerStatus, view: View) -> None:
        self.server, self.launch, self.status, self.view = server, launch, status, view


class ProcessTarget:
    """Implements `ports.Target`. `canary_environment` (the spare's) is that of the canary, beside the target's own."""

    def __init__(
        self,
        directory: Path,
        target: Target,
        clock: Clock,
        *,
        canary_environment: Mapping[str, str] | None = None,
        tuning: str = "",
        facts: ModelFacts | None = None,
    ) -> None:
        self._directory = directory.absolute()
        self._servers_directory = self._directory / "servers"
        self._servers_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._target = target
        self._clock = clock
        self._tuning = tuning
        self._facts = facts or ModelFacts()
        self._command = Command(target.command, target.environment, target.api_key_file)
        beside = {**target.environment, **(canary_environment or {})}
        self._beside = Command(target.command, beside, target.api_key_file)
        self._front = Front(self._directory / "proxy", target.listen, clock)
        (self._directory / "proxy").mkdir(exist_ok=True, mode=0o700)
        self._attempts = Attempts(self._directory / "attempts.json", clock)
        self._known: dict[str, Server] = {}
        self._retired_at: dict[str, float] = {}
        self._lock = threading.RLock()

    # --- the port ---

    def describe(self) -> str:
        """For people: what it is and where clients reach it."""
        return f"{self._target.replicas} × `{self._command.show(self.baseline())}` behind {self._front.url}"

    def baseline(self) -> Candidate:
        """What production is configured to run now: the command's own knobs, or what was promoted since."""
        stable = records.read(self._directory / "stable.json", _Stable)
        ours = stable is not None and (stable.base, stable.commanded) == (
            self._command.base,
            self._command.baseline.hash,
        )
        return stable.candidate if stable is not None and ours else self._command.baseline

    def beside_knobs(self) -> str:
        """Empty: the tuning's own spec says it."""
        return ""

    def observe(self) -> TargetStatus:
        """Production as it is; changes nothing."""
        with self._lock:
            return self._status(self._last_plan(), self._see(change=False), "")

    def ensure_started(self) -> TargetStatus:
        """One step towards the last plan, or towards what production is to run: starts it, adopts it after a restart
        of the agent, brings back what died. To be called every few seconds while no other plan is applied."""
        with self._lock:
            return self.apply(self._last_plan())

    def preflight(self, candidate: Candidate) -> Sequence[str]:
        """Why this candidate could not be rolled out, before anything moves; empty when it could."""
        with self._lock:
            reasons = list(invalid(candidate, self._facts)) or self._beside.problems(candidate)
            seen = self._see(change=False)
            serving = {s.view.slot for s in seen if s.view.serving}
            missing = [slot for slot in wanted_servers(self._last_plan(), self._target.replicas) if slot not in serving]
            if missing:
                reasons.append(f"{', '.join(missing)} not ready: production must be whole before it is changed")
            for problem in (self._front.problem(), self._front.tampered()):
                if problem:
                    reasons.append(problem)
            try:
                sockets.free_port(self._target.first_port)
            except PortError as error:
                reasons.append(str(error))
            reasons.extend(self._memory_problems(candidate))
            return reasons

    def notes(self, candidate: Candidate) -> Sequence[str]:  # noqa: ARG002
        """Nothing: nobody else manages these processes."""
        return ()

    def apply(self, plan: TargetPlan) -> TargetStatus:
        """Take one idempotent step towards `plan`. A new server gets requests only after a real completion; one that
        is to go is drained first. `failure` is set when a server of `candidate` died or could not start."""
        if not 0 <= plan.updated <= self._target.replicas:
            raise Refused(f"the plan updates {plan.updated} of {self._target.replicas} replicas")
        with self._lock, self._exclusive():
            self._remember(plan)
            seen = self._see(change=True)
            foreign = self._front.tampered() or ""
            actions = decide([s.view for s in seen], plan, self._target.replicas, self._may_start(plan))
            starts = [action for action in actions if action.do is Do.START]
            for action in actions:
                if action not in starts:
                    self._take(action, seen)
            seen = self._see(change=False)
            self._front.route(self._routes(plan, seen))
            problem = self._front.ensure()
            self._publish(seen)
            if starts:
                self._end_unknown()
            for action in starts:  # last, for they may fail, and what serves must not wait for that
                self._take(action, seen)
            seen = self._see(change=False) if starts else seen
            self._tidy()
            status = self._status(plan, seen, problem or "")
            if status.settled:
                self._settle(plan)
            return replace(status, foreign=foreign or status.foreign)

    def let_go(self) -> bool:
        """No: the servers are ours, and what somebody does to them is put right."""
        return False

    def recipe(self, candidate: Candidate) -> Recipe:
        """The command of one server that runs `candidate`."""
        return self._command.recipe(candidate)

    def recommend(self, candidate: Candidate) -> str:
        """What a person would change by hand to run `candidate`, as text."""
        return self._command.change(self.baseline(), candidate)

    # --- for the command line ---

    def scrape_targets(self) -> dict[str, dict[str, str]]:
        """`host:port` of every running server to its labels, for a scrape without Prometheus."""
        with self._lock:
            seen = self._see(change=False)
            return {_instance(s.launch): self._labels(s) for s in seen if s.view.phase is ServerPhase.READY}

    def stop_all(self, timeout: float = 90.0) -> None:
        """End the servers and the proxy, and prove their ports closed. Raises `PortError` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock, self._exclusive():
            while True:
                front_gone = self._front.stop()  # first, so that no request is broken off
                left = []
                for server in self._servers() if front_gone else ():
                    server.stop()
                    status = server.poll()
                    if status.phase is not ServerPhase.ABSENT:
                        left.append(f"{server.folder.name}: {status.detail}")
                for pid in children.find_marked(self._directory) if front_gone and not left else ():
                    environ.kill(pid, children.MARK, environ.variable(pid, children.MARK) or "")  # its folder is gone
                    left.append(f"process {pid}")
                if front_gone and not left:
                    self._publish([])
                    return
                if time.monotonic() > deadline:
                    what = "; ".join(left) or "the proxy still finishes its requests"
                    raise PortError(f"production did not end within {timeout:g} s: {what}")
                time.sleep(0.05)

    # --- seeing ---

    def _servers(self) -> list[Server]:
        names = sorted(path.parent.name for path in self._servers_directory.glob("*/launch.json"))
        return [self._server(name) for name in names]

    def _server(self, name: str) -> Server:
        if name not in self._known:
            command = self._command_of(name.rpartition(".")[0])
            self._known[name] = Server(
                self._servers_directory / name, command, self._clock, self._target.model, strict=False
            )
        return self._known[name]

    def _command_of(self, slot: str) -> Command:
        return self._beside if slot in (CANARY, SURGE) else self._command

    def _see(self, change: bool) -> list[_Seen]:
        seen = []
        for server in self._servers():
            status = server.poll() if change else server.look()
            launch = server.launch
            if launch is None or status.phase is ServerPhase.ABSENT:
                continue
            retire = records.read(server.folder / "retire.json", Since)
            view = View(
                name=launch.name,
                slot=launch.slot,
                candidate=launch.candidate.hash,
                current=launch.base == self._command_of(launch.slot).base,
                phase=status.phase,
                retiring=retire is not None,
                drained=retire is not None and self._drained(launch.name, retire),
                silent_seconds=status.silent_seconds,
            )
            seen.append(_Seen(server, launch, status, view))
        return seen

    def _drained(self, name: str, retire: Since) -> bool:
        now = self._clock.monotonic()
        begun = self._retired_at.setdefault(name, now - max(0.0, self._clock.now() - retire.at))
        return self._front.drained(name) or now - begun > self._target.drain_timeout

    def _status(self, plan: TargetPlan, seen: Sequence[_Seen], problem: str) -> TargetStatus:
        replicas = [
            Replica(
                name=s.launch.name,
                candidate_hash=s.view.candidate,
                ready=s.view.serving,
                canary=s.launch.slot == CANARY,
                labels={"instance": _instance(s.launch)},
                since=ready.at if (ready := s.server.ready) is not None else s.launch.at,
                version=s.status.version,
            )
            for s in seen
        ]
        problem = problem or self._front.problem() or ""
        whole = settled([s.view for s in seen], plan, self._target.replicas)
        serving = {s.view.slot for s in seen if s.view.serving}
        there = {s.view.slot for s in seen if s.view.staying}
        details = [f"{s.view.name} {s.view.phase}: {s.status.detail}" for s in seen if not s.view.serving]
        absent = [
            slot for slot in wanted_servers(plan, self._target.replicas) if slot not in {s.view.slot for s in seen}
        ]
        details += [f"{slot} is to be started" for slot in absent]
        failure = self._attempts.failure_of(plan.candidate.hash)
        if plan.candidate.hash == self.baseline().hash and whole:
            failure = None  # production's own configuration came back by itself
        return TargetStatus(
            replicas=replicas,
            desired=self._target.replicas,
            settled=whole and not problem and self._front.in_force(),
            detail="; ".join([*([problem] if problem else []), *details]) or f"{len(serving)} servers ready",
            failure=failure,
            foreign=self._front.tampered()
            or self._attempts.killed(set(wanted_servers(plan, self._target.replicas)) - there),
        )

    # --- doing ---

    def _take(self, action: Action, seen: Sequence[_Seen]) -> None:
        if action.do is Do.START and action.candidate is not None:
            self._start(action.name, action.candidate)
            return
        server = self._server(action.name)
        retire = server.folder / "retire.json"
        if action.do is Do.RETIRE:
            self._retired_at.pop(action.name, None)
            records.write(retire, Since(at=self._clock.now(), reason=action.reason))
        elif action.do is Do.KEEP:
            retire.unlink(missing_ok=True)
        elif action.do is Do.STOP:
            failure = next((s.status.failure for s in seen if s.view.name == action.name), None)
            launch = server.launch
            if failure is not None and launch is not None:
                self._attempts.failed(launch.slot, launch.candidate.hash, failure)
            server.stop()

    def _start(self, slot: str, candidate: Candidate) -> None:
        serials = [int(path.name.rpartition(".")[2]) for path in self._servers_directory.glob(f"{slot}.*")]
        server = self._server(f"{slot}.{max(serials, default=0) + 1}")
        index = slot.removeprefix("replica-")
        server.start(
            candidate,
            first_port=self._target.first_port,
            start_timeout=self._target.start_timeout,
            replica=int(index) if index.isdigit() else self._target.replicas,
            slot=slot,
        )

    def _routes(self, plan: TargetPlan, seen: Sequence[_Seen]) -> list[Route]:
        shares = weights([s.view for s in seen], plan.canary_share)
        launches = {s.view.name: s.launch for s in seen}
        return [
            Route(name, f"http://{_instance(launches[name])}", share, launches[name].slot == CANARY)
            for name, share in shares.items()
        ]

    def _publish(self, seen: Sequence[_Seen]) -> None:
        """Tell Prometheus (`file_sd_configs`) where the servers are."""
        groups = [
            {"targets": [_instance(s.launch)], "labels": self._labels(s)}
            for s in seen
            if s.view.phase is ServerPhase.READY
        ]
        path = self._directory / "prometheus-targets.json"
        text = json.dumps(groups, indent=1).encode()
        try:
            if not path.exists() or path.read_bytes() != text:
                write_atomic(path, text)
        except OSError as error:
            raise PortError(f"can't write {path}: {error}; Prometheus does not see the servers") from error

    def _labels(self, seen: _Seen) -> dict[str, str]:
        role = "canary" if seen.view.slot == CANARY else "stable"
        return {"role": role, "server": seen.view.name, "candidate": seen.view.candidate, "tuning": self._tuning}

    def _end_unknown(self) -> None:
        """Servers whose folder was removed get no requests any more, and hold what new ones need."""
        for pid in children.find_marked(self._servers_directory):
            mark = environ.variable(pid, children.MARK) or ""
            if mark and not Path(mark).with_name("launch.json").exists():
                environ.kill(pid, children.MARK, mark)

    # --- remembering ---

    def _last_plan(self) -> TargetPlan:
        plan = records.read(self._directory / "plan.json", _Plan)
        if plan is None or (plan.base, plan.commanded) != (self._command.base, self._command.baseline.hash):
            now = self.baseline()
            return TargetPlan(baseline=now, candidate=now)
        return TargetPlan(plan.baseline, plan.candidate, plan.updated, plan.canary, plan.canary_share)

    def _remember(self, plan: TargetPlan) -> None:
        record = _Plan(**vars(plan), base=self._command.base, commanded=self._command.baseline.hash)
        path = self._directory / "plan.json"
        if records.read(path, _Plan) != record:
            records.write(path, record)
        rolled_out = {plan.candidate.hash} if plan.canary or plan.updated else set()
        self._attempts.keep_only({plan.baseline.hash, self.baseline().hash} | rolled_out)

    def _settle(self, plan: TargetPlan) -> None:
        """Production runs one configuration everywhere: from now on that is what it is configured to run."""
        if plan.canary or plan.updated not in (0, self._target.replicas):
            return
        candidate = plan.candidate if plan.updated else plan.baseline
        stable = _Stable(candidate=candidate, base=self._command.base, commanded=self._command.baseline.hash)
        path = self._directory / "stable.json"
        if records.read(path, _Stable) != stable:
            records.write(path, stable)

    def _may_start(self, plan: TargetPlan) -> Callable[[str, str], bool]:
        own = {plan.baseline.hash, self.baseline().hash}
        return lambda slot, candidate: self._attempts.may_start(slot, candidate, bounded=candidate not in own)

    def _memory_problems(self, candidate: Candidate) -> list[str]:
        environment = self._beside.filled(self.baseline(), port=0, replica=self._target.replicas)[1]
        share = candidate.values.get("gpu_memory_utilization", _DEFAULT_MEMORY_SHARE)
        try:
            devices = gpu.memory({**os.environ, **environment}) or []
        except PortError as error:
            return [str(error)]
        return [
            f"GPU {device.gpu}, where the canary is to run, has {device.used:.0f} of {device.total:.0f} MiB in use: "
            f"too little is left for a share of {share}"
            for device in devices
            if isinstance(share, float | int) and device.total - device.used < share * device.total - _DRIVER_MEMORY
        ]

    def _tidy(self) -> None:
        """Keep the logs of the servers that ended last."""
        ended = [path for path in self._servers_directory.glob("*") if not (path / "launch.json").exists()]
        for folder in sorted(ended, key=lambda path: path.stat().st_mtime)[:-LOGS_KEPT]:
            shutil.rmtree(folder, ignore_errors=True)
            self._known.pop(folder.name, None)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One agent at a time."""
        try:
            self._servers_directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # it may have been removed meanwhile
            file = (self._directory / "lock").open("w")
        except OSError as error:
            raise PortError(f"can't open {self._directory / 'lock'}: {error.strerror}; correct its rights") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PortError(f"another agent acts on {self._directory} now; end it, or wait") from error
            yield


def _instance(launch: Launch) -> str:
    return f"{launch.host}:{launch.port}"
