"""How much memory of a server's GPUs is in use, where `nvidia-smi` is there to ask."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tunewright.ports import PortError

TIMEOUT = 10.0
_QUERY = "--query-gpu=index,memory.used,memory.total"


@dataclass(frozen=True)
class GpuMemory:
    """One GPU, in MiB."""

    gpu: str
    used: float
    total: float


def memory(environment: Mapping[str, str]) -> list[GpuMemory] | None:
    """Of the GPUs that `CUDA_VISIBLE_DEVICES` names (indices or UUIDs, in PCI order as with CUDA_DEVICE_ORDER).

    None where that can't be told: no nvidia-smi, no such variable, or a slice of a GPU. Raises `PortError` when
    nvidia-smi does not answer.
    """
    devices = [device.strip() for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    command = shutil.which("nvidia-smi")
    if command is None or not devices or not all(_whole(device) for device in devices):
        return None
    argv = [command, _QUERY, "--format=csv,noheader,nounits", f"--id={','.join(devices)}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PortError(f"nvidia-smi: {error}; is the GPU's driver well?") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[:300]
        raise PortError(f"nvidia-smi can't tell the memory of GPU {','.join(devices)}: {said}")
    return [_line(line) for line in done.stdout.splitlines() if line.strip()]


def _whole(device: str) -> bool:
    return device.isdigit() or device.startswith("GPU-")


def _line(line: str) -> GpuMemory:
    try:
        index, used, total = (part.strip() for part in line.split(","))
        return GpuMemory(index, float(used), float(total))
    except ValueError as error:
        raise PortError(f"nvidia-smi says {line!r}, which is no memory of a GPU") from error
