"""The store on custom resources, against a fake API server: its own cases, faults, and the size of status."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from fake_kube import Drop, FakeKube, Request, client_of, fake_kube, refuse
from kubernetes_store_cases import NAME, KubernetesStoreCases, decision, fresh, manifest
from restapi import trials, waiting
from tunings import tuning
from world import FakeClock

from tunewright.domain.answers import Answer
from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import Estimate
from tunewright.domain.phases import Phase
from tunewright.domain.state import (
    ConfirmStatus,
    Decision,
    Finalist,
    Gain,
    PhaseChange,
    PromotionState,
    TrialOutcome,
    TrialPhase,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.domain.step import update
from tunewright.domain.tuning import Tuning
from tunewright.domain.verdict import Outcome, Reading, Verdict
from tunewright.kube.client import Kube
from tunewright.kube.errors import NotFound
from tunewright.kube.resources import EVENTS, TRIALS, TUNINGS
from tunewright.ports import Conflict, Objected, PortError, Refused
from tunewright.store.kubernetes import KubernetesStore
from tunewright.store.kubernetes_pass import Pass
from tunewright.store.kubernetes_status import conditions, pack, trial_status, tuning_status, unpack
from tunewright.store.kubernetes_trials import TrialMemory

NS = "team"
PATH = TUNINGS.path(NS, NAME)


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with fake_kube() as running:
        yield running


@pytest.fixture
def kube(fake: FakeKube) -> Iterator[Kube]:
    with client_of(fake.url) as client:
        yield client


@pytest.fixture
def namespace() -> str:
    return NS


@pytest.fixture
def store(kube: Kube) -> KubernetesStore:
    return KubernetesStore(kube, NS, FakeClock())


class TestKubernetesStore(KubernetesStoreCases):
    """The cases that the real API server passes too."""


def raising(error: Exception, method: str, part: str, times: int = 1) -> Any:
    left = [times]

    def hook(request: Request) -> None:
        if request.method == method and part in request.path and left[0]:
            left[0] -= 1
            raise error

    return hook


def test_what_a_person_ended_is_told_without_a_warning(kube: Kube, store: KubernetesStore) -> None:
    record = store.save(waiting(history=()))
    changes = [
        PhaseChange(at=1.0, phase=Phase.ROLLING_BACK, sentence="By the guard."),
        PhaseChange(at=2.0, phase=Phase.ROLLED_BACK, sentence="Back."),
        PhaseChange(at=3.0, phase=Phase.ROLLING_BACK, sentence="By ana.", by="ana"),
        PhaseChange(at=4.0, phase=Phase.ROLLED_BACK, sentence="Back again."),
    ]
    for count, change in enumerate(changes, 1):
        record = store.save(update(record, phase=change.phase, history=tuple(changes[:count])))
    told = {event["message"]: event["type"] for event in kube.list(EVENTS, NS).items}
    warns = ("By the guard.", "Back.")
    assert told == {c.sentence: "Warning" if c.sentence in warns else "Normal" for c in changes}


# --- faults ---


def test_a_write_whose_answer_got_lost_is_read_again(fake: FakeKube, kube: Kube, store: KubernetesStore) -> None:
    record = store.save(waiting(history=()))
    fake.after = raising(Drop(), "PUT", "/status")
    change = PhaseChange(at=1.0, phase=Phase.REJECTED, sentence="No.")
    with pytest.raises(Conflict):
        store.save(update(record, sentence="once", history=(change,)))
    again = fresh(store)
    assert again.sentence == "once"
    store.save(update(again, sentence="twice"))
    assert [event["reason"] for event in kube.list(EVENTS, NS).items] == ["Rejected"]


def test_a_decision_whose_answer_got_lost_is_kept_once(fake: FakeKube, store: KubernetesStore) -> None:
    store.save(waiting())
    fake.after = raising(Drop(), "PUT", "/status")
    store.decide(NAME, decision("ana"))
    assert store.decisions(NAME) == [decision("ana")]
    store.decide(NAME, decision("ana"))
    assert len(store.decisions(NAME)) == 2, "said twice, it is kept twice"


def test_others_who_write_all_the_time_are_told_of(fake: FakeKube, store: KubernetesStore) -> None:
    record = store.save(waiting())
    fake.before = raising(refuse(409, "Conflict"), "PUT", "/status", times=10**6)
    with pytest.raises(PortError, match="all the time"):
        store.decide(NAME, decision("ana"))
    with pytest.raises(PortError, match="all the time"):
        store.save(record)
    assert fake.count("PUT") < 100


def test_a_trial_that_was_made_but_not_written_is_not_there_yet(fake: FakeKube, store: KubernetesStore) -> None:
    """Killed between the two writes: the next pass writes it again, under the same name."""
    store.save(waiting())
    patches = iter([refuse(404, "NotFound"), Drop(), Drop(), Drop(), Drop()])

    def before(request: Request) -> None:
        if request.method == "PATCH" and (fault := next(patches, None)):
            raise fault

    fake.before = before
    with pytest.raises(PortError):
        store.save_trial(NAME, trials()[0])
    assert fake.count("POST", "/trials") == 1
    assert store.trials(NAME) == []
    store.save_trial(NAME, trials()[0])
    assert store.trials(NAME) == trials()[:1]


def test_a_name_still_held_by_an_earlier_tunings_trial_is_tried_again(
    fake: FakeKube, kube: Kube, store: KubernetesStore
) -> None:
    store.save(waiting())
    store.save_trial(NAME, trials()[0])
    with fake.changed:
        old = fake.objects.pop(PATH.strip("/"))
    kube.create(TUNINGS, manifest(), NS)
    assert old["metadata"]["uid"] != kube.get(TUNINGS, NAME, NS)["metadata"]["uid"]
    fresh(store)
    with pytest.raises(PortError, match="still being deleted"):
        store.save_trial(NAME, trials()[0])


def test_events_that_failed_are_told_with_the_next_write(fake: FakeKube, kube: Kube, store: KubernetesStore) -> None:
    fake.before = raising(refuse(403, "Forbidden"), "POST", "/events", times=10**6)
    record = store.save(waiting())
    assert kube.list(EVENTS, NS).items == []
    fake.before = lambda request: None
    record = store.save(update(record, sentence="more"))
    assert [event["reason"] for event in kube.list(EVENTS, NS).items] == ["AwaitingApproval"]
    asked = fake.count("POST", "/events")
    store.save(update(record, sentence="still more"))
    assert fake.count("POST", "/events") == asked


def test_another_process_tells_no_event_twice(kube: Kube, store: KubernetesStore) -> None:
    store.save(waiting())
    another = KubernetesStore(kube, NS, FakeClock())
    another.save(update(fresh(another), sentence="more"))
    assert len(kube.list(EVENTS, NS).items) == 1


def test_without_the_crds_it_says_so(fake: FakeKube, store: KubernetesStore) -> None:
    def before(request: Request) -> None:
        raise refuse(404, "", "404 page not found")

    fake.before = before
    with pytest.raises(NotFound, match="deploy/crds"):
        store.load(NAME)


def test_a_tuning_that_is_being_deleted_is_gone(fake: FakeKube, store: KubernetesStore) -> None:
    store.save(waiting())
    fake.objects[PATH.strip("/")]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert store.load(NAME) is None
    assert store.names() == []


@pytest.mark.parametrize("record", ["x", "H4sI", pack(tuning()), pack(waiting())[:-40]])
def test_a_record_that_can_not_be_read_is_refused_by_name(fake: FakeKube, store: KubernetesStore, record: str) -> None:
    store.save(waiting())
    fake.objects[PATH.strip("/")]["status"]["record"] = record
    with pytest.raises(Refused, match=f"Tuning {NAME}.*the version that wrote it"):
        store.load(NAME)


def test_what_is_too_large_for_the_api_server_says_what_to_lower(
    store: KubernetesStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunewright.store.kubernetes._MAX_TRIAL", 5000)
    store.save(waiting())
    words = tuple(
        Answer(prompt=str(i), text="", tokens=tuple(f"{i * 7919 % 99991:x}{j * 104729 % 99991:x}" for j in range(60)))
        for i in range(30)
    )
    with pytest.raises(Refused, match=r"quality\.prompts"):
        store.save_trial(NAME, update(trials()[0], answers=words))
    store.save_trial(NAME, trials()[0])


@pytest.fixture
def memory() -> TrialMemory:
    return TrialMemory()


@pytest.fixture
def remembering(kube: Kube, memory: TrialMemory) -> KubernetesStore:
    """The loop's store."""
    return KubernetesStore(kube, NS, FakeClock(), trials=memory)


