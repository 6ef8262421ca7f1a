"""What every store keeps to."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tunings import tuning
from world import FakeClock

from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.state import Decision, PhaseChange, TrialPurpose, TrialRecord, TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.ports import Conflict, Objected, Refused, Store
from tunewright.store.memory import MemoryStore
from tunewright.store.sqlite import SqliteStore


def record(name: str = "demo") -> TuningRecord:
    text = tuning().model_dump(mode="json")
    made = Tuning.model_validate(text | {"metadata": {"name": name}})
    return TuningRecord(
        tuning=made,
        spec_hash=made.spec.spec_hash,
        phase_since=12.5,
        baseline=Candidate(values={"max_num_seqs": 4, "enforce_eager": True, "gpu_memory_utilization": 0.9}),
        history=(PhaseChange(at=1.0, phase=Phase.PENDING, sentence="Ünïcode, and a 'quote'."),),
    )


def trial(number: int, note: str = "") -> TrialRecord:
    candidate = Candidate(values={"max_num_seqs": number + 1})
    return TrialRecord(
        id=f"{number}-{candidate.hash}",
        number=number,
        purpose=TrialPurpose.SEARCH,
        candidate=candidate,
        reason=note,
    )


def decision(by: str = "ada") -> Decision:
    return Decision(action="approve", at=3.0, by=by, candidate="c", spec="s", baseline="b")


class StoreContract:
    """Inherited by one class per adapter, which gives `store`."""

    def test_a_new_store_is_empty(self, store: Store) -> None:
        assert store.names() == []
        assert store.load("demo") is None
        assert store.trials("demo") == []
        assert store.decisions("demo") == []

    def test_what_was_saved_is_loaded(self, store: Store) -> None:
        saved = store.save(record())
        assert saved == record().model_copy(update={"version": 1})
        assert store.load("demo") == saved

    def test_names_are_sorted(self, store: Store) -> None:
        for name in ("b", "c", "a"):
            store.save(record(name))
        assert store.names() == ["a", "b", "c"]

    def test_each_write_counts(self, store: Store) -> None:
        first = store.save(record())
        second = store.save(first.model_copy(update={"sentence": "on"}))
        assert (first.version, second.version) == (1, 2)
        assert store.load("demo") == second

    def test_an_old_version_is_refused_and_changes_nothing(self, store: Store) -> None:
        old = store.save(record())
        new = store.save(old)
        with pytest.raises(Conflict, match="demo"):
            store.save(old.model_copy(update={"sentence": "late"}))
        assert store.load("demo") == new

    def test_what_is_there_is_not_made_again(self, store: Store) -> None:
        store.save(record())
        with pytest.raises(Conflict):
            store.save(record())

    def test_what_was_deleted_is_not_written_again_by_an_old_reader(self, store: Store) -> None:
        old = store.save(record())
        store.delete("demo")
        with pytest.raises(Conflict):
            store.save(old)
        new = store.save(record())
        assert new.version > old.version
        with pytest.raises(Conflict):
            store.save(old)
        assert store.load("demo") == new

    def test_trials_come_by_number_and_are_written_over(self, store: Store) -> None:
        store.save(record())
        for number in (10, 2, 1):
            store.save_trial("demo", trial(number))
        store.save_trial("demo", trial(2, "again"))
        assert store.trials("demo") == [trial(1), trial(2, "again"), trial(10)]

    def test_trials_belong_to_one_tuning(self, store: Store) -> None:
        for name in ("a", "b"):
            store.save(record(name))
            store.save_trial(name, trial(1, name))
        store.clear_trials("a")
        assert store.trials("a") == []
        assert store.trials("b") == [trial(1, "b")]

    def test_a_trial_of_no_tuning_is_a_conflict(self, store: Store) -> None:
        """It was deleted while the trial ran."""
        with pytest.raises(Conflict, match="demo"):
            store.save_trial("demo", trial(1))

    def test_every_decision_is_kept_in_order(self, store: Store) -> None:
        store.save(record())
        for by in ("ada", "bob", "ada"):
            store.decide("demo", decision(by))
        assert [d.by for d in store.decisions("demo")] == ["ada", "bob", "ada"]
        assert store.decisions("demo")[0] == decision("ada")

    def test_a_decision_does_not_touch_the_record(self, store: Store) -> None:
        """So that it can't be lost to, or stop, the loop that writes at the same moment."""
        saved = store.save(record())
        store.decide("demo", decision())
        assert store.save(saved).version == 2

    def test_a_decision_on_nothing_is_refused(self, store: Store) -> None:
        store.save(record("other"))
        with pytest.raises(Refused, match=r"no tuning demo.*other"):
            store.decide("demo", decision())

    def test_delete_forgets_all_and_may_be_repeated(self, store: Store) -> None:
        store.save(record())
        store.save_trial("demo", trial(1))
        store.decide("demo", decision())
        store.delete("demo")
        store.delete("demo")
        assert store.names() == []
        assert store.load("demo") is None
        store.save(record())
        assert store.trials("demo") == []
        assert store.decisions("demo") == []

    def test_of_many_writers_each_version_has_one(self, store: Store) -> None:
        store.save(record())
        won: list[int] = []

        def write() -> None:
            for _ in range(10):
                current = store.load("demo")
                assert current is not None
                try:
                    won.append(store.save(current).version)
                except Conflict:
                    continue

        _together(write, 4)
        assert len(won) == len(set(won))
        final = store.load("demo")
        assert final is not None
        assert final.version == max(won) == len(won) + 1

    def test_an_objection_is_asked_of_all_that_was_decided_by_then(self, store: Store) -> None:
        store.save(record())
        store.decide("demo", decision("ada"), lambda kept: None)
        with pytest.raises(Objected, match="ada was first"):
            store.decide("demo", decision("bob"), lambda kept: f"{kept[0].by} was first")
        assert [d.by for d in store.decisions("demo")] == ["ada"]

    def test_of_many_at_once_who_object_to_others_one_is_kept(self, store: Store) -> None:
        store.save(record())
        objected: list[str] = []

        def once() -> None:
            try:
                store.decide("demo", decision(), lambda kept: "there is one" if kept else None)
            except Objected as objection:
                objected.append(str(objection))

        _together(once, 6)
        assert len(store.decisions("demo")) == 1
        assert objected == ["there is one"] * 5

    def test_no_decision_of_many_is_lost(self, store: Store) -> None:
        store.save(record())
        _together(lambda: [store.decide("demo", decision()) for _ in range(5)], 4)
        assert len(store.decisions("demo")) == 20


def _together(work: Callable[[], object], count: int) -> None:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        opened = SqliteStore(tmp_path / "state" / "tunewright.db", FakeClock())
        yield opened
        opened.close()


class TestSqliteStoreOverTwoConnections(StoreContract):
    """Each call by another connection, as by two processes."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        both = [SqliteStore(tmp_path / "tunewright.db", FakeClock()) for _ in range(2)]
        yield _Alternating(both)  # type: ignore[misc]
        for one in both:
            one.close()


class _Alternating:
    def __init__(self, stores: list[SqliteStore]) -> None:
        self._stores = stores
        self._next = 0

    def __getattr__(self, name: str) -> object:
        self._next += 1
        return getattr(self._stores[self._next % len(self._stores)], name)
