"""Every recorded failure, made once more on a real vLLM: it is told for what it is, and nothing of it is left."""

import dataclasses
import os
import queue
import shlex
import signal
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_vllm import ENVIRONMENT, MODEL, START_TIMEOUT, needs_vllm, serve, shared_memory, until

from tunewright.clock import SystemClock
from tunewright.domain.state import Failure
from tunewright.domain.state import FailureKind as Kind
from tunewright.domain.tuning import Spare, Target
from tunewright.platform.process import children, sockets
from tunewright.platform.process.spare import ProcessSpare
from tunewright.ports import Refused, ServerPhase, ServerStatus

pytestmark = [*needs_vllm, pytest.mark.timeout(1200)]

SHORT = ("--max-model-len", "2048")
LIMIT = 130_944
"""Tokens of the model's KV cache in 1 GiB: 2 × 8 layers × 4 heads × 64 numbers of 2 bytes each, less a block of 128."""


@dataclasses.dataclass(frozen=True)
class Case:
    """How it is made, and what is to be told of it."""

    kind: Kind
    cause: str
    advice: str
    flags: tuple[str, ...] = SHORT
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    model: Path = MODEL
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    refused: bool = False  # the product does not even launch it; then it is hidden in a shell's command
    then: str = ""  # what happens to it once it is launched or ready


CASES = {
    "bad_choice": Case(Kind.INVALID_FLAG, "argument --dtype: invalid choice: 'float12'", "names",
                       flags=("--dtype", "float12")),
    "bad_value": Case(Kind.INVALID_FLAG, "argument --max-num-seqs: invalid int value: 'many'", "names",
                      flags=("--max-num-seqs", "many"), refused=True),
    "unknown_flag": Case(Kind.INVALID_FLAG, "unrecognized arguments: --no-such-flag 1", "no such flag",
                         flags=("--no-such-flag", "1")),
    "gpu_util_2": Case(Kind.INVALID_FLAG, "gpu_memory_utilization: Input should be less than or equal to 1", "allows",
                       flags=(*SHORT, "--gpu-memory-utilization", "2.0"), refused=True),
    "kv_space_over_ram": Case(Kind.OUT_OF_MEMORY, "requested memory for kv (2000.0 GiB)", "memory",
                              environment={"VLLM_CPU_KVCACHE_SPACE": "2000"}),
    "kv_too_small_for_maxlen": Case(
        Kind.KV_TOO_SMALL, "To serve at least one request with the model's max seq len", "max_model_len",
        flags=("--hf-overrides", '{"max_position_embeddings": 1000000}', "--max-model-len", "1000000"),
        limits={"max_model_len": LIMIT},
    ),
    "mbt_below_maxlen": Case(
        Kind.INVALID_COMBINATION, "max_num_batched_tokens (512) is smaller than max_model_len (2048)",
        "chunked prefill",
        flags=(*SHORT, "--max-num-batched-tokens", "512", "--no-enable-chunked-prefill"),
    ),
    "tp3_heads": Case(Kind.INVALID_COMBINATION, "must be divisible by tensor parallel size (3)", "attention heads",
                      flags=(*SHORT, "--tensor-parallel-size", "3")),
    "tp2_two_cores": Case(Kind.INVALID_COMBINATION, "Not enough allowed NUMA nodes", "",
                          flags=(*SHORT, "--tensor-parallel-size", "2")),
    "model_missing_path": Case(Kind.MODEL_MISSING, "nosuch", "check its path", model=MODEL.with_name("nosuch")),
    "port_in_use": Case(Kind.PORT_IN_USE, "ddress already in use", "Another process", then="its port is taken"),
    "main_sigkill": Case(Kind.KILLED, "SIGKILL", "try again", then="its main process is killed"),
    "worker_killed": Case(Kind.KILLED, "Worker proc VllmWorker-0 died unexpectedly", "try again",
                          then="its worker is killed"),
}  # fmt: skip


LONG = (Kind.OUT_OF_MEMORY, Kind.KV_TOO_SMALL)
"""These come up almost whole before they fail."""


@dataclasses.dataclass
class Seen:
    """What came of one case."""

    failure: Failure | None = None
    log: str = ""
    refusal: str = ""
    processes: list[int] = dataclasses.field(default_factory=list)
    port_free: bool = False
    error: BaseException | None = None


