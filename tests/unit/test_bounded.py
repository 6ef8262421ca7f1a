"""Files that a person names: whatever stands behind the name, reading it ends, and says what is wrong."""

import gzip
import os
from pathlib import Path

import pytest

from tunewright.bounded import read_bounded, unpacked
from tunewright.domain.traffic import Trace
from tunewright.loadtest import trace
from tunewright.loadtest.job import LoadFailure


def test_no_more_is_read_than_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"a" * 2048)
    assert read_bounded(file, 2048) == b"a" * 2048
    with pytest.raises(OSError, match="larger than 1 KiB"):
        read_bounded(file, 2047)
    with pytest.raises(OSError, match="larger than 2 MiB"):
        read_bounded(Path("/dev/zero"), 2 << 20)
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 10)


def test_gzip_is_unpacked_no_further_than_is_allowed() -> None:
    packed = gzip.compress(b"a" * 3000)
    assert unpacked(packed, 3000) == b"a" * 3000
    assert unpacked(b"plain", 5) == b"plain"
    for data, most in ((packed, 2999), (gzip.compress(bytes(64 << 20)), 2999), (b"plain", 4)):
        with pytest.raises(OSError, match="larger than"):
            unpacked(data, most)
    for damaged in (packed[:-9], packed[:9], packed[:15] + b"xxxx" + packed[19:]):
        with pytest.raises(OSError, match="damaged gzip"):
            unpacked(damaged, 3000)


def test_a_pipe_that_nobody_writes_to_hangs_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_bounded(pipe, 10) == b""


def test_a_trace_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BYTES", 1 << 20)
    with pytest.raises(LoadFailure, match=r"^the trace /dev/zero can't be read: it is larger than 1 MiB: cut it"):
        trace.read_trace(Trace(file="/dev/zero"))
