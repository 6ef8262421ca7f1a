"""Files that a person names: whatever stands behind the name, reading it ends, and says what is wrong."""

import os
from pathlib import Path

import pytest

from tunewright.bounded import MAX_KEY, read_bounded, read_key
from tunewright.domain.traffic import Trace
from tunewright.loadtest import trace
from tunewright.loadtest.job import LoadFailure
from tunewright.platform.process.command import Command
from tunewright.ports import PortError

SERVE = ("vllm", "serve", "m", "--port", "{port}")


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


def test_a_pipe_is_read_and_one_that_nobody_writes_to_hangs_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_bounded(pipe, 10) == b""
    reader, writer = os.pipe()
    os.write(writer, b"token\n")
    os.close(writer)
    assert read_key(Path(f"/dev/fd/{reader}")) == "token"  # as in --api-key-file <(pass show it)
    os.close(reader)


@pytest.mark.parametrize(
    "held", [b"", b" \n", b"two words", b"two\nlines", b"caf\xc3\xa9", b"\xff", b"a" * (MAX_KEY + 1)]
)
def test_a_key_file_holds_one_token_and_is_never_quoted(tmp_path: Path, held: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(held)
    with pytest.raises(OSError, match=r"^\[Errno \d+\] it ") as refused:
        read_key(file)
    assert "words" not in str(refused.value)
    with pytest.raises(PortError, match=f"can't read apiKeyFile {file}: it "):
        Command(SERVE, {}, str(file)).headers()
    file.write_bytes(b" sk-1\n")
    assert Command(SERVE, {}, str(file)).headers() == {"Authorization": "Bearer sk-1"}


def test_a_trace_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BYTES", 1 << 20)
    with pytest.raises(LoadFailure, match=r"^the trace /dev/zero can't be read: it is larger than 1 MiB: cut it"):
        trace.read_trace(Trace(file="/dev/zero"))
