"""The load test as a child process. Everything about one run is in one folder, so a new agent finds it again."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from pydantic import ValidationError

from tunewright.loadtest.files import write_atomic
from tunewright.loadtest.job import LoadJob, LoadResult, Progress
from tunewright.platform.process import children
from tunewright.ports import Clock, LoadPhase, LoadRequest, LoadStatus, PortError

_GRACE = 1.0  # seconds from SIGTERM to SIGKILL: a load test has nothing to tidy up
_TAIL = 2000


class ProcessLoadTest:
    """`ports.LoadTest` with one folder per run below `directory`.

    `command` is what takes `--request FILE --result FILE`; this very interpreter's `-m tunewright.loadtest` by default.
    """

    def __init__(self, directory: Path, clock: Clock, command: Sequence[str] | None = None) -> None:
        self._directory = directory
        self._clock = clock
        self._command = tuple(command) if command else (sys.executable, "-m", "tunewright.loadtest")

    def start(self, run_id: str, request: LoadRequest) -> None:
        """Start it unless it runs or has ended under this id. Raises `PortError` or `Refused`."""
        folder = _Folder(self._directory / _name(run_id))
        if folder.result.exists() or children.load(folder.record) is not None:
            return
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            job = LoadJob.of(request)
            # The monotonic clock is one for all processes of a boot, and no run outlives a boot.
            limits = {"started": self._clock.monotonic(), "limit": job.hard_limit}
            write_atomic(folder.limits, json.dumps(limits).encode())
            write_atomic(folder.request, job.model_dump_json().encode())
        except OSError as error:
            raise PortError(f"can't write {folder.path}: {error}; free space or correct its rights") from error
        argv = [*self._command, "--request", str(folder.request), "--result", str(folder.result)]
        children.spawn(argv, os.environ, folder.path, folder.stdout, folder.stderr, folder.record)

    def poll(self, run_id: str) -> LoadStatus:
        """How it is; also reaps it. Never raises for a run that went wrong: that is `FAILED`, with the reason."""
        folder = _Folder(self._directory / _name(run_id))
        child = children.load(folder.record)
        if child is None:
            # Nothing was started (or the agent died just before): `start` does it.
            return _ended(folder, None) if folder.result.exists() else LoadStatus(LoadPhase.ABSENT)
        if children.alive(child):
            over = self._over(folder)
            if over is None:
                return _running(folder)
            children.end(child, _GRACE)
            if not folder.result.exists():
                _fail(folder, over)
            return _ended(folder, None)
        if left := children.group_members(child):
            children.end(child, _GRACE)
            return LoadStatus(LoadPhase.RUNNING, f"ending processes {left} that the load test left")
        return _ended(folder, children.exit_code(child))

    def cancel(self, run_id: str) -> None:
        """End its whole process group and remove its folder; nothing is left when this returns."""
        folder = _Folder(self._directory / _name(run_id))
        child = children.load(folder.record)
        if child is not None:
            children.end(child, _GRACE)
        try:
            shutil.rmtree(folder.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise PortError(f"can't remove {folder.path}: {error}; correct its rights") from error

    def cancel_all(self) -> None:
        """`cancel` for every run that is left."""
        for folder in sorted(self._directory.glob("*/")):
            self.cancel(unquote(folder.name))

    def _over(self, folder: "_Folder") -> str | None:
        """Why the run is ended from outside; None while it may go on."""
        try:
            limits = json.loads(folder.limits.read_bytes())
            ran, limit = self._clock.monotonic() - float(limits["started"]), float(limits["limit"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            return f"ended: {folder.limits} can't be read ({error}), so its deadline is not known"
        return f"ended after {ran:.0f} s: it should have taken at most {limit:.0f} s" if ran > limit else None


class _Folder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.request = self.path / "request.json"
        self.result = self.path / "result.json"
        self.progress = self.path / "result.json.progress"
        self.limits = self.path / "limits.json"
        self.record = self.path / "child.json"
        self.stdout = self.path / "stdout"
        self.stderr = self.path / "stderr"


def _name(run_id: str) -> str:
    """A folder's name for any id, the same each time and never one that leads elsewhere."""
    return quote(run_id, safe="").replace(".", "%2E")


def _running(folder: _Folder) -> LoadStatus:
    try:
        news = Progress.model_validate_json(folder.progress.read_bytes())
    except (OSError, ValidationError):  # not written yet
        return LoadStatus(LoadPhase.RUNNING, "starting")
    return LoadStatus(LoadPhase.RUNNING, news.detail, progress=news.share, interim=news.interim)


def _ended(folder: _Folder, code: int | None) -> LoadStatus:
    try:
        raw = folder.result.read_bytes()
    except FileNotFoundError:
        how = "" if code is None else f" with status {code}"
        return LoadStatus(LoadPhase.FAILED, f"the load test ended{how} without a result: {_tail(folder.stderr)}")
    except OSError as error:
        raise PortError(f"can't read {folder.result}: {error}") from error
    try:
        result = LoadResult.model_validate_json(raw)
    except ValidationError:
        text = raw[:_TAIL].decode(errors="replace")
        return LoadStatus(
            LoadPhase.FAILED, f"the load test's result can't be read: {text!r}; it wrote: {_tail(folder.stderr)}"
        )
    if result.measurement is None:
        return LoadStatus(LoadPhase.FAILED, result.failure or "", progress=1.0)
    return LoadStatus(
        LoadPhase.DONE,
        "; ".join(result.notes),
        progress=1.0,
        measurement=result.measurement,
        answers=result.answers,
    )


def _fail(folder: _Folder, reason: str) -> None:
    result = LoadResult(failure=f"{reason}; it wrote: {_tail(folder.stderr)}", content_seed=0)
    try:
        write_atomic(folder.result, result.model_dump_json().encode())
    except OSError as error:
        raise PortError(f"can't write {folder.result}: {error}; free space") from error


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError:
        return "(nothing)"
