"""What is read: enough to decide on, in pages, and without secrets."""

import json
from pathlib import Path

import pytest
from restapi import BASELINE, SECRET, START, WINNER, Rest, problem, trials, waiting
from tunings import tuning

from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import TOUCHES_PRODUCTION, Phase
from tunewright.domain.state import PromotionState, TuningRecord
from tunewright.domain.step import update
from tunewright.domain.verdict import MetricVerdict, Outcome, Reading, Verdict
from tunewright.ports import PortError, Refused
from tunewright.store.memory import MemoryStore


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Rest:
    """For tests that change nothing."""
    return Rest(tmp_path_factory.mktemp("rest"))


@pytest.fixture
def rest(tmp_path: Path) -> Rest:
    return Rest(tmp_path)


def change(rest: Rest, **fields: object) -> None:
    record = rest.store.load("demo")
    assert record is not None
    rest.store.save(update(record, **fields))


def test_lists_tunings_in_pages(rest: Rest) -> None:
    for name in ("alpha", "beta", "zeta"):
        made = tuning()
        named = made.model_copy(update={"metadata": made.metadata.model_copy(update={"name": name})})
        rest.store.save(TuningRecord(tuning=named, spec_hash=named.spec.spec_hash, phase_since=START))
    names, after = [], ""
    for _ in range(4):
        page = rest.get(f"/tunings?limit=2{after}").json()
        names.append([item["name"] for item in page["items"]])
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert names == [["alpha", "beta"], ["demo", "zeta"]]
    (demo,) = [item for item in rest.get("/tunings").json()["items"] if item["name"] == "demo"]
    assert demo["phase"] == "AwaitingApproval"
    assert demo["waitsForApproval"] is True
    assert demo["gain"] == 0.98
    assert demo["source"] == "simulated"


def test_reads_a_tuning(rest: Rest) -> None:
    found = rest.get("/tunings/demo").json()
    assert found["winner"] == {"hash": WINNER.hash, "values": dict(WINNER.values)}
    assert found["trials"] == 7
    assert found["spec"]["slo"]["ttftP95"] == "2s"
    assert found["history"][-1]["phase"] == "AwaitingApproval"
    problem(rest.get("/tunings/nobody"), 404, "not-found")


def test_no_secret_is_shown_anywhere(rest: Rest) -> None:
    change(rest, sentence=f"Trying again: https://user:{SECRET}@host and --api-key {SECRET} and token={SECRET}")
    for path in ("", "/trials", "/profile", "/promotion", "/decisions"):
        answer = rest.get(f"/tunings/demo{path}")
        assert answer.status_code == 200
        assert SECRET not in answer.text, path
    assert rest.get("/tunings/demo").json()["spec"]["target"]["environment"] == {"HF_TOKEN": "(hidden)"}
    assert SECRET not in rest.get("/tunings").text


def test_lists_trials_in_pages_without_the_answers(rest: Rest) -> None:
    numbers, after = [], -1
    for _ in range(10):
        page = rest.get(f"/tunings/demo/trials?limit=3&after={after}").json()
        numbers.append([item["number"] for item in page["items"]])
        assert all("answers" not in item for item in page["items"])
        if page["next"] is None:
            break
        after = page["next"]
    assert numbers == [[0, 1, 2], [3, 4, 5], [6]]
    assert rest.get("/tunings/demo/trials?after=6").json() == {"items": [], "next": None}


def test_reads_a_trial(rest: Rest) -> None:
    wanted = trials()[2]
    found = rest.get(f"/tunings/demo/trials/{wanted.id}").json()
    assert found["measurement"]["outputTokensPerSecond"]["value"] == wanted.objective
    assert found["measurement"]["source"] == "simulated"
    assert found["spareSeconds"] == 30
    problem(rest.get("/tunings/demo/trials/999-0123456789"), 404, "not-found")
    problem(rest.get("/tunings/demo/trials/what"), 422, "invalid")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=201", "limit=x", "after=-2", "after=1e3", "limt=5", "limit=1&limit=2"]
)
def test_wrong_parameters_are_named(shared: Rest, query: str) -> None:
    found = problem(shared.get(f"/tunings/demo/trials?{query}"), 422, "invalid")
    assert [error["field"] for error in found["errors"]] == [f"query.{query.partition('=')[0]}"]