def lists(fake: FakeKube) -> int:
    return sum(request.method == "GET" and request.path.endswith("/trials") for request in fake.requests)


def test_without_a_memory_trials_are_listed_whenever_they_are_asked_for(kube: Kube, store: KubernetesStore) -> None:
    store.save(waiting())
    for trial in trials():
        store.save_trial(NAME, trial)
    assert store.trials(NAME) == trials()
    kube.delete(TRIALS, f"{NAME}-{trials()[0].id}", NS)
    assert store.trials(NAME) == trials()[1:]


def test_with_a_memory_they_are_listed_once(fake: FakeKube, remembering: KubernetesStore) -> None:
    remembering.save(waiting())
    for trial in trials():
        remembering.save_trial(NAME, trial)
    assert remembering.trials(NAME) == trials()
    listed = lists(fake)
    changed = update(trials()[0], reason="another")
    remembering.save_trial(NAME, changed)
    assert remembering.trials(NAME) == [changed, *trials()[1:]], "what it wrote itself it knows"
    remembering.save(update(fresh(remembering), sentence="more"))
    assert lists(fake) == listed


def test_one_list_of_the_namespace_is_enough_for_all_tunings(fake: FakeKube, kube: Kube, memory: TrialMemory) -> None:
    writer = KubernetesStore(kube, NS, FakeClock())
    writer.save(waiting())
    other = update(waiting(), tuning=named("other"))
    writer.save(other)
    for trial in trials():
        writer.save_trial(NAME, trial)
    writer.save_trial("other", trials()[0])
    reader = KubernetesStore(kube, NS, FakeClock(), trials=memory)
    memory.read_all(kube.pages(TRIALS, NS))
    listed = lists(fake)
    assert reader.trials(NAME) == trials()
    assert reader.trials("other") == trials()[:1]
    assert lists(fake) == listed
    kube.delete(TRIALS, f"{NAME}-{trials()[0].id}", NS)
    memory.read_all(kube.pages(TRIALS, NS))
    assert reader.trials(NAME) == trials()[1:], "what was remembered before is forgotten"


