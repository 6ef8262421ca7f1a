"""A server's GPUs, what they are and how much of their memory is in use, where `nvidia-smi` is there to ask."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tunewright.ports import PortError

TIMEOUT = 10.0
_USE = "index,memory.used,memory.total"
_KIND = "name,memory.total,compute_cap"


@dataclass(frozen=True)
class GpuMemory:
    """One GPU, in MiB."""

    gpu: str
    used: float
    total: float


@dataclass(frozen=True)
class GpuKind:
    """What one GPU is: its name, memory in GiB, and compute capability (9.0 is Hopper)."""

    name: str
    memory_gib: float
    capability: float


def memory(environment: Mapping[str, str]) -> list[GpuMemory] | None:
    """Of the GPUs that `CUDA_VISIBLE_DEVICES` names (indices or UUIDs, in PCI order as with CUDA_DEVICE_ORDER).

    None where that can't be told: no nvidia-smi, no such variable, or a slice of a GPU. Raises `PortError` when
    nvidia-smi does not answer.
    """
    lines = _ask(_USE, environment)
    return None if lines is None else [_memory(line) for line in lines]


def kinds(environment: Mapping[str, str]) -> list[GpuKind] | None:
    """What the same GPUs are; None and `PortError` likewise."""
    lines = _ask(_KIND, environment)
    return None if lines is None else [_kind(line) for line in lines]


def _ask(query: str, environment: Mapping[str, str]) -> list[str] | None:
    devices = [device.strip() for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    command = shutil.which("nvidia-smi")
    if command is None or not devices or not all(_whole(device) for device in devices):
        return None
    argv = [command, f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={','.join(devices)}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PortError(f"nvidia-smi: {error}; is the GPU's driver well?") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[:300]
        raise PortError(f"nvidia-smi can't tell {query} of GPU {','.join(devices)}: {said}")
    return [line for line in done.stdout.splitlines() if line.strip()]


def _whole(device: str) -> bool:
    return device.isdigit() or device.startswith("GPU-")


def _memory(line: str) -> GpuMemory:
    try:
        index, used, total = (part.strip() for part in line.split(","))
        return GpuMemory(index, float(used), float(total))
    except ValueError as error:
        raise PortError(f"nvidia-smi says {line!r}, which is no memory of a GPU") from error


def _kind(line: str) -> GpuKind:
    try:
        name, total, capability = (part.strip() for part in line.split(","))
        return GpuKind(name, float(total) / 1024, float(capability))
    except ValueError as error:
        raise PortError(f"nvidia-smi says {line!r}, which is no kind of a GPU") from error