def test_the_profile(rest: Rest) -> None:
    found = rest.get("/tunings/demo/profile").json()
    assert found["concurrencyP95"] == 8
    change(rest, profile=None, phase=Phase.PROFILING)
    assert "Profiling" in problem(rest.get("/tunings/demo/profile"), 404, "not-found")["detail"]


def test_the_promotion_holds_all_that_is_needed_to_decide(rest: Rest) -> None:
    found = rest.get("/tunings/demo/promotion").json()
    assert found["bind"] == {"candidate": WINNER.hash, "spec": waiting().spec_hash, "baseline": BASELINE.hash}
    winner = found["winner"]
    assert (winner["gain"], winner["low"], winner["high"], winner["rounds"]) == (0.98, 0.9, 1.1, 3)
    assert found["source"] == "simulated"
    assert found["before"]["outputTokensPerSecond"] == pytest.approx(402)
    assert found["after"]["outputTokensPerSecond"] == pytest.approx(802)
    assert found["after"]["runs"] == 3
    ttft, errors = found["slo"]
    # the worst of three rounds, not their mean
    assert ttft == {"bound": "ttftP95", "limit": 2.0, "baseline": 1.1, "candidate": pytest.approx(0.6), "holds": True}
    assert errors["bound"] == "errorRate"
    assert found["differences"] == [
        {"knob": "enable_prefix_caching", "baseline": None, "candidate": False, "lossy": False},
        {"knob": "max_num_seqs", "baseline": 4, "candidate": 64, "lossy": False},
    ]
    assert found["lossy"] == []
    assert found["expiresAt"] == START + 3600
    assert any("30%" in line for line in found["whatHappensNext"])
    assert any("rollback" in line for line in found["howToGoBack"])
    assert found["rollout"] is None


def test_a_promotion_that_misses_the_slo_in_one_round_says_so(rest: Rest) -> None:
    worst = trials()[6]
    assert worst.candidate == WINNER
    assert worst.measurement is not None
    slow = worst.measurement.ttft.model_copy(update={"p95": 2.5})
    measurement = worst.measurement.model_copy(update={"ttft": slow})
    rest.store.save_trial("demo", worst.model_copy(update={"measurement": measurement}))
    ttft = rest.get("/tunings/demo/promotion").json()["slo"][0]
    assert (ttft["candidate"], ttft["holds"]) == (2.5, False)


def test_a_lossy_winner_is_marked_with_the_quality_gate(rest: Rest) -> None:
    lossy = Candidate(values={"max_num_seqs": 4, "kv_cache_dtype": "fp8"})
    change(rest, winner=lossy)
    found = rest.get("/tunings/demo/promotion").json()
    assert found["lossy"] == ["kv_cache_dtype"]
    assert found["quality"]["required"] is True
    assert found["quality"]["passed"] is False, "no answers are no pass"


def test_the_recommendation_is_told_in_the_form_asked_for(rest: Rest) -> None:
    found = rest.get("/tunings/demo/recommendation").json()
    assert (found["form"], found["files"][0]["name"]) == ("args", "command.sh")
    assert rest.get("/tunings/demo/recommendation?as=kustomize").status_code == 404
    assert rest.get("/tunings/demo/recommendation?as=xml").status_code == 422
    change(rest, winner=None)
    assert "nothing to recommend" in rest.get("/tunings/demo/recommendation").json()["detail"]


def test_time_suspended_does_not_use_up_the_approval(rest: Rest) -> None:
    change(rest, suspended_since=START + 10)
    rest.clock.time = START + 110
    assert rest.get("/tunings/demo/promotion").json()["expiresAt"] == START + 3700


