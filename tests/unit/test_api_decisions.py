"""Decisions: kept with who, when, what and why; bound to what was looked at; never used twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from restapi import API, START, WINNER, Clock, Rest, problem, waiting
from tunings import tuning

from tunewright.api.auth import own_name
from tunewright.controller.decisions import bound, live_approval, take_up
from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.state import Decision, PromotionState, TuningRecord
from tunewright.domain.step import start_anew, update
from tunewright.ports import Objection, PortError, no_objection
from tunewright.store.memory import MemoryStore
from tunewright.store.sqlite import SqliteStore

OTHER = "0123456789"
ABORT = f"{API}/tunings/demo/abort"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Rest:
    """For tests that change nothing."""
    return Rest(tmp_path_factory.mktemp("rest"))


@pytest.fixture
def rest(tmp_path: Path) -> Rest:
    return Rest(tmp_path)


def record(rest: Rest) -> TuningRecord:
    found = rest.store.load("demo")
    assert found is not None
    return found


def change(rest: Rest, **fields: Any) -> None:
    rest.store.save(update(record(rest), **fields))


def loop_takes_up(rest: Rest) -> TuningRecord:
    return rest.store.save(take_up(record(rest), rest.context()))


def test_an_approval_is_kept_and_grants(rest: Rest) -> None:
    rest.clock.time = START + 5
    body = rest.binding() | {"reason": "looks good"}
    answer = rest.post("/tunings/demo/approve", body)
    assert answer.status_code == 202
    expected = {"action": "approve", "at": START + 5, "by": own_name(), "values": {}} | body
    assert answer.json() == expected
    assert [d.model_dump() for d in rest.store.decisions("demo")] == [expected]
    assert live_approval(record(rest)) is None, "the loop grants, not the API"
    approval = live_approval(loop_takes_up(rest))
    assert approval is not None
    assert approval.reason == "looks good"


def test_who_decided_is_not_for_the_caller_to_say(shared: Rest) -> None:
    found = problem(shared.post("/tunings/demo/abort", {"reason": "x", "by": "the boss"}), 422, "invalid")
    assert [error["field"] for error in found["errors"]] == ["body.by"]
    problem(shared.post("/tunings/demo/abort", {"reason": "x", "at": 0}), 422, "invalid")
    assert shared.store.decisions("demo") == []


@pytest.mark.parametrize("action", ["approve", "reject"])
@pytest.mark.parametrize("what", ["candidate", "spec", "baseline"])
def test_a_wrong_binding_is_stale(shared: Rest, action: str, what: str) -> None:
    bind = shared.binding()
    found = problem(shared.post(f"/tunings/demo/{action}", bind | {what: OTHER, "reason": "x"}), 409, "stale")
    assert found["changed"] == [{"what": what, "decided": OTHER, "now": bind[what]}]
    assert f"{what} is {bind[what]}, not {OTHER}" in found["detail"]
    assert shared.store.decisions("demo") == []


def test_each_thing_that_can_change_under_a_decision(rest: Rest) -> None:
    body = rest.binding() | {"reason": "x"}
    edited = tuning(slo={"ttftP95": "1s"})
    changes: list[tuple[str, dict[str, Any]]] = [
        ("candidate", {"winner": Candidate(values={"max_num_seqs": 7})}),
        ("baseline", {"baseline": Candidate(values={"max_num_seqs": 9})}),
        ("spec", {"tuning": edited}),
    ]
    for count, (what, fields) in enumerate(changes, start=1):
        change(rest, **fields)
        found = problem(rest.post("/tunings/demo/approve", body), 409, "stale")
        assert [c["what"] for c in found["changed"]][-1] == what or len(found["changed"]) == count
        assert {c["what"] for c in found["changed"]} == {name for name, _ in changes[:count]}
    assert rest.store.decisions("demo") == []


def test_after_an_edit_of_the_spec_what_is_shown_can_not_be_approved(rest: Rest) -> None:
    """The winner was found for the old spec; reading afresh must not make it look like the new one's."""
    change(rest, tuning=tuning(objective={"minimize": "ttftP95"}))
    found = problem(rest.post("/tunings/demo/approve", rest.binding() | {"reason": "x"}), 409, "stale")
    assert [c["what"] for c in found["changed"]] == ["spec"]


