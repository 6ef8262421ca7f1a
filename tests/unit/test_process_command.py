"""The command of a server, and the small things around it."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import ShiftedClock, first_port

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import Failure, FailureKind
from tunewright.knobs.facts import ModelFacts, default_value
from tunewright.platform.process import gpu, sockets
from tunewright.platform.process.attempts import MAX_ATTEMPTS, Attempts
from tunewright.platform.process.command import Command
from tunewright.platform.process.machine import with_machine
from tunewright.ports import PortError, Refused

WORDS = ("vllm", "serve", "m", "--port", "{port}", "--max-num-seqs", "64", "--api-key", "hush-hush")
CRASH = Failure(kind=FailureKind.CRASHED, cause="it crashed")
KILL = Failure(kind=FailureKind.KILLED, cause="it was killed")


def test_places_are_filled_in_words_and_environment() -> None:
    command = Command(WORDS, {"CUDA_VISIBLE_DEVICES": "{replica}"})
    assert command.baseline.values == {"max_num_seqs": 64}
    argv, environment = command.filled(Candidate(values={"max_num_seqs": 8}), port=18100, replica=3)
    assert argv[:7] == ["vllm", "serve", "m", "--port", "18100", "--max-num-seqs", "8"]
    assert environment == {"CUDA_VISIBLE_DEVICES": "3"}


def test_the_base_is_all_but_the_knobs() -> None:
    base = Command(WORDS, {}).base
    assert Command([*WORDS, "--max-num-seqs", "7"], {}).base == base
    assert Command([*WORDS, "--served-model-name", "x"], {}).base != base
    assert Command(WORDS, {"HF_HOME": "/x"}).base != base
    assert Command(WORDS, {"OMP_NUM_THREADS": "2"}).base == base


def test_secrets_are_used_and_not_shown(tmp_path: Path) -> None:
    command = Command(WORDS, {"HF_TOKEN": "abc", "A": "b c"})
    assert command.headers() == {"Authorization": "Bearer hush-hush"}
    shown = command.show(Candidate())
    assert "hush" not in shown
    assert "abc" not in shown
    assert "A='b c'" in shown
    assert command.redact("given: ['hush-hush']") == "given: ['(hidden)']"
    key = tmp_path / "key"
    key.write_text("from-file\n")
    assert Command(WORDS, {}, str(key)).headers() == {"Authorization": "Bearer from-file"}
    with pytest.raises(PortError, match="apiKeyFile"):
        Command(WORDS, {}, str(tmp_path / "none")).headers()
    assert Command(WORDS[:5], {"VLLM_API_KEY": "e"}).headers() == {"Authorization": "Bearer e"}
    assert Command(WORDS[:5], {}).headers() == {}


@pytest.mark.parametrize(
    "words", [("vllm", "serve", "m"), (*WORDS, "--uds", "/x"), (*WORDS, "--ssl-keyfile=/k"), (*WORDS, "--uds=/x")]
)
def test_commands_that_can_not_be_served(words: tuple[str, ...]) -> None:
    with pytest.raises(Refused):
        Command(words, {})


@pytest.mark.parametrize(
    ("more", "host"),
    [((), "127.0.0.1"), (("--host", "0.0.0.0"), "127.0.0.1"), (("--host=192.0.2.7",), "192.0.2.7")],
)
def test_where_the_server_is_reached(more: tuple[str, ...], host: str) -> None:
    assert Command((*WORDS, *more), {}).host == host


def test_problems_are_told_before_anything_is_started() -> None:
    assert "no-such-program" in Command(("no-such-program", "{port}"), {}).problems(Candidate())[0]
    assert "no_such_knob" in Command(("sh", "{port}"), {}).problems(Candidate(values={"no_such_knob": 1}))[0]
    assert Command(("sh", "{port}"), {}).problems(Candidate()) == []


# --- GPUs ---

Nvidia = Callable[[str], None]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvidia:
    def install(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_memory_of_the_visible_gpus(nvidia_smi: Nvidia) -> None:
    nvidia_smi('[ "$3" = --id=1,2 ] && printf "1, 512, 81559\\n2, 4, 81559\\n"')
    found = gpu.memory({"CUDA_VISIBLE_DEVICES": "1,2"})
    assert found == [gpu.GpuMemory("1", 512.0, 81559.0), gpu.GpuMemory("2", 4.0, 81559.0)]
    assert gpu.memory({}) is None, "which GPU it is can't be told"
    assert gpu.memory({"CUDA_VISIBLE_DEVICES": "MIG-x"}) is None


def test_a_gpu_that_does_not_answer_is_no_free_gpu(nvidia_smi: Nvidia, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    nvidia_smi("echo 'No devices were found'; exit 6")
    with pytest.raises(PortError, match="No devices were found"):
        gpu.memory(environment)
    nvidia_smi("echo 0, [N/A], [N/A]")
    with pytest.raises(PortError, match="no memory of a GPU"):
        gpu.memory(environment)
    monkeypatch.setattr(gpu, "TIMEOUT", 0.05)
    nvidia_smi("exec sleep 60")
    with pytest.raises(PortError, match="timed out"):
        gpu.memory(environment)


def test_without_nvidia_smi_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpu.memory({"CUDA_VISIBLE_DEVICES": "0"}) is None


def test_what_the_gpus_are_reaches_the_search(nvidia_smi: Nvidia) -> None:
    """vLLM's own defaults hang on it: on this GPU 1024 sequences, which a ladder must not lower to 512."""
    nvidia_smi(
        'case "$1 $3" in "--query-gpu=name,memory.total,compute_cap --id=2,3") '
        "echo NVIDIA H200, 143771, 9.0; echo NVIDIA A100-SXM4-80GB, 81920, 8.0;; *) exit 1;; esac"
    )
    facts = with_machine(ModelFacts(layers=7), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert (facts.layers, facts.gpu_count, facts.compute_capability, facts.gpu_memory_gib) == (7, 2, 8.0, 80.0)
    assert facts.gpu_name == "NVIDIA A100-SXM4-80GB"
    assert default_value("max_num_seqs", facts) == 256
    nvidia_smi("echo NVIDIA H200, 143771, 9.0")
    facts = with_machine(ModelFacts(), {"CUDA_VISIBLE_DEVICES": "0"})
    assert default_value("max_num_seqs", facts) == 1024
    assert default_value("max_num_batched_tokens", facts) == 8192


@pytest.mark.parametrize("script", ["exit 6", "echo 0, N/A", "echo NVIDIA H200, [N/A], 9.0"])
def test_gpus_that_can_not_be_read_leave_the_facts_unknown(nvidia_smi: Nvidia, script: str) -> None:
    nvidia_smi(script)
    assert with_machine(ModelFacts(layers=7), {"CUDA_VISIBLE_DEVICES": "0"}) == ModelFacts(layers=7)
    assert with_machine(ModelFacts(layers=7), {}) == ModelFacts(layers=7), "which GPU it is can't be told"


# --- ports ---


def test_a_listener_makes_a_port_taken_on_whatever_address() -> None:
    port = first_port()
    assert sockets.is_free(port)
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, port), reuse_port=True):
            assert not sockets.is_free(port)
            assert len(sockets.listening_sockets(port)) == 1
        assert sockets.is_free(port)


