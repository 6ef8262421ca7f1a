"""What `ports.LoadTest` promises, kept by the adapter that runs a child process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loadtest_server import stream_server

from tunewright.domain.tuning import Slo
from tunewright.domain.workload import Lengths, Workload
from tunewright.platform.process import children
from tunewright.platform.process.loadtest import ProcessLoadTest
from tunewright.ports import LoadPhase, LoadRequest, LoadStatus, LoadTest

WORKLOAD = Workload(concurrency=2, prompt_tokens=Lengths(fixed=16), output_tokens=Lengths(fixed=4))
HEAD = "import os, sys, time, pathlib; result = pathlib.Path(sys.argv[sys.argv.index('--result') + 1]);"
SLEEPS = HEAD + "print(os.getpid(), flush=True); time.sleep(100)"


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def request(url: str = "http://127.0.0.1:9", **more) -> LoadRequest:
    given = {"duration": 0.5, "max_warmup": 0.3, "seed": 1, "slo": Slo(), "model": None, **more}
    return LoadRequest(url=url, workload=WORKLOAD, **given)


def until(tests: LoadTest, run_id: str, wanted: Callable[[LoadStatus], bool]) -> LoadStatus:
    deadline = time.monotonic() + 60
    while not wanted(status := tests.poll(run_id)):
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


def ended(status: LoadStatus) -> bool:
    return status.phase in (LoadPhase.DONE, LoadPhase.FAILED)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ProcessLoadTest]]:
    clock = FakeClock()

    def build(code: str | None = None) -> ProcessLoadTest:
        command = [sys.executable, "-c", code] if code else None
        tests = ProcessLoadTest(tmp_path / "runs", clock, command)
        tests.clock = clock  # type: ignore[attr-defined]
        return tests

    yield build
    tests = build()
    for folder in (tmp_path / "runs").glob("*"):
        tests.cancel(folder.name)
    assert children.find_marked(tmp_path) == []


def test_a_run_is_absent_then_running_then_done_then_forgotten(make):
    tests = make()
    assert tests.poll("t-1").phase is LoadPhase.ABSENT
    with stream_server() as server:
        tests.start("t-1", request(server.url, quality_prompts=1, quality_max_tokens=2))
        assert tests.poll("t-1").phase is LoadPhase.RUNNING
        status = until(tests, "t-1", ended)
    assert status.phase is LoadPhase.DONE, status.detail
    assert status.measurement is not None
    assert status.measurement.completed > 0
    assert [answer.tokens for answer in status.answers] == [(" one", " two")]
    assert status.progress == 1.0
    tests.start("t-1", request("http://127.0.0.1:9"))  # it has ended under this id: nothing starts again
    assert tests.poll("t-1") == status
    tests.cancel("t-1")
    assert tests.poll("t-1").phase is LoadPhase.ABSENT


def test_a_server_that_is_not_there_fails_with_the_reason(make):
    tests = make()
    tests.start("t-1", request())
    status = until(tests, "t-1", ended)
    assert status.phase is LoadPhase.FAILED
    assert "can't be read" in status.detail
    assert status.measurement is None


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("sys.exit('no luck')", "ended with status 1 without a result: no luck"),
        ("os.kill(os.getpid(), 9)", "ended with status -9 without a result"),
        ("result.write_text('')", "can't be read: ''"),
        (
            "result.write_text('{\"measurement\": 7}'); print('why', file=sys.stderr)",
            "'{\"measurement\": 7}'; it wrote: why",
        ),
        ("result.write_text('{}')", "can't be read: '{}'"),
        ("result.write_bytes(bytes([255]))", "can't be read"),
    ],
)
def test_a_result_that_is_missing_or_unreadable_is_failed_with_the_raw_text(make, code, detail):
    tests = make(HEAD + code)
    tests.start("t-1", request())
    status = until(tests, "t-1", ended)
    assert status.phase is LoadPhase.FAILED
    assert detail in status.detail
    assert status.measurement is None


def test_starting_twice_runs_once(make, tmp_path):
    tests = make(SLEEPS)
    tests.start("t-1", request())
    tests.start("t-1", request())
    tests.start("t-2", request())
    assert len(children.find_marked(tmp_path)) == 2


def test_cancel_ends_the_whole_group_and_is_idempotent(make, tmp_path):
    code = HEAD + "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); "
    tests = make(code + "time.sleep(100)")
    tests.start("t-1", request())
    deadline = time.monotonic() + 30
    while len(children.find_marked(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tests.cancel("t-1")
    assert children.find_marked(tmp_path) == []
    assert list((tmp_path / "runs").iterdir()) == []
    tests.cancel("t-1")
    tests.cancel("never-started")


def test_a_new_agent_finds_a_run_that_goes_on_and_its_result(make, tmp_path):
    # Another process starts it and dies: the child is nobody's that we could wait for.
    with stream_server() as server:
        script = (
            "import sys; sys.path.insert(0, sys.argv[1]); from test_loadtest_port import *;"
            "ProcessLoadTest(Path(sys.argv[2]), FakeClock()).start('t-1', request(sys.argv[3]))"
        )
        paths = os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "runs"), server.url],
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": paths},
        )
        tests = make()
        tests.start("t-1", request(server.url))
        assert len(children.find_marked(tmp_path)) <= 1
        status = until(tests, "t-1", ended)
    assert status.phase is LoadPhase.DONE, status.detail


def test_a_run_past_its_deadline_is_ended_and_failed_for_good(make, tmp_path):
    tests = make(SLEEPS)
    tests.start("t-1", request(duration=10.0, max_warmup=30.0))
    tests.clock.time += 180.0
    assert tests.poll("t-1").phase is LoadPhase.RUNNING
    tests.clock.time += 1.0
    status = tests.poll("t-1")
    assert status.phase is LoadPhase.FAILED
    assert "ended after 181 s: it should have taken at most 180 s" in status.detail
    assert children.find_marked(tmp_path) == []
    assert tests.poll("t-1") == status


def test_progress_is_told(make):
    code = HEAD + 'result.with_name(result.name + \'.progress\').write_text(\'{"share": 0.5, "detail": "half"}\');'
    tests = make(code + "time.sleep(100)")
    tests.start("t-1", request())
    status = until(tests, "t-1", lambda status: status.progress > 0)
    assert (status.phase, status.progress, status.detail) == (LoadPhase.RUNNING, 0.5, "half")


def test_a_recycled_pid_is_not_taken_for_the_run(make, tmp_path):
    tests = make(HEAD + "sys.exit(3)")
    tests.start("t-1", request())
    until(tests, "t-1", ended)
    record = tmp_path / "runs" / "t-1" / "child.json"
    stored = json.loads(record.read_text())
    record.write_text(json.dumps({**stored, "pid": os.getppid()}))
    assert tests.poll("t-1").phase is LoadPhase.FAILED
    tests.cancel("t-1")
    os.kill(os.getppid(), 0)


@pytest.mark.parametrize("run_id", ["../../etc", "..", "a/b", "a b", "é", "x" * 60])
def test_any_id_stays_inside_the_folder(make, tmp_path, run_id):
    tests = make(SLEEPS)
    tests.start(run_id, request())
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert tests.poll(run_id).phase is LoadPhase.RUNNING
    tests.cancel(run_id)
    assert list((tmp_path / "runs").iterdir()) == []


def test_no_zombie_is_left(make, tmp_path):
    tests = make(HEAD + "sys.exit(3)")
    tests.start("t-1", request())
    until(tests, "t-1", ended)
    stored = json.loads((tmp_path / "runs" / "t-1" / "child.json").read_text())
    assert not Path(f"/proc/{stored['pid']}").exists()
