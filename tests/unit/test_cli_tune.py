"""`tune`, `check` and `stop` where something is wrong: refused with what to do, and nothing is touched."""

import json
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulate_process import free_port
from typer.testing import CliRunner

from tunewright.cli.app import app
from tunewright.cli.tune import _left, read_file
from tunewright.clock import SystemClock
from tunewright.domain.phases import Phase
from tunewright.domain.state import TuningRecord
from tunewright.exits import Exit
from tunewright.platform.process.sockets import is_here
from tunewright.ports import PortError, Replica, TargetStatus
from tunewright.store.lock import agent_lock
from tunewright.store.sqlite import SqliteStore

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _signals_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def write(folder: Path, target: dict[str, Any] | None = None, **blocks: Any) -> Path:
    command = [sys.executable, "-m", "tunewright.simulate", "serve", "m", "--max-num-seqs", "4", "--port", "{port}"]
    spec: dict[str, Any] = {
        "target": {"command": command, "listen": f"127.0.0.1:{free_port()}", **(target or {})},
        "objective": {"maximize": "outputTokensPerSecond"},
        **blocks,
    }
    file = folder / "mine.yaml"
    text = {"apiVersion": "tunewright.dev/v1alpha1", "kind": "Tuning", "metadata": {"name": "mine"}, "spec": spec}
    file.write_text(yaml.safe_dump(text))
    return file


def run(command: str, file: Path, state: Path, *more: str, code: Exit) -> str:
    result = RUNNER.invoke(app, [command, str(file), "--state", str(state), *more])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout + result.stderr


@pytest.mark.parametrize("command", ["tune", "check", "stop"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("", "is empty"),
        ("spec: [", "line 1"),
        ("a" * 300_000, "larger than 256 KiB"),
        ("apiVersion: tunewright.dev/v1alpha1\nkind: Tuning\nmetadata: {name: a}\nspec: {targett: {}}\n", "target"),
    ],
    ids=["missing", "empty", "no YAML", "too large", "misspelt"],
)
def test_a_file_with_anything_wrong_is_refused_and_nothing_is_made(
    tmp_path: Path, command: str, text: str | None, told: str
) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    out = run(command, file, tmp_path / "state", code=Exit.USAGE)
    assert str(file) in out
    assert told in out
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("command", ["tune", "check", "stop"])
def test_a_deployment_is_for_the_controller_in_a_cluster(tmp_path: Path, command: str) -> None:
    file = write(tmp_path)
    text = yaml.safe_load(file.read_text())
    text["spec"]["target"] = {"deployment": "llm"}
    file.write_text(yaml.safe_dump(text))
    assert "controller in a cluster" in run(command, file, tmp_path / "state", code=Exit.USAGE)


@pytest.mark.parametrize("command", ["tune", "stop"])
def test_two_agents_on_one_store_the_second_is_refused(tmp_path: Path, command: str) -> None:
    state, file = tmp_path / "state", write(tmp_path)
    (state / "mine").mkdir(parents=True)
    with agent_lock(state / "store.sqlite"):
        assert "is held by process" in run(command, file, state, code=Exit.USAGE)


def test_a_state_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    state, file = tmp_path / "state", write(tmp_path)
    state.write_text("a file")
    assert "use another --state" in run("tune", file, state, code=Exit.USAGE)
    assert state.read_text() == "a file"


