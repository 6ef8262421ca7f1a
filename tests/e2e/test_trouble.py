"""A full disk, a damaged store, a second agent, a folder that can't be written: told clearly, and nothing is lost."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agents import NAME, answers, clients, new_box

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write until the disk is full."""
    file = folder / "ballast"
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"x" * 4096)
        except OSError:
            return file


def test_a_disk_that_is_full_at_the_start_is_refused(tmp_path: Path) -> None:
    with new_box(tmp_path) as box, small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        out = box.command("tune", str(box.file), code=6, state=disk / "state")
        assert "free space" in out or "No space left" in out
        assert "Traceback" not in out
        assert box.processes() == []


def test_a_disk_that_fills_up_meanwhile_is_waited_for_and_nothing_is_lost(tmp_path: Path) -> None:
    with new_box(tmp_path) as box, small_disk(tmp_path / "disk", "32m") as disk:
        box.state = disk / "state"
        agent = box.tune()
        agent.until(lambda: answers(box.url), "production answers")
        with clients(box) as traffic:
            agent.until(lambda: any(t.phase == "Done" for t in box.trials()), "the baseline is measured")
            before = {t.id: t.model_dump_json() for t in box.trials() if t.phase == "Done"}
            ballast = fill(disk)
            agent.until(lambda: "Trying again" in agent.output(), "the full disk is told")
            assert "Traceback" not in agent.output()
            assert answers(box.url), "production serves on a full disk"
            ballast.unlink()
            agent.until(lambda: box.phase() == "AwaitingApproval", "it goes on")
            now = {t.id: t.model_dump_json() for t in box.trials()}
            assert before.items() <= now.items()
            assert agent.interrupt() == 130
            assert traffic.end()["failures"] == {}, agent.output()
        box.command("stop", str(box.file))
        assert box.processes() == []


def test_a_damaged_store_a_second_agent_and_a_folder_without_rights(tmp_path: Path) -> None:
    with new_box(tmp_path) as box:
        agent = box.tune()
        agent.until(lambda: answers(box.url) and box.phase() == "Profiling", "production is whole")
        second = box.command("tune", str(box.file), code=2)
        assert f"is held by process {agent.process.pid}" in second
        assert "is held by process" in box.command("stop", str(box.file), code=2)
        assert answers(box.url)
        assert agent.interrupt() == 130

        store = box.state / "store.sqlite"
        for side in ("-wal", "-shm"):
            Path(f"{store}{side}").unlink(missing_ok=True)
        kept = tmp_path / "kept.sqlite"
        shutil.copy(store, kept)
        damaged = store.read_bytes()[:4096] + os.urandom(8192)
        store.write_bytes(damaged)
        for words in (["tune", str(box.file)], ["show"], ["approve", NAME]):
            told = box.command(*words, code=2)
            assert "is damaged" in told, told
            assert "Restore it from a backup" in told
            assert "Traceback" not in told
        assert store.read_bytes() == damaged, "it must be left as it is"
        assert answers(box.url), "production does not depend on the store"
        shutil.copy(kept, store)
        assert "Profiling" in box.command("show", NAME)
        box.command("stop", str(box.file))
        assert box.processes() == []


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    with new_box(tmp_path) as box:
        if os.geteuid() == 0:  # root may write whatever the mode says: a file system that nobody may write does it
            with small_disk(tmp_path / "disk", "64k") as disk:
                subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
                out = box.command("tune", str(box.file), code=2, state=disk / "state")
        else:
            locked = tmp_path / "locked"
            locked.mkdir(mode=0o500)
            out = box.command("tune", str(box.file), code=2, state=locked / "state")
        assert "use another --state" in out
        assert "Traceback" not in out
        assert box.processes() == []