def test_it_changes_between_the_answer_and_the_loop(rest: Rest) -> None:
    assert rest.post("/tunings/demo/approve", rest.binding() | {"reason": "x"}).status_code == 202
    change(rest, winner=Candidate(values={"max_num_seqs": 7}))
    after = loop_takes_up(rest)
    assert live_approval(after) is None
    assert "has no effect" in after.sentence
    (kept,) = rest.get("/tunings/demo/decisions").json()["items"]
    assert (kept["takenUp"], kept["decision"]["by"]) == (True, own_name())


def test_an_approval_is_not_used_twice_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "store.sqlite"
    first = Rest(tmp_path, SqliteStore(path, clock))
    first.store.save(waiting())
    body = first.binding() | {"reason": "once"}
    assert first.post("/tunings/demo/approve", body).status_code == 202
    first.store.save(update(loop_takes_up(first), phase=Phase.CANARY))

    again = Rest(tmp_path, SqliteStore(path, clock))
    assert again.token == first.token
    found = problem(again.post("/tunings/demo/approve", body), 409, "not-now")
    assert "Canary" in found["detail"]
    assert len(again.store.decisions("demo")) == 1

    # The spec changed, the same winner was found again: the old approval is of an earlier round of waiting.
    again.clock.time = START + 100
    rolled_back = update(record(again), phase=Phase.ROLLED_BACK)
    anew = start_anew(rolled_back, "starting anew", again.clock.time)
    again.store.save(anew)
    problem(again.post("/tunings/demo/approve", body), 409, "not-now")
    waits = {"phase": Phase.AWAITING_APPROVAL, "winner": WINNER, "baseline": Candidate(values={"max_num_seqs": 4})}
    change(again, approval_since=START + 100, **waits)
    assert live_approval(loop_takes_up(again)) is None
    assert again.get("/tunings/demo/promotion").json()["approval"] is None


def test_an_expired_or_ended_tuning_can_not_be_approved(rest: Rest) -> None:
    body = rest.binding() | {"reason": "x"}
    for phase in Phase:
        if phase is Phase.AWAITING_APPROVAL:
            continue
        change(rest, phase=phase)
        found = problem(rest.post("/tunings/demo/approve", body), 409, "not-now")
        assert phase in found["detail"]
        problem(rest.post("/tunings/demo/reject", body), 409, "not-now")
    assert rest.store.decisions("demo") == []


def test_a_rejection_ends_it(rest: Rest) -> None:
    assert rest.post("/tunings/demo/reject", rest.binding() | {"reason": "not on a friday"}).status_code == 202
    after = loop_takes_up(rest)
    assert after.phase is Phase.REJECTED
    assert "not on a friday" in after.sentence


def test_approved_and_rejected_before_the_loop_looks(rest: Rest) -> None:
    body = rest.binding() | {"reason": "x"}
    assert rest.post("/tunings/demo/approve", body).status_code == 202
    assert rest.post("/tunings/demo/reject", body).status_code == 202
    assert loop_takes_up(rest).phase is Phase.REJECTED


def test_of_two_who_approve_the_second_is_told_who_did(rest: Rest) -> None:
    body = rest.binding() | {"reason": "looks good"}
    assert rest.post("/tunings/demo/approve", body).status_code == 202
    for _ in range(2):  # before the loop looks, and after it has
        found = problem(rest.post("/tunings/demo/approve", body), 409, "not-now")
        assert found["detail"] == f"The approve has no effect: {own_name()} approved it already: looks good."
        loop_takes_up(rest)
    assert len(rest.store.decisions("demo")) == 1


def test_a_rejection_is_not_taken_back(rest: Rest) -> None:
    body = rest.binding() | {"reason": "no"}
    assert rest.post("/tunings/demo/reject", body).status_code == 202
    for action in ("approve", "reject"):
        found = problem(rest.post(f"/tunings/demo/{action}", body), 409, "not-now")
        assert f"{own_name()} rejected it already: no" in found["detail"]
    assert loop_takes_up(rest).phase is Phase.REJECTED