def test_what_is_remembered_is_all_or_nothing(fake: FakeKube, kube: Kube, store: KubernetesStore) -> None:
    """A process that starts anew and writes one trial before it read the others."""
    store.save(waiting())
    for trial in trials():
        store.save_trial(NAME, trial)
    another = KubernetesStore(kube, NS, FakeClock(), trials=TrialMemory())
    another.save_trial(NAME, trials()[-1])
    assert another.trials(NAME) == trials()


def test_trials_are_forgotten_with_the_tuning_they_are_of(kube: Kube, remembering: KubernetesStore) -> None:
    remembering.save(waiting())
    remembering.save_trial(NAME, trials()[0])
    kube.delete(TUNINGS, NAME, NS)
    kube.create(TUNINGS, manifest(), NS)
    fresh(remembering)
    assert remembering.trials(NAME) == []


def test_trials_that_were_cleared_are_gone_from_the_memory(
    fake: FakeKube, remembering: KubernetesStore, kube: Kube, memory: TrialMemory
) -> None:
    remembering.save(waiting())
    memory.read_all(kube.pages(TRIALS, NS))
    remembering.save_trial(NAME, trials()[0])
    remembering.clear_trials(NAME)
    assert remembering.trials(NAME) == []


def test_an_event_that_is_older_than_our_own_write_changes_nothing(
    fake: FakeKube, kube: Kube, remembering: KubernetesStore, memory: TrialMemory
) -> None:
    remembering.save(waiting())
    memory.read_all(kube.pages(TRIALS, NS))
    remembering.save_trial(NAME, trials()[0])
    key = f"{NAME}-{trials()[0].id}"
    old = copy.deepcopy(kube.get(TRIALS, key, NS))
    changed = update(trials()[0], reason="another")
    remembering.save_trial(NAME, changed)
    memory.heard((NS, key), old)
    assert remembering.trials(NAME) == [changed]


def test_what_others_wrote_is_heard(kube: Kube, store: KubernetesStore, memory: TrialMemory) -> None:
    """The API beside a loop of another process."""
    store.save(waiting())
    reader = KubernetesStore(kube, NS, FakeClock(), trials=memory)
    memory.listed()
    assert reader.trials(NAME) == []
    store.save_trial(NAME, trials()[0])
    (found,) = kube.list(TRIALS, NS).items
    memory.heard((NS, found["metadata"]["name"]), found)
    assert reader.trials(NAME) == trials()[:1]


