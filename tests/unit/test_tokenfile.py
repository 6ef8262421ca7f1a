"""Files with tokens: read in bounds, and for others only where they may name them."""

import os
from pathlib import Path

import pytest

from tunewright.ports import PortError, Refused
from tunewright.tokenfile import MOST, credential, read_token

FIELD = "target.apiKeyFile"


def test_a_token_is_one_word(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  s3same-_.~+/= \n")
    assert read_token(file, FIELD) == "s3same-_.~+/="


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "one token and nothing else"),
        (b" \n", "one token and nothing else"),
        (b"two words", "one token and nothing else"),
        (b"a\nb", "one token and nothing else"),
        (b"\xff\xfe\x00", "one token and nothing else"),
        (b"-----BEGIN PRIVATE KEY-----\nx", "one token and nothing else"),
        (b"x" * (MOST + 1), "larger than 16 KiB"),
    ],
)
def test_what_is_no_token_is_refused_and_not_quoted(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(PortError, match=told) as caught:
        read_token(file, FIELD)
    assert str(caught.value).startswith(f"{FIELD} {file}")
    assert "PRIVATE" not in str(caught.value)


def test_what_never_ends_or_never_begins_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, told in (
        (Path("/dev/zero"), "larger than 16 KiB"),
        (tmp_path / "pipe", "one token and nothing else"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(PortError, match=told):
            read_token(path, FIELD)


def test_a_pipe_may_hold_the_token() -> None:
    """As in `--api-key-file <(pass show it)`."""
    reader, writer = os.pipe()
    os.write(writer, b"token\n")
    os.close(writer)
    assert read_token(Path(f"/dev/fd/{reader}"), FIELD) == "token"
    os.close(reader)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a Secret is mounted: each key a link to a folder of that moment."""
    made = tmp_path / "credentials"
    (made / "llm" / "..2026_01").mkdir(parents=True)
    (made / "llm" / "..2026_01" / "key").write_text("sesame")
    (made / "llm" / "..data").symlink_to("..2026_01")
    (made / "llm" / "key").symlink_to("..data/key")
    (tmp_path / "token").write_text("the controller's own")
    (made / "llm" / "out").symlink_to(tmp_path / "token")
    return made


def test_a_file_of_the_folder_may_be_named(folder: Path) -> None:
    assert read_token(credential(folder, f"{folder}/llm/key", FIELD), FIELD) == "sesame"
    assert credential(folder, f"{folder}/not/there/yet", FIELD) == folder / "not/there/yet"


@pytest.mark.parametrize(
    "named",
    ["{0}/../token", "{0}/llm/out", "{0}x/key", "llm/key", "/var/run/secrets/kubernetes.io/serviceaccount/token",
     "/proc/self/environ", ""],
)  # fmt: skip
def test_no_other_file_may_be_named(folder: Path, named: str) -> None:
    """Whoever may write Tunings would else have the controller send its own token to a server of theirs."""
    with pytest.raises(Refused, match=r"target\.apiKeyFile names .*, but the controller reads only files in "):
        credential(folder, named.format(folder), FIELD)