class Meanwhile(MemoryStore):
    """Somebody else's decision is written between our look and our write."""

    def __init__(self, other: Decision) -> None:
        super().__init__()
        self.other: Decision | None = other

    def decide(self, name: str, decision: Decision, unless: Objection = no_objection) -> None:
        other, self.other = self.other, None
        if other is not None:
            super().decide(name, other)
        super().decide(name, decision, unless)


def test_of_two_at_the_same_moment_one_wins(tmp_path: Path) -> None:
    record = waiting()
    rest = Rest(tmp_path, Meanwhile(bound(record, "approve", at=START + 1, by="ben", reason="mine")))
    rest.store.save(record)
    found = problem(rest.post("/tunings/demo/approve", rest.binding() | {"reason": "x"}), 409, "not-now")
    assert "ben approved it already: mine" in found["detail"]
    after = loop_takes_up(rest)
    approval = live_approval(after)
    assert approval is not None
    assert (approval.by, len(after.decisions)) == ("ben", 1)


def test_an_approval_of_something_else_stands_in_nobody_s_way(rest: Rest) -> None:
    stale = bound(waiting(), "approve", at=START + 1, by="ben").model_copy(update={"candidate": "other"})
    earlier = bound(waiting(), "approve", at=START - 1, by="ben")
    for each in (earlier, stale):
        rest.store.decide("demo", each)
    assert rest.post("/tunings/demo/approve", rest.binding() | {"reason": "x"}).status_code == 202


def test_a_second_approval_that_was_written_all_the_same_changes_nothing(rest: Rest) -> None:
    for by in ("ana", "ben"):
        rest.store.decide("demo", bound(waiting(), "approve", at=START + 1, by=by))
    after = loop_takes_up(rest)
    assert "The approve by ben has no effect: ana approved it already" in after.sentence


def test_suspend_and_resume(rest: Rest) -> None:
    problem(rest.post("/tunings/demo/resume", {"reason": "x"}), 409, "not-now")
    assert rest.post("/tunings/demo/suspend", {"reason": "maintenance"}).status_code == 202
    assert loop_takes_up(rest).suspended_since == START
    assert rest.get("/tunings/demo").json()["suspended"] is True
    problem(rest.post("/tunings/demo/suspend", {"reason": "x"}), 409, "not-now")
    assert rest.post("/tunings/demo/resume", {"reason": "done"}).status_code == 202
    assert loop_takes_up(rest).suspended_since is None


def test_abort(rest: Rest) -> None:
    assert rest.post("/tunings/demo/abort", {"reason": "enough"}).status_code == 202
    assert loop_takes_up(rest).phase is Phase.FAILED
    problem(rest.post("/tunings/demo/abort", {"reason": "x"}), 409, "not-now")


def test_rollback(rest: Rest) -> None:
    problem(rest.post("/tunings/demo/rollback", {"reason": "x"}), 409, "not-now")
    state = PromotionState(candidate=WINNER, baseline=Candidate(values={"max_num_seqs": 4}), replicas=2, updated=2)
    change(rest, phase=Phase.PROMOTED, promotion=state)
    assert rest.post("/tunings/demo/rollback", {"reason": "users complain"}).status_code == 202
    after = loop_takes_up(rest)
    assert after.phase is Phase.ROLLING_BACK
    assert rest.get("/tunings/demo/promotion").json()["rollout"]["goingBack"].endswith("(users complain)")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body.reason"),
        ({"reason": ""}, "body.reason"),
        ({"reason": "   "}, "body.reason"),
        ({"reason": "x" * 1001}, "body.reason"),
        ({"reason": "two\nlines"}, "body.reason"),
        ({"reason": "\x1b[2Jcleared"}, "body.reason"),
        ({"reason": "right to left \u202e"}, "body.reason"),
        ({"reason": "\ud800"}, "body.reason"),
        ({"reason": 1}, "body.reason"),
        ({"reason": None}, "body.reason"),
        ([], "body"),
        (None, "body"),
        ("text", "body"),
    ],
)
def test_every_decision_says_why_in_one_line(shared: Rest, body: Any, field: str) -> None:
    found = problem(shared.call("POST", ABORT, headers=JSON, content=json.dumps(body)), 422, "invalid")
    assert field in [error["field"] for error in found["errors"]]
    assert shared.store.decisions("demo") == []


