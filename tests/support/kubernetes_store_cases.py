"""What the store on custom resources promises beyond the port's contract; run against a fake and a real API server."""

import threading
from functools import partial
from typing import Any

import pytest
from restapi import BASELINE, START, WINNER, trials, waiting
from tunings import tuning
from world import BEST, FakeClock, World

from cluster import wait_for
from tunewright.controller.decisions import bound, decided_before
from tunewright.domain.phases import Phase
from tunewright.domain.state import Decision, TuningRecord
from tunewright.domain.step import update
from tunewright.domain.tuning import Tuning
from tunewright.kube.client import Json, Kube
from tunewright.kube.resources import EVENTS, TRIALS, TUNINGS
from tunewright.ports import Conflict, Objected, Refused
from tunewright.store.kubernetes import KubernetesStore

NAME = "demo"


def manifest(asked: Tuning | None = None, **spec: Any) -> Json:
    """A Tuning as a person writes it."""
    document = (asked or tuning()).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {"metadata": {"name": NAME}, "spec": document["spec"] | spec}


def fresh(store: KubernetesStore) -> TuningRecord:
    record = store.load(NAME)
    assert record is not None
    return record


def decision(by: str, at: float = 1.5) -> Decision:
    return Decision(action="approve", at=at, by=by, reason="looks good", candidate="c", spec="s", baseline="b")


