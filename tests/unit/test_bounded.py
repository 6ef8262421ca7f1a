"""Files that a person names: whatever stands behind the name, reading it ends, and says what is wrong."""

import os
from pathlib import Path

import pytest

from tunewright.bounded import read_bounded
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


def test_a_pipe_that_nobody_writes_to_hangs_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_bounded(pipe, 10) == b""


def test_a_trace_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BYTES", 1 << 20)
    with pytest.raises(LoadFailure, match=r"^the trace /dev/zero can't be read: it is larger than 1 MiB: cut it"):
        trace.read_trace(Trace(file="/dev/zero"))
