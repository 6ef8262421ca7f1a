import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tunewright.platform.process import children
from tunewright.platform.process.children import Child
from tunewright.ports import PortError, Refused

SLEEP = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
# Leaves a process in its session and one in a session of its own, says so, and goes when told to.
LEAVES_TWO = f"""
import subprocess, sys
stay = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
leave = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(stay.pid, leave.pid, flush=True)
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s in vain"
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Child]]:
    started: list[Child] = []

    def run(code: str) -> Child:
        record = tmp_path / f"{len(started)}" / "child.json"
        out, err = tmp_path / "out", tmp_path / "err"
        child = children.spawn([sys.executable, "-c", code], dict(os.environ), tmp_path, out, err, record)
        started.append(child)
        return child

    yield run
    for child in started:
        children.end(child, grace=0.0)


def test_a_child_leads_its_own_session_and_is_recorded(start, tmp_path):
    child = start(SLEEP)
    assert os.getsid(child.pid) == child.pid
    assert children.load(tmp_path / "0" / "child.json") == child
    assert children.alive(child)
    assert children.exit_code(child) is None
    assert children.group_members(child) == [child.pid]


def test_an_exit_code_is_learnt_and_kept_without_a_zombie(start):
    child = start("raise SystemExit(7)")
    until(lambda: not children.alive(child))
    assert children.exit_code(child) == 7
    assert children.exit_code(child) == 7
    assert not Path(f"/proc/{child.pid}").exists()


def test_an_exit_code_is_waited_for_as_long_as_asked(start):
    child = start("import time; time.sleep(60)")
    assert children.exit_code(child, within=0.001) is None
    os.kill(child.pid, signal.SIGKILL)
    assert children.exit_code(child, within=60.0) == -signal.SIGKILL


def test_end_kills_what_ignores_sigterm_and_reaps_it(start, tmp_path):
    child = start(DEAF)
    until(lambda: "ready" in (tmp_path / "out").read_text())
    children.end(child, grace=0.1)
    assert not Path(f"/proc/{child.pid}").exists()
    assert children.exit_code(child) == -signal.SIGKILL


def test_end_lets_a_child_go_by_itself_within_the_grace(start, tmp_path):
    child = start(
        "import signal, sys, time; signal.signal(15, lambda *_: (print('bye', flush=True), sys.exit(3)));"
        "print('ready', flush=True); time.sleep(60)"
    )
    until(lambda: "ready" in (tmp_path / "out").read_text())
    children.end(child, grace=20.0)
    assert "bye" in (tmp_path / "out").read_text()


def test_survivors_of_a_dead_leader_are_found_and_ended(start, tmp_path):
    child = start(LEAVES_TWO)
    until(lambda: not children.alive(child))
    stay, leave = map(int, (tmp_path / "out").read_text().split())
    assert sorted(children.group_members(child)) == sorted([stay, leave])
    children.end(child, grace=0.0)
    assert children.group_members(child) == []


def test_a_recycled_pid_is_neither_the_child_nor_killed(start):
    child = start(SLEEP)
    former = replace(child, started=child.started - 1, record="/nowhere/child.json")
    assert not children.alive(former)
    assert children.group_members(former) == []
    children.end(former, grace=0.0)
    assert children.alive(child)


def test_a_record_of_an_earlier_boot_names_nothing(start):
    child = start(SLEEP)
    former = replace(child, boot="another")
    assert not children.alive(former)
    assert children.group_members(former) == []


def test_a_child_without_a_record_is_found_by_its_mark(start, tmp_path):
    child = start(SLEEP)
    record = tmp_path / "0" / "child.json"
    record.unlink()
    assert children.load(record) == child
    assert children.load(tmp_path / "1" / "child.json") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x"}'])
def test_an_unreadable_record_is_no_child(tmp_path, text):
    (tmp_path / "child.json").write_text(text)
    assert children.load(tmp_path / "child.json") is None


def test_marked_processes_are_found_by_folder_not_by_similar_name(start, tmp_path):
    child = start(SLEEP)
    assert children.find_marked(tmp_path) == [child.pid]
    assert children.find_marked(tmp_path / "0") == [child.pid]
    assert children.find_marked(str(tmp_path)[:-1]) == []


def test_a_restarted_agent_ends_a_child_that_it_did_not_start(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from tunewright.platform.process import children;"
        f"p = Path({str(tmp_path)!r});"
        f"children.spawn([sys.executable, '-c', {SLEEP!r}], dict(os.environ), p, p / 'o', p / 'e', p / 'child.json')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    child = children.load(tmp_path / "child.json")
    assert child is not None
    try:
        assert children.alive(child)
        assert children.exit_code(child) is None
    finally:
        children.end(child, grace=0.0)
    assert not children.alive(child)


def test_a_command_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(Refused, match="no-such-command"):
        children.spawn(["no-such-command"], {}, tmp_path, tmp_path / "o", tmp_path / "e", tmp_path / "child.json")
    assert not (tmp_path / "child.json").exists()


def test_a_child_whose_record_cannot_be_written_is_ended(tmp_path, monkeypatch):
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(children, "write_atomic", full)
    argv = [sys.executable, "-c", SLEEP]
    with pytest.raises(PortError, match="No space left"):
        children.spawn(argv, dict(os.environ), tmp_path, tmp_path / "o", tmp_path / "e", tmp_path / "child.json")
    assert children.find_marked(tmp_path) == []


def test_a_process_name_with_brackets_and_spaces_is_read(start, tmp_path):
    child = start(
        "open('/proc/self/comm', 'w').write('a) S (b 1'); print('ready', flush=True); import time; time.sleep(60)"
    )
    until(lambda: "ready" in (tmp_path / "out").read_text())
    assert children.alive(child)


def test_terminate_group_does_not_wait(start):
    child = start(SLEEP)
    assert children.terminate_group(child) == [child.pid]
    until(lambda: not children.alive(child))
    assert children.exit_code(child) == -signal.SIGTERM


def test_a_record_holds_what_a_child_is(start, tmp_path):
    child = start(SLEEP)
    stored = json.loads((tmp_path / "0" / "child.json").read_text())
    assert stored == {**asdict(child), "command": list(child.command)}
