"""The spares as processes on this machine: one server under test on each, and nothing left of the one before."""

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from tunewright.domain.candidate import Candidate
from tunewright.domain.model import Model
from tunewright.domain.tuning import Spare, Target
from tunewright.platform.process import children, environ, gpu, records
from tunewright.platform.process.command import Command
from tunewright.platform.process.server import Server
from tunewright.ports import Clock, PortError, Refused, ServerPhase, ServerStatus

GPU_SLACK = 512.0
"""MiB by which the memory in use may differ from what it was before the first trial."""

LOGS_KEPT = 200


class _GpuBefore(Model):
    """Memory in use before a spare's first trial, per GPU, in MiB: what is not ours to free."""

    used: dict[str, float] = Field(default_factory=dict)


class ProcessSpare:
    """Implements `ports.Spare`. `directory` is its own; each trial has a folder in it."""

    def __init__(self, directory: Path, target: Target, spare: Spare, clock: Clock) -> None:
        self._directory = directory.absolute()
        self._clock = clock
        self._first_port = target.first_port
        self._start_timeout = spare.start_timeout
        self._model = target.model
        self._first_replica, self._spares = target.replicas, spare.parallelism
        self._environment = {**target.environment, **spare.environment}
        self._command = Command(spare.command or target.command, self._environment, target.api_key_file)
        self._servers: dict[str, Server] = {}

    @property
    def command(self) -> Command:
        """The command under test."""
        return self._command

    def start(self, trial_id: str, candidate: Candidate, slot: int = 0) -> None:
        """Launch it on spare `slot`, unless it is launched already: its `{replica}` is the one past production's plus
        `slot`. Raises `PortError` while something of another trial is still on that spare, or for one we don't have.
        """
        if slot >= self._spares:
            raise PortError(f"there is no spare {slot}: spare.parallelism is {self._spares}")
        server = self._server(trial_id)
        if server.launch is None:
            self._refuse_while_others_are_there(trial_id, slot)
            self._prove_memory_free(slot)
            self._drop_old_logs()
        server.start(
            candidate,
            first_port=self._first_port,
            start_timeout=self._start_timeout,
            replica=self._first_replica + slot,
            slot=str(slot),
        )

    def poll(self, trial_id: str) -> ServerStatus:
        """How it is; notices a death within a second, also under load. `ABSENT` when nothing is left of it."""
        return self._server(trial_id).poll()

    def cancel(self, trial_id: str) -> None:
        """Begin to end it, whole; `poll` answers `ABSENT` once its processes are gone and its port is closed.

        That the GPU's memory is free is proven by the next `start`, which refuses until it is.
        """
        self._server(trial_id).stop()

    def log_tail(self, trial_id: str, lines: int = 50) -> str:
        """The last lines of its log, kept also after it ended; empty when there is none."""
        return self._server(trial_id).log_tail(lines)

    def sweep(self, keep: Sequence[str]) -> list[str]:
        """Begin to end whatever belongs to trials not in `keep`; the ids that were found, until nothing is left."""
        found = {trial_id for trial_id in self._present() if trial_id not in keep}
        for trial_id in found:
            self._server(trial_id).stop()
            self._server(trial_id).poll()
        for pid in self._strangers():
            # Its folder was removed under it: the mark in its environment still names it.
            mark = environ.variable(pid, children.MARK)
            if mark and Path(mark).parent.name not in keep:
                environ.kill(pid, children.MARK, mark)
                found.add(Path(mark).parent.name)
        return sorted(found)

    def occupied(self) -> str:
        """What is on the spare now, for people; empty when nothing is. Changes nothing."""
        trials = [f"trial {trial_id}" for trial_id in self._present()]
        return ", ".join([*trials, *(f"process {pid}" for pid in self._strangers())])

    # --- what is left of others ---

    def _refuse_while_others_are_there(self, trial_id: str, slot: int) -> None:
        for other in self._present():
            launch = self._server(other).launch
            if other == trial_id or (launch is not None and int(launch.slot or 0) != slot):
                continue
            status = self._server(other).poll()
            if status.phase is not ServerPhase.ABSENT:
                which = f"spare {slot}" if self._spares > 1 else "the spare"
                raise PortError(f"trial {other} is still on {which} ({status.phase}): {status.detail}")
        strangers = self._strangers()
        if strangers:
            raise PortError(f"processes {strangers} of an earlier trial are still there; sweep the spare")

    def _server(self, trial_id: str) -> Server:
        if not trial_id or "/" in trial_id or trial_id.startswith("."):
            raise Refused(f"{trial_id!r} can't name a trial")
        if trial_id not in self._servers:
            self._servers[trial_id] = Server(
                self._directory / trial_id, self._command, self._clock, self._model, strict=True
            )
        return self._servers[trial_id]

    def _present(self) -> list[str]:
        return sorted(path.parent.name for path in self._directory.glob("*/launch.json"))

    def _strangers(self) -> list[int]:
        """Processes started for this spare that no folder tells of."""
        found = children.find_marked(self._directory)
        known: set[int] = set()  # looked for afterwards: a server on another spare starts processes at any time
        for trial_id in self._present():
            child = children.load(self._directory / trial_id / "child.json")
            known.update(children.group_members(child) if child is not None else ())
        doubtful = set(found) - known
        return [pid for pid in children.find_marked(self._directory) if pid in doubtful] if doubtful else []

    def _prove_memory_free(self, slot: int) -> None:
        filled = self._command.filled(self._command.baseline, port=0, replica=self._first_replica + slot)[1]
        now = gpu.memory({**os.environ, **filled})
        if now is None:
            return
        path = self._directory / (f"gpu-{slot}.json" if slot else "gpu.json")
        before = records.read(path, _GpuBefore)
        if before is None:
            records.write(path, _GpuBefore(used={device.gpu: device.used for device in now}))
            return
        for device in now:
            allowed = before.used.get(device.gpu, 0.0) + GPU_SLACK
            if device.used > allowed:
                raise PortError(
                    f"GPU {device.gpu} has {device.used:.0f} of {device.total:.0f} MiB in use, and before the first "
                    f"trial it was {allowed - GPU_SLACK:.0f}: see `nvidia-smi` for who holds it, and end that"
                )

    def _drop_old_logs(self) -> None:
        folders = [path for path in self._directory.glob("*") if path.is_dir() and not (path / "launch.json").exists()]
        folders.sort(key=lambda path: path.stat().st_mtime)
        for folder in folders[:-LOGS_KEPT]:
            for file in folder.iterdir():
                file.unlink(missing_ok=True)
            folder.rmdir()
