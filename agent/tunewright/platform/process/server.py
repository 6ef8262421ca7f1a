"""One vLLM process, from launch to proven gone. All that is known of it lies in its folder, so that any agent process
takes over where another was killed. Every call is short; only the end of a dying server is waited for, briefly.
"""

import os
from dataclasses import replace
from pathlib import Path

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import Failure, FailureKind
from tunewright.knobs import failures, readback
from tunewright.platform.process import children, probe, records, sockets
from tunewright.platform.process.command import Command
from tunewright.platform.process.probe import Health
from tunewright.platform.process.records import Launch, Ready, Since
from tunewright.ports import Clock, PortError, Refused, ServerPhase, ServerStatus

STOP_GRACE = 15.0
"""Seconds between SIGTERM and SIGKILL."""

SILENCE = 60.0
"""Seconds that a server that was ready may leave /health unanswered before it counts as hung."""

ENDING = 5.0
"""Seconds that a server which is ending gets to tell its exit code: the threads of a killed one with much memory go one
after another, and its port may be closed, or its first thread gone, before the last is."""

_LOG_KEPT = 128 * 1024 * 1024
_LOG_READ = 8 * 1024 * 1024


class Server:
    """The server of one folder. `strict`: a configuration that is not the candidate's is a failure, not a remark."""

    def __init__(self, folder: Path, command: Command, clock: Clock, model: str | None, strict: bool = True) -> None:
        self.folder = folder
        self._command = command
        self._clock = clock
        self._model = model
        self._strict = strict
        self._begun: dict[tuple[str, float], float] = {}
        self._silent_since: float | None = None
        self._signalled = False

    # --- what is known ---

    @property
    def launch(self) -> Launch | None:
        """How it was launched; None when nothing of it is left."""
        return records.read(self.folder / "launch.json", Launch)

    @property
    def ready(self) -> Ready | None:
        """What was read back when it became ready."""
        return records.read(self.folder / "ready.json", Ready)

    @property
    def stopping(self) -> bool:
        """Whether it is being ended."""
        return (self.folder / "stopping.json").exists()

    @property
    def log(self) -> Path:
        """Both its streams, in the order they were written."""
        return self.folder / "server.log"

    def log_tail(self, lines: int) -> str:
        """The last lines of its log, also after its end, without the API key."""
        return self._command.redact("\n".join(_tail(self.log).splitlines()[-lines:]))

    # --- what is done ---

    def start(
        self,
        candidate: Candidate,
        *,
        first_port: int,
        start_timeout: float,
        replica: int = 0,
        slot: str = "",
    ) -> None:
        """Launch it, unless it was. Raises `PortError` (no port, no memory for it) or `Refused` (no such command)."""
        launch = self.launch
        if launch is not None and self.stopping:
            raise PortError(f"{launch.name} is still being ended; poll it until it is absent, then start it")
        if launch is not None and children.load(self._record) is not None:
            return
        self._clear()
        if self.log.exists():  # an earlier attempt's errors must not explain this one's
            self.log.replace(self.log.with_name("server.previous.log"))
        port = sockets.free_port(first_port)
        argv, environment = self._command.filled(candidate, port, replica)
        launch = Launch(
            name=self.folder.name,
            slot=slot,
            candidate=candidate,
            base=self._command.base,
            host=self._command.host,
            port=port,
            at=self._clock.now(),
            start_timeout=start_timeout,
        )
        records.write(self.folder / "launch.json", launch)
        try:
            environment = {**os.environ, **environment, sockets.PORT_VARIABLE: str(port)}
            children.spawn(argv, environment, Path.cwd(), self.log, self.log, self._record)
        except (PortError, Refused):  # nothing was started; whatever else happens, there may be a process to find
            self._clear()
            raise
        self._elapsed("launch", launch.at)

    def stop(self) -> None:
        """Begin to end it, whole; `poll` sees it through."""
        if self.launch is None:
            return
        if not self.stopping:
            records.write(self.folder / "stopping.json", Since(at=self._clock.now()))
        self._terminate()

    def poll(self) -> ServerStatus:
        """How it is now; takes the next step of starting or stopping it."""
        launch = self.launch
        if launch is None:
            return ServerStatus(ServerPhase.ABSENT)
        child = children.load(self._record)
        stopping = records.read(self.folder / "stopping.json", Since)
        if stopping is not None:
            return self._end(launch, child, stopping)
        if child is None:  # the agent was killed before the process was there
            self._clear()
            return ServerStatus(ServerPhase.ABSENT)
        failure = records.read(self.folder / "failure.json", Failure)
        if failure is None:
            status = self._watch(launch, child)
            if status.failure is None:
                return status
            records.write(self.folder / "failure.json", status.failure)
            failure = status.failure
        self._end_remains(child)
        return ServerStatus(ServerPhase.FAILED, detail=failure.cause, url=_url(launch), failure=failure)

    def look(self) -> ServerStatus:
        """How it is now, as far as can be told without taking a step."""
        launch = self.launch
        child = children.load(self._record) if launch is not None else None
        if launch is None or (child is None and not self.stopping):
            return ServerStatus(ServerPhase.ABSENT)
        if child is None or self.stopping:
            return ServerStatus(ServerPhase.STOPPING, detail="it is being ended", url=_url(launch))
        failure = records.read(self.folder / "failure.json", Failure)
        if failure is not None:
            return _failed(failure)
        ready = self.ready
        if not children.alive(child):
            return _failed(self._explain(child, under_load=ready is not None))
        if ready is not None:
            return self._watch_ready(launch, child, ready)
        waited = self._elapsed("launch", launch.at)
        detail = f"starting for {waited:.0f} s"
        return ServerStatus(ServerPhase.STARTING, detail=detail, url=_url(launch), start_seconds=waited)

    # --- starting, being ready, failing ---

    def _watch(self, launch: Launch, child: children.Child) -> ServerStatus:
        ready = self.ready
        if not children.alive(child):
            return _failed(self._explain(child, under_load=ready is not None))
        self._bound_log()
        if ready is not None:
            return self._watch_ready(launch, child, ready)
        waited = self._elapsed("launch", launch.at)
        detail = f"starting for {waited:.0f} s"
        state = probe.health(_url(launch))
        if state is Health.OK:
            try:
                status = self._prove(launch, child)
            except PortError as error:
                detail = str(error)
            else:
                return status
        if waited > launch.start_timeout:
            return _failed(self._explain(child, hung=True))
        detail = f"{detail}; /health: {state}"
        return ServerStatus(ServerPhase.STARTING, detail=detail, url=_url(launch), start_seconds=waited)

    def _prove(self, launch: Launch, child: children.Child) -> ServerStatus:
        """It says it is healthy: let it complete a token, and see that it is the one we launched, as we launched it."""
        url = _url(launch)
        stranger = self._stranger(launch, child)
        if stranger:
            return _failed(Failure(kind=FailureKind.PORT_IN_USE, cause=stranger, advice="End what holds the port."))
        probe.complete_one_token(url, self._model, self._command.headers())
        log = _head(self.log)
        version = readback.full_version(probe.version(url), log)
        effective = readback.effective(log, probe.cache_config(url))
        contradictions, surprises = readback.compare(launch.candidate, effective)
        if contradictions and self._strict:
            return _failed(
                Failure(
                    kind=FailureKind.NOT_AS_LAUNCHED,
                    cause="; ".join(contradictions),
                    advice="The server does not run what was asked for: look at its log for what overrides it.",
                )
            )
        ready = Ready(
            at=self._clock.now(),
            start_seconds=self._elapsed("launch", launch.at),
            version=version,
            effective=effective,
            surprises=(*contradictions, *surprises),
            memory=readback.start_memory(log),
        )
        records.write(self.folder / "ready.json", ready)
        return _is_ready(launch, ready)

    def _watch_ready(self, launch: Launch, child: children.Child, ready: Ready) -> ServerStatus:
        state = probe.health(_url(launch))
        if state is Health.SILENT:
            now = self._clock.monotonic()
            self._silent_since = self._silent_since if self._silent_since is not None else now
            silent = now - self._silent_since
            if silent > SILENCE:
                return _failed(self._explain(child, under_load=True, hung=True))
            told = _is_ready(launch, ready, f"/health has not answered for {silent:.0f} s")
            return replace(told, silent_seconds=silent)
        self._silent_since = None
        if state in (Health.DEAD, Health.REFUSED):  # the engine is gone, and the process is about to follow
            return _failed(self._explain(child, under_load=True, closed=state is Health.REFUSED))
        return _is_ready(launch, ready)

    def _stranger(self, launch: Launch, child: children.Child) -> str | None:
        """Who else listens on its port: vLLM shares a port with another server without saying so."""
        listening = sockets.listening_sockets(launch.port)
        ours = sockets.held_by(children.group_members(child))
        if listening and listening <= ours:
            return None
        return f"port {launch.port} is listened on by a process that is not of the server we launched (pid {child.pid})"

    def _explain(
        self, child: children.Child, *, under_load: bool = False, hung: bool = False, closed: bool = False
    ) -> Failure:
        gone = closed or not children.alive(child)
        code = children.exit_code(child, within=ENDING if gone else 0.0)
        failure = failures.explain(code, _tail(self.log), "", under_load=under_load, hung=hung)
        if code is None and gone and failure.kind is FailureKind.UNKNOWN:
            # Only the agent that launched it could have learned how it ended.
            cause = f"it ended by itself or by a signal, while its log names no error: {failure.cause}"
        elif code == 0 and failure.cause.startswith("ended with exit code 0"):
            cause = "it ended in good order, as vLLM does when it is asked to by a signal"
        else:
            return failure
        advice = "Did somebody end it, or was the machine or the agent's service restarted? It is tried again."
        return failure.model_copy(update={"kind": FailureKind.KILLED, "cause": cause, "advice": advice})

    # --- ending ---

    def _end(self, launch: Launch, child: children.Child | None, stopping: Since) -> ServerStatus:
        members = children.group_members(child) if child is not None else []
        if child is not None and members:
            detail = f"waiting for processes {members} to end"
            if self._elapsed("stopping", stopping.at) > STOP_GRACE:
                detail = f"processes {members} were killed and are not gone: do they hang in the GPU's driver?"
                children.kill_group(child)
            else:
                self._terminate()
            return ServerStatus(ServerPhase.STOPPING, detail=detail, url=_url(launch))
        if child is not None:
            children.end(child, grace=0.0)  # reaps it
        if sockets.listening_sockets(launch.port):
            detail = f"its processes are gone, but something still listens on port {launch.port}: end it"
            return ServerStatus(ServerPhase.STOPPING, detail=detail, url=_url(launch))
        self._clear()
        return ServerStatus(ServerPhase.ABSENT)

    def _terminate(self) -> None:
        """SIGTERM once: vLLM takes a second one for impatience."""
        child = children.load(self._record)
        if child is not None and not self._signalled:
            children.terminate_group(child)
            self._signalled = True

    def _end_remains(self, child: children.Child) -> None:
        """After a failure: vLLM leaves its engine behind, and a hung server holds its GPU."""
        if children.group_members(child):
            self._terminate()
            if self._elapsed("failed", self._clock.now()) > STOP_GRACE:
                children.kill_group(child)

    def _clear(self) -> None:
        """Forget the run; its log stays. The launch goes last: while it is there, the rest may be."""
        for name in ("ready.json", "failure.json", "child.json", "stopping.json", "retire.json", "launch.json"):
            (self.folder / name).unlink(missing_ok=True)
        self._begun.clear()
        self._signalled, self._silent_since = False, None

    # --- small things ---

    @property
    def _record(self) -> Path:
        return self.folder / "child.json"

    def _elapsed(self, what: str, at: float) -> float:
        """Seconds since `at`; the wall clock counts only for the time before this process looked, as it may jump."""
        now = self._clock.monotonic()
        key = (what, at if what != "failed" else 0.0)
        begun = self._begun.setdefault(key, now - max(0.0, self._clock.now() - at))
        return now - begun

    def _bound_log(self) -> None:
        """A server in production logs every request, for months: keep the end, as the disk is not ours to fill."""
        try:
            if self.log.stat().st_size > _LOG_KEPT:
                self.log.with_name("server.previous.log").write_text(_tail(self.log))
                os.truncate(self.log, 0)  # it is written by appending, so it goes on from the start
        except OSError:
            return


def _url(launch: Launch) -> str:
    return f"http://{launch.host}:{launch.port}"


def _failed(failure: Failure) -> ServerStatus:
    return ServerStatus(ServerPhase.FAILED, detail=failure.cause, failure=failure)


def _is_ready(launch: Launch, ready: Ready, detail: str = "ready") -> ServerStatus:
    return ServerStatus(
        ServerPhase.READY,
        detail=detail,
        url=_url(launch),
        version=ready.version,
        start_seconds=ready.start_seconds,
        effective=ready.effective,
        surprises=ready.surprises,
        memory=ready.memory,
    )


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LOG_READ).decode(errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_READ))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
