"""What is particular to SQLite: durability, damage, full disks, other people's files, the lock."""

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tunings import tuning

from tunewright.domain.state import Decision, TuningRecord
from tunewright.ports import PortError, Refused
from tunewright.store.lock import agent_lock, lock_file
from tunewright.store.sqlite import SqliteStore


class FakeClock:
    """Of its own, since child processes import this file: the whole world would take them seconds."""

    def now(self) -> float:
        return 1_000_000.0

    def monotonic(self) -> float:
        return 0.0


def record(sentence: str = "") -> TuningRecord:
    made = tuning()
    return TuningRecord(tuning=made, spec_hash=made.spec.spec_hash, phase_since=0.0, sentence=sentence)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tunewright.db"


def opened(path: Path) -> SqliteStore:
    return SqliteStore(path, FakeClock())


def test_what_was_saved_is_there_after_a_restart(path: Path) -> None:
    store = opened(path)
    saved = store.save(record())
    store.decide("demo", Decision(action="approve", at=1, by="ada"))
    store.close()
    again = opened(path)
    assert again.load("demo") == saved
    assert len(again.decisions("demo")) == 1
    again.close()


def test_what_was_saved_survives_a_kill(path: Path) -> None:
    """The process dies right after the call returned, without closing anything."""
    script = f"""
import os, signal, sys
sys.path[:0] = {[p for p in sys.path if p]!r}
from pathlib import Path
from test_store_sqlite import opened, record
opened(Path({str(path)!r})).save(record("durable"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run([sys.executable, "-c", script], env=here, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    store = opened(path)
    loaded = store.load("demo")
    store.close()
    assert loaded is not None
    assert loaded.sentence == "durable"


def test_the_file_is_in_the_durable_modes(path: Path) -> None:
    store = opened(path)
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


@pytest.mark.parametrize(
    "content", [b"this is no database, but somebody's notes\n" * 50, b"SQLite format 3\0" + b"\7" * 5000]
)
def test_a_damaged_file_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"tunewright.db is damaged or no SQLite file.*left as it is.*backup"):
        opened(path)
    assert path.read_bytes() == content


def test_damage_inside_is_found_at_the_start(path: Path) -> None:
    store = opened(path)
    store.save(record("x" * 20000))
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:8192] = b"\xff" * 4096
    path.write_bytes(content)
    with pytest.raises(Refused, match="damaged"):
        opened(path)
    assert path.read_bytes() == bytes(content)


def test_somebody_elses_database_is_refused_and_left_as_it_is(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE accounts (id INTEGER)")
    other.commit()
    other.close()
    before = path.read_bytes()
    with pytest.raises(Refused, match="database of something else"):
        opened(path)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(path: Path) -> None:
    store = opened(path)
    store._connection.execute("UPDATE tunewright_schema SET version = 99")
    store.close()
    with pytest.raises(Refused, match="has schema 99, and this Tunewright knows 1"):
        opened(path)


def test_a_record_of_a_newer_version_is_refused_by_name(path: Path) -> None:
    store = opened(path)
    store.save(record())
    store._connection.execute("""UPDATE tunings SET record = '{"futureField": 1}'""")
    with pytest.raises(Refused, match=r"tuning demo in .*tunewright.db can't be read"):
        store.load("demo")
    store.close()


def test_a_full_disk_writes_nothing_and_loses_nothing(path: Path) -> None:
    store = opened(path)
    saved = store.save(record("before"))
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(PortError, match=r"nothing was written to .*full; free space there"):
        store.save(saved.model_copy(update={"sentence": "x" * 1_000_000}))
    assert store.load("demo") == saved
    store._connection.execute("PRAGMA max_page_count = 100000")
    assert store.save(saved.model_copy(update={"sentence": "after"})).version == 2
    store.close()


def test_a_busy_store_is_worth_another_try(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunewright.store.sqlite.BUSY_SECONDS", 0.05)
    store = opened(path)
    saved = store.save(record())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(PortError, match="was busy"):
        store.save(saved)
    assert store.load("demo") == saved  # reading goes on
    other.execute("ROLLBACK")
    other.close()
    assert store.save(saved).version == 2
    store.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_written_to_a_file_that_was_removed(path: Path, replaced: bool) -> None:
    store = opened(path)
    saved = store.save(record())
    for left in path.parent.glob(f"{path.name}*"):
        left.unlink()
    if replaced:
        opened(path).close()
    with pytest.raises(Refused, match="was removed or replaced while it was in use"):
        store.save(saved)
    store.close()
    assert path.exists() is replaced


def test_a_directory_that_can_t_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="use another --state"):
        opened(tmp_path / "file" / "tunewright.db")
    with pytest.raises(Refused, match="can't write"):
        opened(tmp_path)


def _decide(path: str, count: int) -> None:
    store = opened(Path(path))
    for _ in range(count):
        store.decide("demo", Decision(action="approve", at=1, by=str(os.getpid())))
    store.close()


def test_decisions_of_other_processes_are_all_kept_while_the_loop_writes(path: Path) -> None:
    store = opened(path)
    current = store.save(record())
    context = multiprocessing.get_context("spawn")
    people = [context.Process(target=_decide, args=(str(path), 10)) for _ in range(2)]
    for person in people:
        person.start()
    for _ in range(30):
        current = store.save(current)
    for person in people:
        person.join(60)
    assert [person.exitcode for person in people] == [0, 0]
    assert len(store.decisions("demo")) == 20
    assert current.version == 31
    store.close()


def test_a_second_agent_is_refused_and_told_who_holds_it(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    read, write = context.Pipe(duplex=False)
    first = context.Process(target=_hold_until, args=(str(path), write))
    first.start()
    try:
        assert read.poll(60)
        with (
            pytest.raises(Refused, match=f"is held by process {first.pid}; stop it or use another --state"),
            agent_lock(path),
        ):
            pass
        store = opened(path)  # reading, and deciding, needs no lock
        assert store.names() == []
        store.close()
    finally:
        first.kill()
        first.join(60)
    with agent_lock(path):  # the kernel let it go
        assert lock_file(path).read_text() == f"{os.getpid()}\n"


def _hold_until(path: str, ready: object) -> None:
    with agent_lock(Path(path)):
        ready.send("held")  # type: ignore[attr-defined]
        signal.pause()


def test_the_lock_is_let_go_also_after_an_error(path: Path) -> None:
    with pytest.raises(RuntimeError), agent_lock(path):
        raise RuntimeError
    with agent_lock(path):
        pass


def test_the_lock_needs_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="can't open the lock file"), agent_lock(tmp_path / "file" / "x.db"):
        pass