@pytest.mark.parametrize("value", ["", "short", "A" * 10, "0" * 11, "../../../..", None, 5])
def test_a_binding_that_is_no_hash(shared: Rest, value: Any) -> None:
    bind = shared.binding()
    for what in bind:
        found = problem(shared.post("/tunings/demo/approve", bind | {what: value, "reason": "x"}), 422, "invalid")
        assert [error["field"] for error in found["errors"]] == [f"body.{what}"]


def test_broken_json_is_named_and_not_repeated(shared: Rest) -> None:
    answer = shared.call("POST", ABORT, headers=JSON, content=b'{"reason": "oh <script>')
    found = problem(answer, 422, "invalid")
    assert found["errors"] == [{"field": "body", "message": "this is not JSON"}]
    assert "script" not in answer.text


def test_an_unknown_tuning(shared: Rest) -> None:
    problem(shared.post("/tunings/nobody/abort", {"reason": "x"}), 404, "not-found")


class Broken(MemoryStore):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error

    def decide(self, name: str, decision: Decision, unless: Objection = no_objection) -> None:
        if self.error is not None:
            raise self.error
        super().decide(name, decision, unless)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(PortError("the disk is full"), 503, "unavailable"), (OSError("a fault"), 500, "internal")],
)
def test_a_decision_that_was_not_written_is_not_confirmed(
    tmp_path: Path, error: Exception, status: int, kind: str
) -> None:
    rest = Rest(tmp_path, Broken(error))
    rest.store.save(waiting())
    body = rest.binding() | {"reason": "x"}
    problem(rest.post("/tunings/demo/approve", body), status, kind)
    assert rest.store.decisions("demo") == []


def test_decisions_are_listed_with_who_when_what_and_why(rest: Rest) -> None:
    for count in range(3):
        rest.clock.time = START + count
        rest.post("/tunings/demo/suspend", {"reason": f"reason {count}"})
    page = rest.get("/tunings/demo/decisions?limit=2").json()
    assert [(i["number"], i["takenUp"], i["decision"]["reason"]) for i in page["items"]] == [
        (0, False, "reason 0"),
        (1, False, "reason 1"),
    ]
    rest_of_it = rest.get(f"/tunings/demo/decisions?limit=2&after={page['next']}").json()
    assert [i["decision"]["at"] for i in rest_of_it["items"]] == [START + 2]
    assert rest_of_it["next"] is None
    assert len(rest.get("/tunings/demo/promotion").json()["pending"]) == 3


CANDIDATES = "/tunings/demo/candidates"


def test_a_candidate_is_asked_for_and_taken_up(rest: Rest) -> None:
    change(rest, phase=Phase.SEARCHING, winner=None)
    answer = rest.post(CANDIDATES, {"values": {"max_num_seqs": "96"}, "reason": "seen elsewhere"})
    assert answer.status_code == 202
    assert answer.json()["values"] == {"max_num_seqs": "96"}
    (wish,) = loop_takes_up(rest).proposed
    assert (wish.values, wish.by) == ({"max_num_seqs": "96"}, own_name())
    change(rest, phase=Phase.CONFIRMING)
    problem(rest.post(CANDIDATES, {"values": {"max_num_seqs": "64"}, "reason": "late"}), 409, "not-now")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_num_seq": "64"}, "did you mean max_num_seqs"),
        ({"max_num_seqs": "many"}, "is not a number"),
        ({"kv_cache_dtype": "fp8"}, "allowLossy"),
        ({}, "at least 1"),
        ({"max_num_seqs": 64}, "string"),
        ({"; rm": "1"}, "knob's name"),
    ],
)
def test_a_candidate_that_makes_no_sense_is_invalid(rest: Rest, values: Any, told: str) -> None:
    change(rest, phase=Phase.SEARCHING, winner=None)
    found = problem(rest.post(CANDIDATES, {"values": values, "reason": "x"}), 422, "invalid")
    assert told in json.dumps(found)
    assert rest.store.decisions("demo") == []
