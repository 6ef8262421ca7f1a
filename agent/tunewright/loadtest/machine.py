"""What the machine under the load generator does beside it."""

from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")


class CpuTimes(NamedTuple):
    """CPU time of all cores since the machine started, in ticks."""

    stolen: int
    total: int


def cpu_times(stat: Path = STAT) -> CpuTimes | None:
    """CPU times now; None where the kernel does not tell."""
    try:
        words = stat.read_text().split("\n", 1)[0].split()
        times = [int(word) for word in words[1:9]]  # user nice system idle iowait irq softirq steal
    except (OSError, ValueError):
        return None
    return CpuTimes(times[7], sum(times)) if words[:1] == ["cpu"] and len(times) == 8 else None


def stolen(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Share of the CPU time in between that the hypervisor gave to other machines; None where it is not known."""
    if before is None or after is None or after.total <= before.total:
        return None
    return max(0, after.stolen - before.stolen) / (after.total - before.total)
