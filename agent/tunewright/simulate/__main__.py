"""`python -m tunewright.simulate serve MODEL …`: starts, or fails to start, as `vllm serve` would."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from . import gpu, startup
from .config import ENGINE, EngineConfig, StartFailure, resolve
from .faults import FaultError, Faults, leave_engine, parse_faults
from .flags import VLLM_VERSION, Arguments, UsageError, help_text, parse, write_usage
from .memory import Memory, plan
from .profile import Profile, ProfileError, load

_HELP = """usage: tunewright simulate serve MODEL [vLLM's flags] [options]

A vLLM 0.32 that needs no GPU: every flag of `vllm serve`, and
  --profile NAME|FILE       hardware and model to play (default: demo)
  --sim-speed N             start N times as fast; serving keeps its speed
  --sim-seed N              makes noise repeatable
  --sim-noise-between S     standard deviation between starts (default: the profile's)
  --sim-noise-within S      standard deviation within a run (default: the profile's)
  --sim-fault NAME[:ARG]    a fault; repeatable; also TUNEWRIGHT_SIM_FAULT=NAME[:ARG],…
  --sim-gpu DIR             servers that name the same folder share one GPU's memory
"""


def main(argv: list[str]) -> int:
    """Runs the simulator with the arguments after `tunewright simulate`; returns the exit code."""
    if argv and argv[0] in ("--version", "-v"):
        sys.stdout.write(f"{VLLM_VERSION}+simulated\n")
        return 0
    if argv[:1] == ["serve"] and "--help=all" in argv:
        sys.stdout.write(help_text())
        return 0
    if not argv or argv[0] != "serve" or argv[1:2] in (["-h"], ["--help"]):
        (sys.stdout if argv else sys.stderr).write(_HELP)
        return 0 if argv and argv[0] in ("serve", "-h", "--help") else 2
    try:
        arguments = parse(argv[1:])
        faults = parse_faults(arguments.faults)
        profile = load(arguments.profile)
    except UsageError as error:
        return write_usage(error)
    except (FaultError, ProfileError) as error:
        sys.stderr.write(f"tunewright simulate: error: {error}\n")
        return 2
    log = startup.Log()
    startup.announce(log, arguments)
    try:
        sock = _bind(arguments)
    except OSError as error:
        sys.stderr.write(startup.traceback(f"OSError: [Errno {error.errno}] {os.strerror(error.errno or 0)}"))
        return 1
    try:
        started = _start(log, arguments, profile, faults)
    except StartFailure as failure:
        sock.close()
        return startup.fail(log, failure)
    return _serve(log, arguments, profile, faults, sock, *started)


def _bind(arguments: Arguments) -> socket.socket:
    """vLLM takes its port before anything else, so that a port in use is found at once; it listens only later."""
    host = arguments.get("host") or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, int(arguments.get("port", 8000))))
    except OSError:
        sock.close()
        raise
    return sock


def _kv_space(profile: Profile, environment: Mapping[str, str]) -> float | None:
    """GiB of KV cache on a CPU, from vLLM's environment variable. Raises StartFailure if there is less memory."""
    if profile.hardware.device != "cpu":
        return None
    total = profile.hardware.memory_gib
    free = round(total - profile.hardware.overhead_gib, 2)
    wanted = float(environment.get("VLLM_CPU_KVCACHE_SPACE") or 4)
    if wanted > free:
        reason = (
            f"Available memory on node 0 ({free}/{total} GiB) on kv cache allocation is less than requested memory for "
            f"kv ({wanted} GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used "
            "by other processes."
        )
        raise StartFailure(
            f"Worker failed with error '{reason}', please check the stack trace above for the root cause",
            stage=ENGINE,
            kind="RuntimeError",
        )
    return wanted


def _start(log: startup.Log, arguments: Arguments, profile: Profile, faults: Faults) -> tuple[EngineConfig, Memory]:
    """Everything between the banner and the first request, with the time it takes. Raises StartFailure."""
    start, speed = profile.start, arguments.speed
    time.sleep(start.import_s / speed)
    startup.check_model(arguments.model)
    config = resolve(profile, arguments.given, os.environ)
    startup.report_config(log, profile, config)
    startup.report_engine(log, arguments, profile, config)
    if arguments.gpu:
        gpu.check_free(Path(arguments.gpu), profile.hardware.memory_gib, config.gpu_memory_utilization)
        gpu.hold(Path(arguments.gpu), os.getpid(), config.gpu_memory_utilization * profile.hardware.memory_gib)
    time.sleep(start.load_s / speed)
    if "start-crash" in faults:
        raise StartFailure("Engine core proc died: injected by --sim-fault", stage=ENGINE, kind="RuntimeError")
    if "start-oom" in faults:
        message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        message += f"{profile.hardware.memory_gib:.2f} GiB of which 1.21 GiB is free."
        raise StartFailure(message, stage=ENGINE, kind="torch.OutOfMemoryError")
    memory = plan(profile, config, _kv_space(profile, os.environ))
    startup.report_memory(log, profile, config, memory)
    compiling = 0.0 if config.enforce_eager else start.compile_s
    capturing = start.capture_s * config.capture_size / profile.defaults.max_cudagraph_capture_size
    time.sleep((compiling + capturing) / speed + faults.value("slow-start", 0.0))
    while "hang-start" in faults:
        time.sleep(60)
    if "leaves-engine" in faults:
        child = leave_engine(faults.value("leaves-engine", 600.0))
        if arguments.gpu:
            gpu.hold(Path(arguments.gpu), child, config.gpu_memory_utilization * profile.hardware.memory_gib)
    host, port = arguments.get("host") or "0.0.0.0", int(arguments.get("port", 8000))
    startup.report_ready(log, start.load_s + compiling + capturing, compiling, host, port)
    return config, memory


def _serve(
    log: startup.Log,
    arguments: Arguments,
    profile: Profile,
    faults: Faults,
    sock: socket.socket,
    config: EngineConfig,
    memory: Memory,
) -> int:
    # Imported here: a start that fails need not wait for them.
    import uvloop

    from .effective import cache_config_labels
    from .server import Server

    labels = cache_config_labels(arguments, config, memory)

    async def run() -> int:
        return await Server(arguments, profile, config, memory, labels, faults, log).run(sock)

    return int(uvloop.run(run()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