def test_after_a_trial_was_seen_to_go_a_list_tells_what_is_there(
    fake: FakeKube, kube: Kube, remembering: KubernetesStore, memory: TrialMemory
) -> None:
    """The event may be of one that we have made again since."""
    remembering.save(waiting())
    memory.read_all(kube.pages(TRIALS, NS))
    remembering.save_trial(NAME, trials()[0])
    memory.heard((NS, f"{NAME}-{trials()[0].id}"), None)
    assert remembering.trials(NAME) == trials()[:1]
    listed = lists(fake)
    assert remembering.trials(NAME) == trials()[:1]
    assert lists(fake) == listed


def test_what_is_heard_while_a_list_is_read_counts_where_it_is_newer(
    fake: FakeKube, kube: Kube, store: KubernetesStore, memory: TrialMemory
) -> None:
    store.save(waiting())
    store.save_trial(NAME, trials()[0])
    changed = update(trials()[0], reason="another")
    pages = list(kube.pages(TRIALS, NS))
    store.save_trial(NAME, changed)
    store.save_trial(NAME, trials()[1])
    for found in kube.list(TRIALS, NS).items:
        memory.heard((NS, found["metadata"]["name"]), found)
    memory.read_all(iter(pages))
    assert KubernetesStore(kube, NS, FakeClock(), trials=memory).trials(NAME) == [changed, trials()[1]]


def named(name: str) -> Tuning:
    return Tuning.model_validate(tuning().model_dump(mode="json") | {"metadata": {"name": name}})


# --- one pass ---


def test_a_pass_reads_the_tuning_once(
    fake: FakeKube, store: KubernetesStore, remembering: KubernetesStore, kube: Kube, memory: TrialMemory
) -> None:
    store.save(waiting(history=()))
    store.decide(NAME, decision("ana"))
    memory.read_all(kube.pages(TRIALS, NS))
    expected = store.load(NAME)
    fake.requests.clear()
    view = Pass(remembering, NAME)
    assert view.load(NAME) == expected
    assert view.decisions(NAME) == [decision("ana")]
    view.trials(NAME)
    record = view.load(NAME)
    assert record is not None
    saved = view.save(update(record, sentence="more"))
    assert view.load(NAME) == saved
    assert [request.method for request in fake.requests] == ["GET", "PUT"]


def test_a_decision_or_an_edit_during_a_pass_is_kept(
    fake: FakeKube, store: KubernetesStore, remembering: KubernetesStore
) -> None:
    store.save(waiting())
    view = Pass(remembering, NAME)
    store.decide(NAME, decision("ana"))
    fake.edit(PATH, budget={"trials": 9})
    record = view.load(NAME)
    assert record is not None
    assert view.decisions(NAME) == [], "it decides on one sight"
    view.save(update(record, sentence="went on"))
    after = Pass(remembering, NAME)
    assert after.decisions(NAME) == [decision("ana")]
    found = after.load(NAME)
    assert found is not None
    assert (found.sentence, found.tuning.spec.budget.trials) == ("went on", 9)


def test_what_another_loop_wrote_during_a_pass_is_a_conflict(
    store: KubernetesStore, remembering: KubernetesStore
) -> None:
    store.save(waiting())
    view = Pass(remembering, NAME)
    store.save(update(fresh(store), sentence="theirs"))
    record = view.load(NAME)
    assert record is not None
    with pytest.raises(Conflict):
        view.save(update(record, sentence="mine"))
    assert fresh(store).sentence == "theirs"


def test_a_pass_over_a_tuning_that_goes_meanwhile_does_not_bring_it_back(
    kube: Kube, store: KubernetesStore, remembering: KubernetesStore
) -> None:
    store.save(waiting())
    view = Pass(remembering, NAME)
    record = view.load(NAME)
    assert record is not None
    kube.delete(TUNINGS, NAME, NS)
    with pytest.raises(Conflict):
        view.save(update(record, sentence="mine"))
    gone = Pass(remembering, NAME)
    assert (gone.load(NAME), gone.uid, gone.decisions(NAME)) == (None, "", [])


def test_a_pass_acknowledges_the_spec(fake: FakeKube, kube: Kube, store: KubernetesStore) -> None:
    kube.create(TUNINGS, manifest(), NS)
    store.save(fresh(store))
    fake.edit(PATH, budget={"trials": 9})
    view = Pass(store, NAME)
    assert kube.get(TUNINGS, NAME, NS)["status"]["observedGeneration"] == 2
    record = view.load(NAME)
    assert record is not None
    fake.requests.clear()
    view.save(update(record, sentence="more"))
    assert [request.method for request in fake.requests] == ["PUT"], "it writes over what it wrote itself"


