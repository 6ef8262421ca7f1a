"""The truth server: built from its source, run on a core of its own; and its log of every token's true send time."""

import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

SOURCE = Path(__file__).resolve().parents[2] / "shared" / "truth-server"


class Missing(Exception):
    """Something that the benchmark needs is not here; the message says what, and what to do."""


class Truth(NamedTuple):
    """One request as the server saw it, in monotonic nanoseconds."""

    received: int
    sent: Ints
    """Just before each token went."""


@dataclass(frozen=True)
class Shape:
    """How the server answers. Times in seconds; `stall` is (since its first request, length)."""

    itl: float
    ttft: float = 0.100
    burst: bool = False
    stall: tuple[float, float] | None = None

    def options(self) -> list[str]:
        """The same as its command line."""
        found = ["--ttft-us", str(round(self.ttft * 1e6)), "--itl-us", str(round(self.itl * 1e6))]
        if self.burst:
            found.append("--burst")
        if self.stall is not None:
            at, length = self.stall
            found += ["--stall-at-ms", str(round(at * 1e3)), "--stall-ms", str(round(length * 1e3))]
        return found


def build(source: Path, folder: Path) -> Path:
    """Compile it into `folder`; the executable. Raises `Missing`."""
    file = source / "mockllm.c"
    if not file.is_file():
        raise Missing(f"the truth server's source {file} is missing: name its folder with --truth-server")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Missing("a C compiler is missing: apt-get install gcc libc6-dev")
    binary = folder / "truth-server"
    try:
        subprocess.run([compiler, "-O2", "-w", "-o", str(binary), str(file)], check=True, timeout=120)
    except subprocess.CalledProcessError as error:
        raise Missing(f"{file} can't be compiled by {compiler} (status {error.returncode}; see above)") from error
    return binary


class TruthServer:
    """A running truth server."""

    def __init__(self, url: str, pid: int, dump: Path) -> None:
        self.url, self.pid, self._dump = url, pid, dump

    def truth(self) -> dict[str, Truth]:
        """By request id, since it was asked last."""
        fetch(f"{self.url}/dump")
        return _read(self._dump.read_bytes())

    def stats(self) -> dict[str, Any]:
        """Its own lateness, in microseconds."""
        found: dict[str, Any] = json.loads(fetch(f"{self.url}/stats"))
        return found


@contextmanager
def truth_server(binary: Path, folder: Path, shape: Shape, core: int | None) -> Iterator[TruthServer]:
    """Run it on a free port, on `core` alone where one is named."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dump = folder / f"truth-{port}.bin"
    process = start([str(binary), "--port", str(port), "--dump", str(dump), *shape.options()], core)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url)
        yield TruthServer(url, process.pid, dump)
    finally:
        process.kill()
        process.wait(timeout=10)
        dump.unlink(missing_ok=True)


def start(argv: Sequence[str], core: int | None, **more: Any) -> "subprocess.Popen[bytes]":
    """A child, on one core where one is named."""
    pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
    return subprocess.Popen(argv, preexec_fn=pin, **more)


def fetch(url: str) -> bytes:
    """GET with a time-out."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


def _wait(url: str) -> None:
    for _ in range(100):
        try:
            fetch(f"{url}/health")
            return
        except OSError:
            time.sleep(0.05)
    raise Missing(f"the truth server does not answer at {url}")


def _read(data: bytes) -> dict[str, Truth]:
    at, found = 0, {}
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        name = data[at + 4 : at + 4 + length].decode()
        _, received, _, _, count = struct.unpack_from("<QQQII", data, at + 4 + length)
        at += 4 + length + 32
        found[name] = Truth(received, np.frombuffer(data, "<u8", count, at).astype(np.int64))
        at += 8 * count
    return found
