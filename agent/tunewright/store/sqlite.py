"""The records in one SQLite file: durable when a call returns, readable by other processes meanwhile."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from tunewright.domain.state import Decision, TrialRecord, TuningRecord
from tunewright.ports import Clock, Conflict, Objected, Objection, PortError, Refused, no_objection

SCHEMA_VERSION = 1

BUSY_SECONDS = 5.0
"""How long another process' write is waited for."""

_SCHEMA = (
    "CREATE TABLE tunewright_schema (version INTEGER NOT NULL)",
    f"INSERT INTO tunewright_schema VALUES ({SCHEMA_VERSION})",
    # A deleted tuning keeps its row without a record: its versions go on counting, so that an old reader
    # can't take a new tuning of the same name for the one it read.
    "CREATE TABLE tunings (name TEXT PRIMARY KEY, version INTEGER NOT NULL, saved_at REAL NOT NULL, record TEXT)",
    "CREATE TABLE trials (tuning TEXT NOT NULL, id TEXT NOT NULL, number INTEGER NOT NULL, saved_at REAL NOT NULL,"
    " record TEXT NOT NULL, PRIMARY KEY (tuning, id))",
    "CREATE TABLE decisions (number INTEGER PRIMARY KEY AUTOINCREMENT, tuning TEXT NOT NULL, saved_at REAL NOT NULL,"
    " record TEXT NOT NULL)",
    "CREATE INDEX decisions_of_tuning ON decisions (tuning, number)",
)

_Record = TypeVar("_Record", bound=BaseModel)