def test_no_free_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    port = first_port()
    monkeypatch.setattr(sockets, "RANGE", 1)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortError, match="is free"):
        sockets.free_port(port)


# --- attempts ---


def test_waits_grow_and_foreign_configurations_are_given_up(tmp_path: Path) -> None:
    clock = ShiftedClock()
    attempts = Attempts(tmp_path / "attempts.json", clock)
    assert attempts.may_start("replica-0", "x", bounded=True)
    waits = []
    for _ in range(MAX_ATTEMPTS):
        attempts.failed("replica-0", "x", CRASH)
        begin = clock.ahead
        while not attempts.may_start("replica-0", "x", bounded=False):
            clock.ahead += 1
        waits.append(clock.ahead - begin)
    assert waits == sorted(set(waits))
    assert not attempts.may_start("replica-0", "x", bounded=True)
    assert attempts.may_start("replica-0", "y", bounded=True)
    clock.ahead += 86400
    assert attempts.may_start("replica-0", "x", bounded=False), "production's own is tried for ever"


def test_what_the_machine_is_to_blame_for_is_told_only_after_some_attempts(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "attempts.json", ShiftedClock())
    attempts.failed("canary", "x", KILL)
    assert attempts.failure_of("x") is None
    assert attempts.killed(["canary"]) is not None
    assert attempts.killed(["replica-0"]) is None
    for _ in range(MAX_ATTEMPTS - 1):
        attempts.failed("canary", "x", KILL)
    assert attempts.failure_of("x") == KILL
    attempts.failed("canary", "y", CRASH)
    assert attempts.failure_of("y") == CRASH
    attempts.keep_only(["z"])
    assert attempts.failure_of("y") is None