def test_a_pass_is_over_one_tuning(store: KubernetesStore) -> None:
    store.save(waiting())
    with pytest.raises(ValueError, match="other"):
        Pass(store, NAME).load("other")


def test_a_step_costs_few_requests(fake: FakeKube, store: KubernetesStore) -> None:
    record = store.save(waiting())
    store.save_trial(NAME, trials()[0])
    fake.requests.clear()
    fresh(store)
    store.trials(NAME)
    store.save_trial(NAME, trials()[0])
    store.save(update(record, sentence="more"))
    assert [request.method for request in fake.requests] == ["GET", "GET", "PATCH", "GET", "PUT"]


# --- sizes ---


def long_story() -> TuningRecord:
    """As large as it gets: thirty times started anew, a full verdict, and every decision kept."""
    base, cycle = waiting(), list(Phase)
    sentence = "Trial 17 of 20: max_num_seqs 64 against 4 gives 812.4 output tokens/s, 98.2 % more; SLO holds. " * 2
    history = tuple(
        PhaseChange(at=1e6 + i * 37.123, phase=cycle[i % len(cycle)], sentence=f"{i}: {sentence}") for i in range(300)
    )
    reading = Reading(query="histogram_quantile(0.95, ...)" * 8, value=0.123456789, samples=1234.0, start=1.0, end=2.0)
    promotion = PromotionState(
        candidate=base.winner,
        baseline=base.baseline,
        replicas=4,
        verdict=Verdict(outcome=Outcome.INCONCLUSIVE, reason=sentence, at=1.0),
        readings=(reading,) * 60,
    )
    gain = Gain(estimate=Estimate(value=0.5, low=0.4, high=0.6), rounds=6, status=ConfirmStatus.BETTER, reason=sentence)
    finalists = tuple(Finalist(candidate=Candidate(values={"max_num_seqs": n}), gain=gain) for n in range(5))
    return update(
        base,
        history=history,
        promotion=promotion,
        finalists=finalists,
        sentence=sentence * 20,
        decisions=tuple(decision(f"person-{i}", at=1e6 + i / 3) for i in range(40)),
    )


def test_status_stays_below_64_kib_after_500_trials(fake: FakeKube, store: KubernetesStore) -> None:
    record = store.save(long_story())
    for each in record.decisions:
        store.decide(NAME, each)
    base = trials()[0]
    for number in range(500):
        candidate = Candidate(values={"max_num_seqs": number + 1})
        trial = base.model_copy(
            update={"id": f"{number:03d}-{candidate.hash}", "number": number, "purpose": TrialPurpose.SEARCH}
        )
        store.save_trial(NAME, trial.model_copy(update={"candidate": candidate}))
    saved = store.save(record)
    assert store.load(NAME) == saved
    status = fake.objects[PATH.strip("/")]["status"]
    assert status["trials"] == "500/4"
    assert len(json.dumps(status)) < 64 * 1024
    assert len(store.trials(NAME)) == 500
    assert max(len(json.dumps(fake.objects[path])) for path in fake.objects if "/trials/" in path) < 16 * 1024


def test_candidates_that_are_asked_for_without_end_do_not_fill_the_status(
    fake: FakeKube, store: KubernetesStore
) -> None:
    record = store.save(long_story())
    asked = Decision(
        action="propose", at=1.5, by="system:serviceaccount:prod:ana", reason="why " * 40, values={"max_num_seqs": "8"}
    )
    with suppress(Objected):
        for _ in range(200):
            store.decide(NAME, asked)
    kept = len(store.decisions(NAME))
    with pytest.raises(Objected, match="holds no more"):
        store.decide(NAME, asked)
    assert 40 < kept < 199
    store.save(record)
    store.decide(NAME, decision("ana"))
    assert len(store.decisions(NAME)) == kept + 1, "whoever approves, or goes back, always can"
    assert len(json.dumps(fake.objects[PATH.strip("/")]["status"])) < 64 * 1024


# --- what is shown ---


def shown(record: TuningRecord, faults: tuple[str, ...] = ()) -> dict[str, str]:
    found = conditions(record, faults, generation=1, before=[], now=0.0)
    return {c["type"]: c["status"] for c in found}


READY = {Phase.PROMOTED, Phase.RECOMMENDED, Phase.NO_IMPROVEMENT, Phase.REJECTED}
ENDED = {*READY, Phase.INFEASIBLE, Phase.ROLLED_BACK, Phase.FAILED}