@pytest.mark.parametrize("listen", ["0.0.0.0:8765", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:²", "example.org:80"])
def test_the_api_is_served_on_this_machine_alone(tmp_path: Path, listen: str) -> None:
    out = run("tune", write(tmp_path), tmp_path / "state", "--listen", listen, code=Exit.USAGE)
    assert "loopback address with a port" in out


def test_an_address_of_the_api_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        out = run("tune", write(tmp_path), tmp_path / "state", "--listen", listen, code=Exit.USAGE)
    assert f"--listen {listen}" in out
    assert "choose another port" in out


def test_stop_of_what_was_never_started_says_so_and_makes_nothing(tmp_path: Path) -> None:
    assert "nothing of it was ever started" in run("stop", write(tmp_path), tmp_path / "state", code=Exit.DONE)
    assert not (tmp_path / "state").exists()


def test_servers_of_somebody_else_are_not_stopped(tmp_path: Path) -> None:
    file = write(tmp_path)
    text = yaml.safe_load(file.read_text())
    text["spec"]["spare"] = {"command": text["spec"]["target"]["command"]}
    text["spec"]["target"] = {"urls": ["http://127.0.0.1:9"]}
    text["spec"]["promotion"] = {"mode": "recommend"}
    file.write_text(yaml.safe_dump(text))
    assert "somebody else runs" in run("stop", file, tmp_path / "state", code=Exit.USAGE)
    out = run("check", file, tmp_path / "state", code=Exit.USAGE)
    assert "FAIL production: not healthy: http://127.0.0.1:9" in out


# --- check ---


def findings(file: Path, state: Path, code: Exit) -> dict[str, tuple[bool, str]]:
    rows = json.loads(run("check", file, state, "--json", code=code))
    return {row["what"]: (row["good"], row["detail"]) for row in rows}


def test_check_of_a_good_file(tmp_path: Path) -> None:
    file = write(tmp_path)
    found = findings(file, tmp_path / "state", Exit.DONE)
    commands = ["target command", "target binary", "target flags"]
    assert list(found) == ["state", "search", *commands, "production", "spare", "GPUs", "metrics"]
    assert "max_num_seqs=4" in found["target command"][1]
    assert "simulated" in found["target binary"][1]
    assert not (tmp_path / "state").exists(), "check touches nothing"
    assert "ok   target binary" in run("check", file, tmp_path / "state", code=Exit.DONE)


@pytest.mark.parametrize(
    ("change", "what", "told"),
    [
        ({"target": {"command": ["no-such-vllm", "serve", "m", "--port", "{port}"]}}, "target binary", "no-such-vllm"),
        ({"target": {"command": ["false", "serve", "m", "--port", "{port}"]}}, "target binary", "ended with 1"),
        ({"target": {"command": ["env", "no-such", "serve", "m", "--port", "{port}"]}}, "target binary", "full path"),
        ({"target": {"command": ["true", "serve", "/no/such", "--port", "{port}"]}}, "target command", "at /no/such"),
        ({"target": {"command": ["true", "--model", "./no", "--port", "{port}"]}}, "target command", "model at ./no"),
        ({"target": {"listen": "192.0.2.1:8000"}}, "production", "no address of this machine"),
        ({"search": {"include": ["max_num_sequences"]}}, "search", "max_num_sequences"),
        ({"metrics": {"prometheus": "http://127.0.0.1:9"}}, "metrics", "127.0.0.1:9"),
    ],
)
def test_check_names_what_is_wrong(tmp_path: Path, change: dict[str, Any], what: str, told: str) -> None:
    found = findings(write(tmp_path, **change), tmp_path / "state", Exit.USAGE)
    assert not found[what][0]
    assert told in found[what][1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_addresses_of_this_machine_are_known(host: str) -> None:
    assert is_here(host)


def test_check_finds_a_state_folder_that_can_not_be_made(tmp_path: Path) -> None:
    """It said that all is well, and `tune` was refused."""
    file = write(tmp_path)
    good, detail = findings(file, file / "state", Exit.USAGE)["state"]
    assert not good
    assert detail == f"{file} is no folder that you may write to; use another --state"


def test_check_reads_the_prompts_of_the_quality_gate(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    file = write(tmp_path, quality={"promptsFile": str(prompts)})
    assert "can't be read" in findings(file, tmp_path / "state", Exit.USAGE)["quality prompts"][1]
    prompts.write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "hello"}\n')
    detail = findings(file, tmp_path / "state", Exit.DONE)["quality prompts"][1]
    assert detail == "2 prompts, 1 of them with the right answer"


def test_a_tuning_with_bad_prompts_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": 1}\n')
    file = write(tmp_path, quality={"promptsFile": str(prompts)})
    out = run("tune", file, tmp_path / "state", code=Exit.USAGE)
    assert "line 1: prompt must be a text" in out
    assert not (tmp_path / "state" / "demo").exists()


def test_check_finds_the_clients_address_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = write(tmp_path, target={"listen": f"127.0.0.1:{taken.getsockname()[1]}"})
        good, detail = findings(file, tmp_path / "state", Exit.USAGE)["production"]
    assert not good
    assert "taken by another program" in detail


def gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, used: int, answer: str = "") -> None:
    """A machine on which `nvidia-smi` tells of GPUs with so many MiB in use; `answer` is shell that tells it."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{answer or f'echo 1, {used}, 80000'}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def vllm(folder: Path) -> list[str]:
    """A program that answers `--version`, and is no simulator."""
    tool = folder / "bin" / "vllm"
    tool.write_text("#!/bin/sh\necho 0.32.0\n")
    tool.chmod(0o755)
    return ["vllm", "serve", "m", "--port", "{port}"]


@pytest.mark.parametrize(
    ("own", "spare", "told"),
    [
        ({}, {}, "the spare has no CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {}, "replica 0 and the spare are both on GPU 0"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "1"}, "both on GPU 1"),
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, "production has no CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "{replica}"}, {}, None),
    ],
)
def test_production_and_spare_never_share_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str], spare: dict[str, str], told: str | None
) -> None:
    gpus(tmp_path, monkeypatch, used=4)
    target = {"command": vllm(tmp_path), "environment": own}
    file = write(tmp_path, target=target, spare={"environment": spare})
    if told is None:
        assert findings(file, tmp_path / "state", Exit.DONE)["GPUs"] == (
            True,
            "the spare's: GPU 1 has 4 of 80000 MiB in use",
        )
        return
    good, detail = findings(file, tmp_path / "state", Exit.USAGE)["GPUs"]
    assert not good
    assert told in detail
    assert told in run("tune", file, tmp_path / "state", code=Exit.USAGE), "tune must refuse it as well"


VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("own", "spare", "told"),
    [
        ("{replica}", {}, None),
        ("0", {VISIBLE: "{replica}"}, None),
        ("0", {VISIBLE: "1"}, "spares 0 and 1 are both on GPU 1: with spec.spare.parallelism above 1, set"),
        ("0,3", {VISIBLE: "{replica}"}, "replica 0 and spare 2 are both on GPU 3"),
        ("4", {VISIBLE: "{replica},1{replica}"}, None),
        ("4", {VISIBLE: "0,{replica}"}, "spares 0 and 1 are both on GPU 0"),
    ],
)
def test_several_spares_share_a_gpu_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, spare: dict[str, str], told: str | None
) -> None:
    each = 'for gpu in $(echo ${asked#--id=} | tr , " "); do echo "$gpu, 4, 80000"; done'
    gpus(tmp_path, monkeypatch, 4, f"for asked; do case $asked in --id=*) {each};; esac; done")
    target = {"command": vllm(tmp_path), "environment": {VISIBLE: own}}
    file = write(tmp_path, target=target, spare={"environment": spare, "parallelism": 3})
    if told is None:
        detail = findings(file, tmp_path / "state", Exit.DONE)["GPUs"][1]
        assert detail.startswith("the spares': GPU 1 has 4 of 80000 MiB in use, ")
        assert "GPU 2 has 4 of" in detail
        assert "GPU 3 has 4 of" in detail
        return
    good, detail = findings(file, tmp_path / "state", Exit.USAGE)["GPUs"]
    assert not good
    assert told in detail
    assert told in run("tune", file, tmp_path / "state", code=Exit.USAGE), "tune must refuse it as well"


def test_spares_beside_servers_of_somebody_else_differ_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(tmp_path, monkeypatch, used=4)
    command = vllm(tmp_path)
    for spare, told in (
        ({"command": command}, f"the spares have no {VISIBLE}, so that all would run on the same GPU"),
        ({"command": command, "environment": {VISIBLE: "1"}}, "spares 0 and 1 are both on GPU 1"),
    ):
        file = write(tmp_path, spare={**spare, "parallelism": 2}, promotion={"mode": "recommend"})
        text = yaml.safe_load(file.read_text())
        text["spec"]["target"] = {"urls": ["http://127.0.0.1:9"]}
        file.write_text(yaml.safe_dump(text))
        good, detail = findings(file, tmp_path / "state", Exit.USAGE)["GPUs"]
        assert not good
        assert told in detail


def test_a_spare_gpu_of_several_that_somebody_uses_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = 'case "$*" in *--id=2) echo 2, 60000, 80000 ;; *) echo 1, 4, 80000 ;; esac'
    gpus(tmp_path, monkeypatch, 4, answer)
    target = {"command": vllm(tmp_path), "environment": {VISIBLE: "{replica}"}}
    file = write(tmp_path, target=target, spare={"parallelism": 2})
    good, detail = findings(file, tmp_path / "state", Exit.USAGE)["GPUs"]
    assert not good
    assert "the spares are not free: GPU 1 has 4 of 80000 MiB in use, GPU 2 has 60000" in detail


@pytest.mark.parametrize("parallelism", [0, 17])
def test_no_spares_or_too_many_are_refused(tmp_path: Path, parallelism: int) -> None:
    file = write(tmp_path, spare={"parallelism": parallelism})
    assert "spec.spare.parallelism" in run("check", file, tmp_path / "state", code=Exit.USAGE)


def test_a_spare_gpu_that_somebody_uses_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(tmp_path, monkeypatch, used=60_000)
    target = {"command": vllm(tmp_path), "environment": {"CUDA_VISIBLE_DEVICES": "0"}}
    file = write(tmp_path, target=target, spare={"environment": {"CUDA_VISIBLE_DEVICES": "1"}})
    good, detail = findings(file, tmp_path / "state", Exit.USAGE)["GPUs"]
    assert not good
    assert "60000 of 80000 MiB" in detail


# --- Ctrl-C ---


class Fleet:
    """Production as a test wants it."""

    def __init__(self, *servers: tuple[bool, bool], trouble: str = "") -> None:
        self.servers, self.trouble = servers, trouble

    def observe(self) -> TargetStatus:
        if self.trouble:
            raise PortError(self.trouble)
        found = [Replica(f"s{i}", "c", ready, canary, {}, 0.0) for i, (ready, canary) in enumerate(self.servers)]
        return TargetStatus(replicas=found, desired=1, settled=True, detail="")


@pytest.mark.parametrize(
    ("fleet", "told"),
    [
        (Fleet((False, False)), "no server of production is ready yet"),  # it said that production keeps serving
        (Fleet((False, False), (True, False)), "production keeps serving, unsupervised"),
        (Fleet((True, False), (True, True)), "production keeps serving, unsupervised, the canary as well"),
        (Fleet((True, False), (False, True)), "production keeps serving, unsupervised"),
        (Fleet(trouble="no /proc"), "what serves is not known: no /proc"),
    ],
)
def test_whoever_stops_it_is_told_what_clients_meet_meanwhile(fleet: Any, told: str) -> None:
    assert _left(fleet) == told


# --- what has ended ---


def test_whoever_tunes_what_has_ended_is_told_how_it_begins_again(tmp_path: Path) -> None:
    """It told its old story and ended, as if it had just happened."""
    load = {"mode": "closedLoop", "concurrency": 1, "promptTokens": 8, "outputTokens": 8}
    file = write(tmp_path, target={"replicas": 0}, load=load, promotion={"mode": "recommend"})
    made = read_file(file)
    (tmp_path / "state").mkdir()
    store = SqliteStore(tmp_path / "state" / "store.sqlite", SystemClock())
    store.save(TuningRecord(tuning=made, spec_hash=made.spec.spec_hash, phase=Phase.REJECTED, phase_since=1.0))
    store.close()
    out = run("tune", file, tmp_path / "state", "--plain", code=Exit.NO_CHANGE)
    assert f"It had ended before, in Rejected: nothing was tried. To begin again: tunewright tune {file} --anew" in out


def test_a_device_is_not_read_to_its_end(tmp_path: Path) -> None:
    assert "larger than 256 KiB" in run("check", Path("/dev/zero"), tmp_path / "state", code=Exit.USAGE)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"kind: \xff\n")
    assert "no text in UTF-8 (byte 6)" in run("check", file, tmp_path / "state", code=Exit.USAGE)