def test_the_promotion_can_be_read_in_every_phase(rest: Rest) -> None:
    for phase in Phase:
        change(rest, phase=phase)
        found = rest.get("/tunings/demo/promotion").json()
        assert found["phase"] == phase
        goes_on = phase in TOUCHES_PRODUCTION or phase in (Phase.AWAITING_APPROVAL, Phase.RECOMMENDED)
        assert bool(found["whatHappensNext"]) is goes_on
    change(rest, winner=None, baseline=None, finalists=(), source=None, profile=None, approval_since=None)
    for phase in Phase:
        change(rest, phase=phase)
        found = rest.get("/tunings/demo/promotion").json()
        assert (found["phase"], found["bind"], found["winner"], found["quality"]) == (phase, None, None, None)


def test_the_rollout_shows_its_verdict_with_the_raw_numbers(rest: Rest) -> None:
    reading = Reading(query="ttft of the canary", value=0.4, samples=120, start=START, end=START + 60)
    metric = MetricVerdict(metric="ttft", outcome=Outcome.PASS, reason="as fast", canary=reading, stable=reading)
    verdict = Verdict(outcome=Outcome.PASS, reason="as good", at=START + 60, metrics=(metric,))
    state = PromotionState(
        candidate=WINNER, baseline=BASELINE, replicas=2, updated=1, canary_since=START, verdict=verdict
    )
    change(rest, phase=Phase.ROLLING, promotion=state)
    rollout = rest.get("/tunings/demo/promotion").json()["rollout"]
    assert (rollout["updated"], rollout["replicas"]) == (1, 2)
    assert rollout["verdict"]["metrics"][0]["canary"]["value"] == 0.4
    assert rollout["verdict"]["metrics"][0]["canary"]["samples"] == 120


def test_the_report_is_a_page_that_runs_nothing(tmp_path: Path) -> None:
    rest = Rest(tmp_path, report=lambda _store, _record: "<h1>x</h1>")
    answer = rest.get("/tunings/demo/report")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "sandbox" in answer.headers["content-security-policy"]
    problem(Rest(tmp_path, report=None).get("/tunings/demo/report"), 404, "not-found")


def test_probes(tmp_path: Path) -> None:
    why: list[str | None] = [None]
    rest = Rest(tmp_path, ready=lambda: why[0])
    assert rest.call("GET", "/readyz").json() == {"status": "ready"}
    why[0] = "the loop has not moved for 60 s"
    assert problem(rest.call("GET", "/readyz"), 503, "unavailable")["detail"] == why[0]
    assert rest.call("GET", "/healthz").json() == {"status": "ok"}
    problem(Rest(tmp_path, metrics=None).call("GET", "/metrics"), 404, "not-found")


def test_paths_and_methods_that_are_not_there(rest: Rest) -> None:
    problem(rest.get("/nothing"), 404, "not-found")
    problem(rest.call("GET", "/"), 404, "not-found")
    answer = rest.call("DELETE", "/api/v1alpha1/tunings/demo", json={})
    assert problem(answer, 405, "method-not-allowed")["detail"]
    assert answer.headers["allow"] == "GET"
    problem(rest.get("/tunings/"), 404, "not-found")


@pytest.mark.parametrize("error", [PortError("locked"), Refused("the store is not sound")])
def test_a_store_that_does_not_answer(tmp_path: Path, error: Exception) -> None:
    class Broken(MemoryStore):
        def load(self, name: str) -> TuningRecord | None:
            raise error

    found = problem(Rest(tmp_path, Broken()).get("/tunings/demo"), 503, "unavailable")
    assert found["detail"] == str(error)


def test_text_is_escaped_to_ascii(rest: Rest) -> None:
    change(rest, sentence="\x1b[31mred\u202e")
    answer = rest.get("/tunings/demo")
    assert answer.content.isascii()
    assert b"\x1b" not in answer.content
    assert json.loads(answer.content)["sentence"] == "\x1b[31mred\u202e"