class SqliteStore:
    """Implements `ports.Store`; safe to use from several threads, and from several processes by optimistic versions.

    Raises `Refused` for a file that is not a sound store (it is left as it is), `PortError` for a full disk or a
    store that is busy for too long: then nothing was written.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._file: tuple[int, int] | None = None  # until it is open
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"can't make the directory of {path} ({error.strerror}); use another --state") from error
        with self._errors():
            self._connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            with self._errors():
                self._open()
            self._file = _identity(path)
        except (Refused, PortError):
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def names(self) -> list[str]:
        """Names of all tunings, sorted."""
        rows = self._read("SELECT name FROM tunings WHERE record IS NOT NULL ORDER BY name")
        return [row[0] for row in rows]

    def load(self, name: str) -> TuningRecord | None:
        """The tuning's record."""
        rows = self._read("SELECT record FROM tunings WHERE name = ? AND record IS NOT NULL", name)
        return self._parse(TuningRecord, f"tuning {name}", rows[0][0]) if rows else None

    def save(self, record: TuningRecord) -> TuningRecord:
        """Write it if its version is the stored one (0: not there yet); the record with its new version."""
        name = record.name
        with self._transaction() as connection:
            row = connection.execute("SELECT version, record FROM tunings WHERE name = ?", (name,)).fetchone()
            counted, there = (row[0], row[1] is not None) if row else (0, False)
            if record.version != (counted if there else 0):
                raise Conflict(f"the tuning {name} was written by somebody else; read it again")
            saved = record.model_copy(update={"version": counted + 1})
            connection.execute(
                "INSERT OR REPLACE INTO tunings VALUES (?, ?, ?, ?)",
                (name, saved.version, self._clock.now(), saved.model_dump_json()),
            )
        return saved

    def trials(self, name: str) -> list[TrialRecord]:
        """The tuning's trials by number."""
        rows = self._read("SELECT id, record FROM trials WHERE tuning = ? ORDER BY number, id", name)
        return [self._parse(TrialRecord, f"trial {trial} of {name}", text) for trial, text in rows]

    def save_trial(self, name: str, trial: TrialRecord) -> None:
        """Write one trial, over the one of the same id; raises `Conflict` when the tuning was deleted."""
        with self._transaction() as connection:
            if not _is_there(connection, name):
                raise Conflict(f"the tuning {name} is not there (any more); read again")
            connection.execute(
                "INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?)",
                (name, trial.id, trial.number, self._clock.now(), trial.model_dump_json()),
            )

    def clear_trials(self, name: str) -> None:
        """Forget the trials of a tuning that starts anew."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM trials WHERE tuning = ?", (name,))

    def decide(self, name: str, decision: Decision, unless: Objection = no_objection) -> None:
        """Keep a person's decision; raises `Refused` when there is no such tuning, `Objected` by `unless`."""
        with self._transaction() as connection:
            if not _is_there(connection, name):
                found = connection.execute("SELECT name FROM tunings WHERE record IS NOT NULL ORDER BY name")
                there = ", ".join(row[0] for row in found) or "none"
                raise Refused(f"there is no tuning {name} in {self._path}; there are: {there}")
            rows = connection.execute("SELECT record FROM decisions WHERE tuning = ? ORDER BY number", (name,))
            kept = [self._parse(Decision, f"a decision on {name}", row[0]) for row in rows]
            if (why := unless(kept)) is not None:
                raise Objected(why)
            connection.execute(
                "INSERT INTO decisions (tuning, saved_at, record) VALUES (?, ?, ?)",
                (name, self._clock.now(), decision.model_dump_json()),
            )

    def decisions(self, name: str) -> list[Decision]:
        """Every decision ever taken on this tuning, oldest first."""
        rows = self._read("SELECT record FROM decisions WHERE tuning = ? ORDER BY number", name)
        return [self._parse(Decision, f"a decision on {name}", row[0]) for row in rows]

    def delete(self, name: str) -> None:
        """Forget the tuning and all that belongs to it."""
        with self._transaction() as connection:
            connection.execute("UPDATE tunings SET record = NULL WHERE name = ?", (name,))
            connection.execute("DELETE FROM trials WHERE tuning = ?", (name,))
            connection.execute("DELETE FROM decisions WHERE tuning = ?", (name,))

    def _open(self) -> None:
        """Look before anything is changed: a file that is not ours stays as it is."""
        connection = self._connection
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "tunewright_schema" not in tables:
            raise Refused(f"{self._path} is a database of something else; use another --state")
        if tables:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise self._corrupt(found)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            self._migrate()

    def _migrate(self) -> None:
        """Make the tables, unless another process just did. Later schemas are brought up to date here."""
        connection = self._connection
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'tunewright_schema'").fetchone()
        if not known:
            for statement in _SCHEMA:
                connection.execute(statement)
            return
        row = connection.execute("SELECT version FROM tunewright_schema").fetchone()
        if row is None or row[0] != SCHEMA_VERSION:
            found = row[0] if row else "none"
            raise Refused(
                f"{self._path} has schema {found}, and this Tunewright knows {SCHEMA_VERSION}; "
                "use the version that wrote it, or another --state"
            )

    def _still_there(self) -> None:
        """What is written to a file that was removed is lost with this process, and nobody else sees it."""
        if self._file is not None and _identity(self._path) != self._file:
            raise Refused(
                f"{self._path} was removed or replaced while it was in use, so nothing more is kept in it. "
                "Put it back from a backup, or begin again with the same command"
            )

    def _read(self, statement: str, *values: str) -> Sequence[tuple[str, ...]]:
        with self._lock, self._errors():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it, durably, or nothing."""
        with self._lock, self._errors():
            self._still_there()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has ended the transaction by itself after a full disk.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as ours: which of them another try may help, and what to do."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = (error.sqlite_errorcode or 0) & 0xFF if hasattr(error, "sqlite_errorcode") else 0
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._corrupt(str(error)) from error
            if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
                raise Refused(f"can't write {self._path} ({error}); check its rights and its directory's") from error
            if code == sqlite3.SQLITE_FULL:
                raise PortError(f"nothing was written to {self._path}: {error}; free space there") from error
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise PortError(f"{self._path} was busy for {BUSY_SECONDS:g}s; is a backup holding it?") from error
            raise PortError(f"{self._path} can't be used: {error}; look at its disk") from error

    def _parse(self, kind: type[_Record], what: str, text: str) -> _Record:
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            raise Refused(
                f"{what} in {self._path} can't be read by this Tunewright ({error.errors()[0]['msg']}); "
                "use the version that wrote it"
            ) from error

    def _corrupt(self, what: str) -> Refused:
        return Refused(
            f"{self._path} is damaged or no SQLite file ({what}); it was left as it is. "
            "Restore it from a backup, or use another --state"
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_there(connection: sqlite3.Connection, name: str) -> bool:
    found = connection.execute("SELECT 1 FROM tunings WHERE name = ? AND record IS NOT NULL", (name,))
    return found.fetchone() is not None
