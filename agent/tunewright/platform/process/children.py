"""Child processes that outlive the agent: started in a session of their own, found again, and ended whole.

A child is known by its pid *and* its start time (and the boot it belongs to), so a recycled pid is never taken for it
nor killed. Its environment carries the path of its record, so that one whose record was never written, because the
agent died in between, is found as well.
"""

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tunewright.loadtest.files import write_atomic
from tunewright.ports import PortError, Refused

MARK = "TUNEWRIGHT_CHILD"
_KILL_TIMEOUT = 10.0  # seconds within which SIGKILL must have worked
_POLL = 0.02

# The children of this very process: only their parent can reap them and learn how they ended.
_ours: dict[tuple[int, int], subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class Child:
    """A process that leads its own session. `started` is in clock ticks since the boot `boot`, as in /proc/PID/stat."""

    pid: int
    started: int
    command: tuple[str, ...]
    boot: str
    record: str


class _Stat(NamedTuple):
    pid: int
    state: str
    group: int
    session: int
    started: int


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    stdout_path: Path,
    stderr_path: Path,
    record: Path,
) -> Child:
    """Start `argv` with exactly `env` (and our mark), appending its output to the files, and write `record`.

    Raises `Refused` when the command can't be run at all, `PortError` when the machine can't start it now.
    """
    record = record.absolute()
    for path in (stdout_path, stderr_path, record):
        path.parent.mkdir(parents=True, exist_ok=True)
    with stdout_path.open("ab") as out, stderr_path.open("ab") as err:
        try:
            process = subprocess.Popen(
                list(argv),
                env={**env, MARK: str(record)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                raise PortError(f"can't start {argv[0]} now: {error}; free memory or processes") from error
            raise Refused(f"can't start {argv[0]} in {cwd}: {error}; correct the command") from error
    stat = _read_stat(process.pid)  # there also when it has ended already: nobody but us can reap it
    child = Child(process.pid, stat.started if stat else 0, tuple(argv), _boot(), str(record))
    _ours[child.pid, child.started] = process
    try:
        write_atomic(record, json.dumps(asdict(child)).encode())
    except OSError as error:
        end(child, grace=0.0)
        raise PortError(f"can't write {record}: {error}; the process was ended again") from error
    return child


def load(record: Path) -> Child | None:
    """The child that `record` names, or else the one that was started for it before the record was written."""
    record = record.absolute()
    try:
        stored = json.loads(record.read_bytes())
        return Child(
            pid=int(stored["pid"]),
            started=int(stored["started"]),
            command=tuple(stored["command"]),
            boot=str(stored["boot"]),
            record=str(record),
        )
    except (OSError, ValueError, KeyError, TypeError):
        pass
    for stat in _processes():
        if stat.session == stat.pid and _mark(stat.pid) == str(record):
            return Child(stat.pid, stat.started, _command(stat.pid), _boot(), str(record))
    return None


def alive(child: Child) -> bool:
    """Whether the child itself runs; a zombie does not (and is reaped if it is ours)."""
    exit_code(child)
    stat = _read_stat(child.pid)
    return _is(child, stat) and stat is not None and stat.state not in "ZX"


def exit_code(child: Child, within: float = 0.0) -> int | None:
    """How it ended (minus the signal that killed it), waiting up to `within` seconds for that.

    None while it runs, or if another process was its parent.
    """
    process = _ours.get((child.pid, child.started))
    if process is not None and within > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=within)
    return process.poll() if process is not None else None


def group_members(child: Child) -> list[int]:
    """Pids of every living process of the child's session, or that carries its mark; the child included.

    A server's engine processes stay in its session when the server dies. One that opened a session of its own is
    known by its mark, one that wrote over its environment (to set its title) by its session.
    """
    return [stat.pid for stat in _members(child)]


def terminate_group(child: Child) -> list[int]:
    """Send SIGTERM to every member, without waiting; the pids that got it."""
    return _signal_group(child, signal.SIGTERM)


def kill_group(child: Child) -> list[int]:
    """Send SIGKILL to every member, without waiting; the pids that got it. Call it until none is left."""
    return _signal_group(child, signal.SIGKILL)


def end(child: Child, grace: float) -> None:
    """End every member: SIGTERM, up to `grace` seconds, then SIGKILL. Returns once all are gone and reaped.

    Raises `PortError` if one survives SIGKILL, as a process does that hangs in a driver.
    """
    if grace > 0 and terminate_group(child):
        _wait_gone(child, grace)
    deadline = time.monotonic() + _KILL_TIMEOUT
    while left := kill_group(child):
        if time.monotonic() > deadline:
            raise PortError(f"processes {left} survive SIGKILL: they hang in the kernel, as in a driver; look at dmesg")
        time.sleep(_POLL)
    process = _ours.get((child.pid, child.started))
    if process is not None:
        process.wait(timeout=_KILL_TIMEOUT)


def find_marked(prefix: Path | str) -> list[int]:
    """Pids of the living processes whose record is `prefix` or lies under it: what a crash may have left."""
    path = str(Path(prefix).absolute())
    found = []
    for stat in _processes():
        mark = _mark(stat.pid)
        if mark is not None and (mark == path or mark.startswith(path.rstrip("/") + "/")):
            found.append(stat.pid)
    return found


def _wait_gone(child: Child, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _members(child) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _members(child: Child) -> list[_Stat]:
    exit_code(child)  # reap it, if it is ours
    if child.boot != _boot():
        return []
    leader = _read_stat(child.pid)
    # The kernel does not give a pid out again while it names a session: if another process has it now, ours is empty.
    recycled = leader is not None and not _is(child, leader)
    found = []
    for stat in _processes():
        inside = not recycled and child.pid in (stat.session, stat.group) and stat.started >= child.started
        if inside or _mark(stat.pid) == child.record:
            found.append(stat)
    return found


def _signal_group(child: Child, number: signal.Signals) -> list[int]:
    return [stat.pid for stat in _members(child) if _send(stat, number)]


def _send(stat: _Stat, number: signal.Signals) -> bool:
    """Signal exactly this process: the descriptor pins it while its start time is compared again."""
    try:
        descriptor = os.pidfd_open(stat.pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise PortError(f"can't open process {stat.pid} to end it: {error}") from error
    try:
        now = _read_stat(stat.pid)
        if now is None or now.started != stat.started:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise PortError(f"not allowed to end process {stat.pid}: it changed its user; end it by hand") from error
    finally:
        os.close(descriptor)


def _is(child: Child, stat: _Stat | None) -> bool:
    return stat is not None and stat.started == child.started and child.boot == _boot()


def _processes() -> list[_Stat]:
    """Every living process but ourselves; zombies hold nothing any more."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - called often
    stats = (_read_stat(pid) for pid in pids if pid != os.getpid())
    return [stat for stat in stats if stat is not None and stat.state not in "ZX"]


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets itself
    return _Stat(pid, fields[0], int(fields[2]), int(fields[3]), int(fields[19])) if len(fields) > 19 else None


def _mark(pid: int) -> str | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return None
    for entry in environment.split(b"\0"):
        if entry.startswith(MARK.encode() + b"="):
            return os.fsdecode(entry[len(MARK) + 1 :])
    return None


def _command(pid: int) -> tuple[str, ...]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ()
    return tuple(os.fsdecode(word) for word in words)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not shown in some containers: pid and start time alone must do
        return ""