@pytest.mark.parametrize("phase", list(Phase))
def test_conditions_of_every_phase(phase: Phase) -> None:
    found = shown(waiting(phase=phase))
    assert (found["Ready"] == "True") == (phase in READY)
    assert (found["Reconciling"] == "True") == (phase not in ENDED)
    assert (found["Stalled"] == "True") == (phase in {Phase.FAILED, Phase.INFEASIBLE})
    assert (found["Promoted"] == "True") == (phase is Phase.PROMOTED)
    assert (found["RolledBack"] == "True") == (phase is Phase.ROLLED_BACK)
    assert found["Approved"] == "False"
    assert found["CanaryHealthy"] == "Unknown"


def test_a_suspended_tuning_is_not_reconciling() -> None:
    found = shown(waiting(suspended_since=1.0))
    assert (found["Suspended"], found["Reconciling"], found["Ready"]) == ("True", "False", "False")


@pytest.mark.parametrize(
    ("outcome", "status"), [(Outcome.PASS, "True"), (Outcome.FAIL, "False"), (Outcome.INCONCLUSIVE, "Unknown")]
)
def test_the_canary_is_as_healthy_as_its_verdict(outcome: Outcome, status: str) -> None:
    record = waiting()
    verdict = Verdict(outcome=outcome, reason="because", at=1.0)
    promotion = PromotionState(candidate=record.winner, baseline=record.baseline, replicas=2, verdict=verdict)
    assert shown(update(record, promotion=promotion))["CanaryHealthy"] == status


def test_an_approval_of_something_else_approves_nothing() -> None:
    record = waiting()
    live = decision("ana", at=record.approval_since or 0.0).model_copy(
        update={
            "candidate": record.winner.hash if record.winner else "",
            "spec": record.spec_hash,
            "baseline": record.baseline.hash if record.baseline else "",
        }
    )
    assert shown(update(record, decisions=(live,)))["Approved"] == "True"
    for change in ({"candidate": "x"}, {"spec": "x"}, {"baseline": "x"}, {"action": "reject"}):
        assert shown(update(record, decisions=(live.model_copy(update=change),)))["Approved"] == "False"


def test_a_condition_keeps_the_time_of_its_change() -> None:
    record = waiting()
    first = conditions(record, (), generation=1, before=[], now=100.0)
    second = conditions(update(record, sentence="other"), (), generation=2, before=first, now=200.0)
    assert {c["lastTransitionTime"] for c in second} == {"1970-01-01T00:01:40Z"}
    third = conditions(update(record, phase=Phase.REJECTED), (), generation=2, before=second, now=200.0)
    changed = {c["type"] for c in third if c["lastTransitionTime"] == "1970-01-01T00:03:20Z"}
    assert changed == {"Ready", "Reconciling"}


def test_what_is_shown_holds_no_secret() -> None:
    record = waiting(sentence="started with --api-key hunter2 at http://u:hunter2@host/")
    text = json.dumps([tuning_status(record, []), conditions(record, (), generation=1, before=[], now=0.0)])
    assert "hunter2" not in text


def test_the_columns() -> None:
    done = trials()
    search = update(done[0], purpose=TrialPurpose.SEARCH, objective=900.0)
    failed = update(search, outcome=TrialOutcome.INFEASIBLE, objective=5000.0)
    running = update(search, phase=TrialPhase.MEASURING, outcome=None, objective=None)
    found = tuning_status(waiting(), [*done, search, failed, running])
    assert found["best"] == "900 output tokens/s", "what misses the SLO is no best"
    assert (found["trials"], found["gain"], found["approval"], found["target"]) == ("2/4", "+98.0%", "Waiting", "m")
    latency = tuning(objective={"minimize": "ttftP95"})
    assert tuning_status(waiting(tuning=latency), [update(search, objective=-0.25)])["best"] == "0.25 s"


def test_a_trial_that_only_began_shows_no_result() -> None:
    trial = TrialRecord(id="1-a", number=1, purpose=TrialPurpose.SEARCH, candidate=Candidate())
    assert trial_status(trial) == {
        "phase": "Pending", "outcome": None, "objective": None, "failure": None, "cause": None,
    }  # fmt: skip


def test_records_pack_the_same_every_time_and_come_back_whole() -> None:
    assert pack(long_story()) == pack(long_story())
    assert unpack(TuningRecord, pack(long_story())) == long_story()


def test_trials_go_with_their_tuning(kube: Kube, store: KubernetesStore) -> None:
    store.save(waiting())
    store.save_trial(NAME, trials()[0])
    store.delete(NAME)
    assert kube.list(TRIALS, NS).items == []