class KubernetesStoreCases:
    """Inherit it beside fixtures `kube` and `namespace`."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def store(self, kube: Kube, namespace: str, clock: FakeClock) -> KubernetesStore:
        return KubernetesStore(kube, namespace, clock)

    def applied(self, kube: Kube, namespace: str, **spec: Any) -> None:
        kube.create(TUNINGS, manifest(**spec), namespace)

    def status(self, kube: Kube, namespace: str) -> Json:
        return kube.get(TUNINGS, NAME, namespace).get("status") or {}

    def condition(self, kube: Kube, namespace: str, kind: str) -> Json:
        (found,) = [c for c in self.status(kube, namespace)["conditions"] if c["type"] == kind]
        return found

    def events(self, kube: Kube, namespace: str) -> list[Json]:
        return kube.list(EVENTS, namespace, fields=f"involvedObject.name={NAME}").items

    def edit(self, kube: Kube, namespace: str, **spec: Any) -> None:
        kube.patch(TUNINGS, NAME, {"spec": spec}, namespace)

    # --- records ---

    def test_a_tuning_that_was_applied_is_taken_up(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        self.applied(kube, namespace)
        record = fresh(store)
        assert (record.version, record.phase, record.tuning) == (0, Phase.PENDING, tuning())
        assert record.spec_hash == tuning().spec.spec_hash
        assert store.names() == [NAME]
        saved = store.save(record)
        assert saved.version > 0
        assert store.load(NAME) == saved
        assert self.status(kube, namespace)["phase"] == "Pending"

    def test_the_whole_story(self, kube: Kube, namespace: str) -> None:
        world = World()
        store = KubernetesStore(kube, namespace, world.clock)
        world.store = store  # type: ignore[assignment]
        self.applied(kube, namespace)
        world.run(until=lambda record: record.phase is Phase.AWAITING_APPROVAL)
        status = self.status(kube, namespace)
        assert (status["approval"], status["trials"], status["best"]) == ("Waiting", "2/4", "1200 output tokens/s")
        assert status["candidate"] == BEST.hash
        assert self.condition(kube, namespace, "Approved")["status"] == "False"
        assert self.condition(kube, namespace, "Reconciling")["status"] == "True"

        store.decide(NAME, bound(world.record(), "approve", at=world.clock.now(), by="ana", reason="fine"))
        record = world.run()
        status = self.status(kube, namespace)
        assert (record.phase, status["phase"], status["approval"]) == (Phase.PROMOTED, "Promoted", "Approved")
        assert status["gain"].startswith("+200")
        assert status["decisions"][0]["by"] == "ana"
        true = {c["type"] for c in status["conditions"] if c["status"] == "True"}
        assert true == {"Ready", "CanaryHealthy", "Approved", "Promoted"}
        assert "ana" in self.condition(kube, namespace, "Approved")["message"]

        told = self.events(kube, namespace)
        changes = [(change.phase.value, change.sentence) for change in record.history]
        assert sorted((e["reason"], e["message"]) for e in told if e["reason"] != "Decision") == sorted(changes)
        assert [e["message"] for e in told if e["reason"] == "Decision"] == ["approve by ana: fine"]

        again = KubernetesStore(kube, namespace, world.clock)
        assert again.load(NAME) == record
        assert again.trials(NAME) == store.trials(NAME)
        assert len(kube.list(TRIALS, namespace).items) == len(store.trials(NAME))

    def test_a_write_of_an_old_version_is_a_conflict(
        self, store: KubernetesStore, kube: Kube, namespace: str, clock: FakeClock
    ) -> None:
        other = KubernetesStore(kube, namespace, clock)
        store.save(waiting())
        mine, theirs = fresh(store), fresh(other)
        store.save(update(mine, sentence="mine"))
        with pytest.raises(Conflict):
            other.save(update(theirs, sentence="theirs"))
        assert fresh(other).sentence == "mine"

    def test_a_decision_or_an_edit_in_between_is_no_conflict(
        self, store: KubernetesStore, kube: Kube, namespace: str
    ) -> None:
        self.applied(kube, namespace)
        record = store.save(fresh(store))
        store.decide(NAME, decision("ana"))
        self.edit(kube, namespace, budget={"trials": 9})
        store.save(update(record, sentence="went on"))
        assert store.decisions(NAME) == [decision("ana")]
        after = fresh(store)
        assert (after.sentence, after.tuning.spec.budget.trials) == ("went on", 9)
        status = self.status(kube, namespace)
        assert status["observedGeneration"] == 1, "the record that was written knew nothing of the edit"
        store.save(after)
        assert self.status(kube, namespace)["observedGeneration"] == 2

    def test_the_spec_is_never_written_over(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        self.applied(kube, namespace)
        record = fresh(store)
        self.edit(kube, namespace, suspend=True)
        store.save(record)
        assert fresh(store).tuning.spec.suspend is True

    def test_a_deleted_tuning_is_not_brought_back(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        self.applied(kube, namespace)
        record = fresh(store)
        kube.delete(TUNINGS, NAME, namespace)
        with pytest.raises(Conflict):
            store.save(record)
        with pytest.raises(Conflict):
            store.save(update(record, version=7))
        assert store.names() == []

    @pytest.mark.parametrize("taken_up", [False, True])
    def test_a_new_tuning_of_the_same_name_is_another(
        self, store: KubernetesStore, kube: Kube, namespace: str, clock: FakeClock, taken_up: bool
    ) -> None:
        self.applied(kube, namespace)
        old = store.save(fresh(store)) if taken_up else fresh(store)
        kube.delete(TUNINGS, NAME, namespace)
        self.applied(kube, namespace)
        another = KubernetesStore(kube, namespace, clock)
        if taken_up:
            another.save(fresh(another))
        with pytest.raises(Conflict):
            store.save(old)

    # --- specs that the schema could not refuse ---

    def test_an_invalid_spec_is_stalled_with_the_field_named(
        self, store: KubernetesStore, kube: Kube, namespace: str, clock: FakeClock
    ) -> None:
        self.applied(kube, namespace, confirm={"minRounds": 5, "maxRounds": 3})
        assert store.load(NAME) is None
        (fault,) = store.acknowledge(NAME)
        assert "spec.confirm" in fault
        assert "minRounds (5) is above maxRounds (3)" in fault
        stalled = self.condition(kube, namespace, "Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "InvalidSpec")
        assert fault in stalled["message"]
        assert self.condition(kube, namespace, "Ready")["status"] == "False"
        assert [e["type"] for e in self.events(kube, namespace)] == ["Warning"]
        version = kube.get(TUNINGS, NAME, namespace)["metadata"]["resourceVersion"]
        clock.advance(3600)
        assert store.acknowledge(NAME) == [fault]
        assert len(self.events(kube, namespace)) == 1
        assert kube.get(TUNINGS, NAME, namespace)["metadata"]["resourceVersion"] == version, "it was said already"

        self.edit(kube, namespace, confirm={"minRounds": 3, "maxRounds": 3})
        assert store.acknowledge(NAME) == []
        store.save(fresh(store))
        assert self.condition(kube, namespace, "Stalled")["status"] == "False"

    def test_the_last_valid_spec_stays_in_force(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        self.applied(kube, namespace)
        record = store.save(fresh(store))
        self.edit(kube, namespace, confirm={"minRounds": 5, "maxRounds": 3})
        assert store.load(NAME) == record
        assert len(store.acknowledge(NAME)) == 1
        stalled = self.condition(kube, namespace, "Stalled")
        assert (stalled["reason"], stalled["observedGeneration"]) == ("InvalidSpec", 2)
        assert "The last valid spec is in force" in stalled["message"]
        store.save(update(record, sentence="still at work"))
        assert self.condition(kube, namespace, "Stalled")["status"] == "True", "a write of the record keeps it"
        self.edit(kube, namespace, confirm={"minRounds": 3})
        assert store.acknowledge(NAME) == []
        assert self.condition(kube, namespace, "Stalled")["status"] == "False"

    def test_an_edit_at_rest_is_acknowledged(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        self.applied(kube, namespace)
        store.save(fresh(store))
        self.edit(kube, namespace, budget={"trials": 9})
        assert store.acknowledge(NAME) == []
        assert self.status(kube, namespace)["observedGeneration"] == 2

    # --- trials and decisions ---

    def test_trials_belong_to_their_tuning(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        store.save(waiting())
        for trial in trials():
            store.save_trial(NAME, trial)
        store.save_trial(NAME, trials()[0])
        assert store.trials(NAME) == trials()
        found = {each["metadata"]["name"]: each for each in kube.list(TRIALS, namespace).items}
        assert len(found) == len(trials())
        first = found[f"{NAME}-000-{BASELINE.hash}"]
        (owner,) = first["metadata"]["ownerReferences"]
        assert owner["uid"] == kube.get(TUNINGS, NAME, namespace)["metadata"]["uid"]
        assert first["spec"]["candidate"] == dict(BASELINE.values)
        assert (first["status"]["phase"], first["status"]["outcome"]) == ("Done", "complete")
        assert found[f"{NAME}-002-{WINNER.hash}"]["spec"]["candidate"] == dict(WINNER.values)
        store.clear_trials(NAME)
        assert store.trials(NAME) == []
        assert kube.list(TRIALS, namespace).items == []

    def test_an_odd_id_gets_a_name_that_is_allowed(self, store: KubernetesStore) -> None:
        store.save(waiting())
        odd = update(trials()[0], id="Trial #1/ü")
        store.save_trial(NAME, odd)
        assert store.trials(NAME) == [odd]

    def test_a_trial_without_its_tuning_is_a_conflict(self, store: KubernetesStore) -> None:
        with pytest.raises(Conflict):
            store.save_trial(NAME, trials()[0])

    def test_trials_of_an_earlier_tuning_are_not_its_own(
        self, store: KubernetesStore, kube: Kube, namespace: str
    ) -> None:
        store.save(waiting())
        store.save_trial(NAME, trials()[0])
        # As when the garbage collector is late.
        kube.delete(TUNINGS, NAME, namespace, propagation="Orphan")
        wait_for(lambda: not kube.list(TUNINGS, namespace).items, "the Tuning is gone, its Trials are not")
        self.applied(kube, namespace)
        fresh(store)
        assert len(kube.list(TRIALS, namespace).items) == 1
        assert store.trials(NAME) == []

    def test_deciding_at_once_loses_nothing(
        self, store: KubernetesStore, kube: Kube, namespace: str, clock: FakeClock
    ) -> None:
        store.save(waiting())
        stores = [KubernetesStore(kube, namespace, clock) for _ in range(3)]
        errors: list[BaseException] = []

        def decide(each: KubernetesStore, who: str) -> None:
            try:
                for turn in range(2):
                    each.decide(NAME, decision(who, at=1000.25 + turn))
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=decide, args=(each, f"p{i}")) for i, each in enumerate(stores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        taken = store.decisions(NAME)
        assert sorted((d.by, d.at) for d in taken) == [(f"p{i}", 1000.25 + turn) for i in range(3) for turn in (0, 1)]

    def test_of_many_who_approve_at_once_one_is_kept_and_the_others_are_told(
        self, store: KubernetesStore, kube: Kube, namespace: str, clock: FakeClock
    ) -> None:
        record = store.save(waiting())
        stores = [KubernetesStore(kube, namespace, clock) for _ in range(4)]
        told: list[str] = []

        def approve(each: KubernetesStore, who: str) -> None:
            yes = bound(record, "approve", at=START + 1, by=who)
            try:
                each.decide(NAME, yes, partial(decided_before, record, yes))
            except Objected as objection:
                told.append(str(objection))

        threads = [threading.Thread(target=approve, args=(each, f"p{i}")) for i, each in enumerate(stores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (kept,) = store.decisions(NAME)
        assert told == [f"{kept.by} approved it already"] * 3

    def test_deciding_on_nothing_is_refused(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        self.applied(kube, namespace)
        with pytest.raises(Refused, match=f"no tuning other.*{NAME}"):
            store.decide("other", decision("ana"))

    def test_a_decision_may_come_before_the_record(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        self.applied(kube, namespace)
        record = fresh(store)
        store.decide(NAME, decision("ana"))
        store.save(record)
        assert store.decisions(NAME) == [decision("ana")]

    def test_forgetting_forgets_all(self, store: KubernetesStore, kube: Kube, namespace: str) -> None:
        store.save(waiting())
        store.save_trial(NAME, trials()[0])
        store.decide(NAME, decision("ana"))
        store.delete(NAME)
        assert (store.load(NAME), store.trials(NAME), store.decisions(NAME)) == (None, [], [])
        store.delete(NAME)
        store.save(waiting())
        assert (store.trials(NAME), store.decisions(NAME)) == ([], [])
