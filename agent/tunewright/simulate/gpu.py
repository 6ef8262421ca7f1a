"""A GPU's memory shared by several simulated servers: `--sim-gpu DIR` holds one file per process.

This is how a server left over from an earlier trial spoils the next one, as on a real GPU.
"""

from __future__ import annotations

from pathlib import Path

from .config import ENGINE, StartFailure


def _alive(pid: int) -> bool:
    # A zombie holds no memory, although its pid still answers to signals.
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def held_gib(directory: Path) -> float:
    """GiB held by processes that still live; files of dead ones are removed."""
    total = 0.0
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.name.isdigit() and _alive(int(entry.name)):
            total += float(entry.read_text(encoding="ascii") or 0)
        else:
            entry.unlink(missing_ok=True)
    return total


def check_free(directory: Path, memory_gib: float, utilization: float) -> None:
    """Raises vLLM's StartFailure when what others hold leaves less than this server wants."""
    free, wanted = memory_gib - held_gib(directory), memory_gib * utilization
    if free < wanted:
        raise StartFailure(
            f"Free memory on device cuda:0 ({free:.2f}/{memory_gib:.2f} GiB) on startup is less than desired GPU "
            f"memory utilization ({utilization}, {wanted:.2f} GiB). Decrease GPU memory utilization or reduce GPU "
            "memory used by other processes.",
            stage=ENGINE,
        )


def hold(directory: Path, pid: int, gib: float) -> None:
    """Records that a process holds this much until it ends."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / str(pid)).write_text(f"{gib:.3f}", encoding="ascii")
