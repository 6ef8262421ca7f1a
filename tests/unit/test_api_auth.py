"""The token file: only its user can read it, and two starters come to the same one."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tunewright.api.auth import MIN_TOKEN, TokenFile, Unauthenticated, Unavailable, ensure_token, own_name, read_token
from tunewright.ports import Refused


def test_is_made_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token"
    old = os.umask(0)
    try:
        token = ensure_token(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(token) >= MIN_TOKEN
    assert ensure_token(path) == token, "it outlives a restart"
    assert [p.name for p in path.parent.iterdir()] == ["token"]
    assert ensure_token(tmp_path / "other") != token


def test_many_starters_come_to_one_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda _: ensure_token(tmp_path / "token"), range(32)))
    assert len(set(tokens)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620, 0o610, 0o601])
def test_is_refused_when_others_can_reach_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    token = ensure_token(path)
    path.chmod(mode)
    with pytest.raises(Refused, match=f"{path}.*{mode:04o}.*remove it"):
        ensure_token(path)
    with pytest.raises(Unavailable):
        TokenFile(path).authenticate(f"Bearer {token}")


def test_is_refused_when_it_is_another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    ensure_token(path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(Refused, match="another user"):
        read_token(path)


def test_links_pipes_and_folders_are_refused(tmp_path: Path) -> None:
    ensure_token(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name in ("link", "dangling", "pipe", "folder"):
        with pytest.raises(Refused):
            ensure_token(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("text", ["", "\n", "short", "x" * (MIN_TOKEN - 1)])
def test_half_a_token_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(Refused, match="no whole token"):
        read_token(path)
    with pytest.raises(Unavailable):
        TokenFile(path).authenticate(f"Bearer x{text}")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="can't be written"):
        ensure_token(tmp_path / "file" / "token")


def test_knows_its_user(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = ensure_token(path)
    known = TokenFile(path)
    assert known.authenticate(f"bearer {token}").name == own_name()
    for wrong in (None, "", token, f"Bearer {token[:-1]}", f"Bearer {token} {token}", "Bearer é"):
        with pytest.raises(Unauthenticated):
            known.authenticate(wrong)


def test_a_new_token_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "token"
    old, known = ensure_token(path), TokenFile(path)
    path.unlink()
    new = ensure_token(path)
    with pytest.raises(Unauthenticated):
        known.authenticate(f"Bearer {old}")
    assert known.authenticate(f"Bearer {new}").name == own_name()


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 987_654)
    assert own_name() == "uid 987654"