def provoke(name: str, case: Case, core: int, folder: Path) -> Seen:
    """Make the failure on the spare, and clean up after it as a trial does."""
    seen, words = Seen(), serve(core, *case.flags, model=case.model)
    environment = {**ENVIRONMENT, **case.environment}
    if case.refused:
        try:
            spare_of(words, environment, core, folder)
        except Refused as refusal:
            seen.refusal = str(refusal)
        words = ["sh", "-c", "exec " + shlex.join(words).replace("'{port}'", "{port}")]
    spare = spare_of(words, environment, core, folder)
    with ExitStack() as exits:
        exits.callback(end, spare, name)
        spare.start(name, spare.command.baseline)
        port = int((spare.poll(name).url or "").rpartition(":")[2])
        if case.then == "its port is taken":
            exits.enter_context(socket.create_server(("127.0.0.1", port)))
        elif case.then:
            wait(spare, name, ServerPhase.READY)
            os.kill(victim(case.then, folder / name), signal.SIGKILL)
        seen.failure = wait(spare, name, ServerPhase.FAILED).failure
        seen.log = spare.log_tail(name, 200)
    seen.processes = children.find_marked(folder)
    seen.port_free = sockets.is_free(port)
    return seen


def spare_of(words: list[str], environment: dict[str, str], core: int, folder: Path) -> ProcessSpare:
    target = Target(command=tuple(words), environment=environment, first_port=18600 + 500 * core)
    return ProcessSpare(folder, target, Spare.model_validate({"startTimeout": f"{START_TIMEOUT:g}s"}), SystemClock())


def wait(spare: ProcessSpare, name: str, phase: ServerPhase) -> ServerStatus:
    def reached() -> ServerStatus | None:
        status = spare.poll(name)
        assert status.phase in (phase, ServerPhase.STARTING, ServerPhase.READY), f"{name}: {status}"
        return status if status.phase is phase else None

    return until(reached, START_TIMEOUT + 60, lambda: f"{name} {phase}; its log: {spare.log_tail(name)}")


def end(spare: ProcessSpare, name: str) -> None:
    """As a trial ends: nothing may be left, or no other trial would start."""
    spare.cancel(name)
    until(
        lambda: spare.poll(name).phase is ServerPhase.ABSENT, 60, lambda: f"{name} is still there: {spare.poll(name)}"
    )


def victim(what: str, folder: Path) -> int:
    child = children.load(folder / "child.json")
    assert child is not None
    if what == "its main process is killed":
        return child.pid
    named = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children.group_members(child)}
    workers = [pid for pid, comm in named.items() if "Worker" in comm]
    assert len(workers) == 1, named
    return workers[0]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """All that were selected, two at a time on a core each; the long ones first."""
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    names = {call.params["name"] for call in selected if call is not None and call.params.get("name") in CASES}
    folder, before = tmp_path_factory.mktemp("failures"), shared_memory()
    found: dict[str, Seen] = {}
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in sorted(names, key=lambda name: (not CASES[name].then, CASES[name].kind not in LONG)):
        left.put(name)

    def lane(core: int) -> None:
        while True:
            try:
                name = left.get_nowait()
            except queue.Empty:
                return
            # Once in a while vLLM comes up on a port that is taken (seen once in five runs, and not explained).
            for _ in range(2 if CASES[name].then == "its port is taken" else 1):
                try:
                    found[name] = provoke(name, CASES[name], core, folder / name)
                    break
                except BaseException as error:  # noqa: BLE001 - told by the test of this case
                    found[name] = Seen(error=error)

    lanes = [threading.Thread(target=lane, args=(core,)) for core in (0, 1)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    found["all"] = Seen(log=" ".join(sorted(shared_memory() - before)))
    return found


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_failure_is_told_for_what_it_is_and_leaves_nothing(name: str, outcomes: dict[str, Seen]) -> None:
    case, seen = CASES[name], outcomes[name]
    if seen.error is not None:
        raise seen.error
    failure = seen.failure
    assert failure is not None
    told = f"{failure}\n{seen.log}"
    assert failure.kind is case.kind, told
    assert case.cause in failure.cause, told
    assert "Traceback" not in failure.cause
    assert case.advice in failure.advice, told
    assert failure.advice
    assert failure.limits == case.limits
    assert failure.machine_fault == (case.kind in (Kind.MODEL_MISSING, Kind.PORT_IN_USE, Kind.KILLED))
    assert bool(seen.refusal) == case.refused, seen.refusal
    assert seen.processes == []
    assert seen.port_free


def test_no_shared_memory_is_left(outcomes: dict[str, Seen]) -> None:
    assert outcomes["all"].log == ""
