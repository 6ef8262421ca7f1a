"""The same routes for the tunings of several namespaces: whose they are, who may, and how they are listed."""

from pathlib import Path

import pytest
from restapi import API, SECRET, START, Rest, problem, trials, waiting
from tunings import tuning

from tunewright.api.auth import Caller, Verb
from tunewright.domain.state import TuningRecord
from tunewright.domain.step import update
from tunewright.ports import Key, Store
from tunewright.store.memory import MemoryStore
from tunewright.store.one import OneStore

WHERE = ["own", "prod", "prod-2"]


class Namespaces:
    """The stores of a controller of all namespaces; the tuning `demo` is in each of them."""

    own, everywhere = "own", True

    def __init__(self) -> None:
        self.stores: dict[str, MemoryStore] = {}
        for namespace in WHERE:
            store = self.stores[namespace] = MemoryStore()
            store.save(waiting(sentence=f"In {namespace}."))
            for trial in trials():
                store.save_trial("demo", trial)

    def of(self, namespace: str) -> Store:
        return self.stores.get(namespace) or MemoryStore()

    def tunings(self) -> list[Key]:
        return [(namespace, name) for namespace, store in sorted(self.stores.items()) for name in store.names()]


class Asked:
    """Allows all but what `refused` names, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Verb, str | None, str | None]] = []
        self.refused: tuple[str | None, str | None] = ("", "")

    def allows(self, caller: Caller, verb: Verb, namespace: str | None, tuning: str | None) -> bool:
        self.asked.append((verb, namespace, tuning))
        return (namespace, tuning) != self.refused


@pytest.fixture
def namespaces() -> Namespaces:
    return Namespaces()


@pytest.fixture
def access() -> Asked:
    return Asked()


@pytest.fixture
def rest(tmp_path: Path, namespaces: Namespaces, access: Asked) -> Rest:
    def report(store: Store, record: TuningRecord) -> str:
        return f"{record.sentence} {len(store.trials(record.name))} trials"

    return Rest(tmp_path, namespaces.stores["own"], namespaces, authorizer=access, report=report)


@pytest.mark.parametrize("namespace", WHERE)
def test_a_tuning_is_read_where_the_path_says(rest: Rest, namespace: str) -> None:
    at = f"/namespaces/{namespace}/tunings/demo"
    found = rest.get(at).json()
    assert (found["namespace"], found["sentence"], found["trials"]) == (namespace, f"In {namespace}.", len(trials()))
    promotion = rest.get(f"{at}/promotion").json()
    assert (promotion["namespace"], promotion["sentence"]) == (namespace, f"In {namespace}.")
    assert any(f"POST {API}{at}/rollback" in line for line in promotion["howToGoBack"])
    assert rest.get(f"{at}/report").text == f"In {namespace}. {len(trials())} trials"
    assert len(rest.get(f"{at}/trials").json()["items"]) == len(trials())
    one = trials()[0].id
    assert rest.get(f"{at}/trials/{one}").json()["id"] == one
    assert rest.get(f"{at}/profile").json()["replicas"] == 2
    assert rest.get(f"{at}/decisions").json()["items"] == []


def test_without_a_namespace_it_is_the_controllers_own(rest: Rest) -> None:
    assert rest.get("/tunings/demo").json()["sentence"] == "In own."
    assert rest.get("/tunings/demo/report").text.startswith("In own.")


@pytest.mark.parametrize("action", ["approve", "reject", "suspend", "abort"])
def test_a_decision_is_kept_in_its_namespace_alone(
    rest: Rest, namespaces: Namespaces, access: Asked, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    at = "/namespaces/prod/tunings/demo"
    bind = rest.get(f"{at}/promotion").json()["bind"] if action in ("approve", "reject") else {}
    answer = rest.post(f"{at}/{action}", {**bind, "reason": "fine"})
    assert answer.status_code == 202, answer.text
    decided = {namespace: [d.action for d in store.decisions("demo")] for namespace, store in namespaces.stores.items()}
    assert decided == {"own": [], "prod": [action], "prod-2": []}
    assert access.asked[-1] == (Verb.DECIDE, "prod", "demo")
    assert f"{action} of prod/demo" in caplog.text


def test_who_may_is_asked_of_the_namespace_in_the_path(rest: Rest, namespaces: Namespaces, access: Asked) -> None:
    access.refused = ("prod", "demo")
    for path in ("", "/trials", "/promotion", "/decisions", "/report", "/profile"):
        found = problem(rest.get(f"/namespaces/prod/tunings/demo{path}"), 403, "forbidden")
        assert "demo in namespace prod" in found["detail"]
    problem(rest.post("/namespaces/prod/tunings/demo/abort", {"reason": "x"}), 403, "forbidden")
    assert namespaces.stores["prod"].decisions("demo") == []
    assert set(access.asked) == {(Verb.READ, "prod", "demo"), (Verb.DECIDE, "prod", "demo")}
    assert rest.get("/namespaces/prod-2/tunings/demo").status_code == 200
    assert rest.get("/tunings/demo").status_code == 200
    assert access.asked[-2:] == [(Verb.READ, "prod-2", "demo"), (Verb.READ, None, "demo")]


@pytest.mark.parametrize("path", ["/namespaces/a%2Ftunings%2Fdemo/tunings/demo", "/namespaces/prod%2Ftunings/demo"])
def test_a_slash_in_disguise_asks_about_what_is_answered(rest: Rest, access: Asked, path: str) -> None:
    """Whatever the path looks like: nothing is read but what somebody was asked about."""
    answer = rest.get(path)
    asked = access.asked[-1]
    if answer.status_code == 200:
        assert (answer.json()["namespace"], answer.json()["name"]) == asked[1:]
    else:
        problem(answer, answer.status_code, "not-found" if answer.status_code == 404 else "invalid")


def test_the_whole_cluster_is_listed_in_pages_by_those_who_may_list_it(rest: Rest, access: Asked) -> None:
    seen, after = [], ""
    for _ in range(5):
        page = rest.get(f"/tunings?limit=2{after}").json()
        seen.append([(item["namespace"], item["name"]) for item in page["items"]])
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert [len(page) for page in seen] == [2, 1]
    assert sorted(key for page in seen for key in page) == [(namespace, "demo") for namespace in WHERE]
    assert set(access.asked) == {(Verb.READ, None, None)}
    access.refused = (None, None)
    problem(rest.get("/tunings"), 403, "forbidden")


def test_one_namespace_is_listed_in_pages(rest: Rest, namespaces: Namespaces, access: Asked) -> None:
    made = tuning()
    for name in ("alpha", "zeta"):
        named = made.model_copy(update={"metadata": made.metadata.model_copy(update={"name": name})})
        record = TuningRecord(tuning=named, spec_hash=named.spec.spec_hash, phase_since=START)
        namespaces.stores["prod"].save(record)
    first = rest.get("/namespaces/prod/tunings?limit=2").json()
    assert [(item["namespace"], item["name"]) for item in first["items"]] == [("prod", "alpha"), ("prod", "demo")]
    second = rest.get(f"/namespaces/prod/tunings?limit=2&after={first['next']}").json()
    assert ([item["name"] for item in second["items"]], second["next"]) == (["zeta"], None)
    assert rest.get("/namespaces/nowhere/tunings").json() == {"items": [], "next": None}
    assert [namespace for _, namespace, _ in access.asked] == ["prod", "prod", "nowhere"]


def test_names_that_are_none_are_named(rest: Rest) -> None:
    found = problem(rest.get("/namespaces/Prod/tunings/demo"), 422, "invalid")
    assert [error["field"] for error in found["errors"]] == ["path.namespace"]
    found = problem(rest.get("/tunings?after=a/b/c"), 422, "invalid")
    assert [error["field"] for error in found["errors"]] == ["query.after"]
    found = problem(rest.get("/namespaces/prod/tunings/nobody"), 404, "not-found")
    assert f"in namespace prod; GET {API}/namespaces/prod/tunings lists them" in found["detail"]
    problem(rest.get("/namespaces/prod/tunings/demo?limit=1"), 422, "invalid")


def test_a_controller_of_one_namespace_knows_its_own_by_name_too(tmp_path: Path, access: Asked) -> None:
    store = MemoryStore()
    store.save(waiting())
    rest = Rest(tmp_path, store, OneStore(store, "team"), authorizer=access)
    for path in ("/tunings/demo", "/namespaces/team/tunings/demo"):
        assert rest.get(path).json()["namespace"] == "team"
    for path in ("/tunings", "/namespaces/team/tunings"):
        assert [item["name"] for item in rest.get(path).json()["items"]] == ["demo"]
    found = problem(rest.get("/namespaces/other/tunings/demo"), 404, "not-found")
    assert "only those of namespace team" in found["detail"]
    assert access.asked[-1] == (Verb.READ, "other", "demo"), "whether there is anything is told to those who may"
    problem(rest.get("/namespaces/other/tunings"), 404, "not-found")
    problem(rest.post("/namespaces/other/tunings/demo/abort", {"reason": "x"}), 404, "not-found")


def test_on_one_machine_there_are_no_namespaces(tmp_path: Path) -> None:
    rest = Rest(tmp_path)
    assert rest.get("/tunings/demo").json()["namespace"] is None
    found = problem(rest.get("/namespaces/team/tunings/demo"), 404, "not-found")
    assert "there are no namespaces here" in found["detail"]
    back = rest.get("/tunings/demo/promotion").json()["howToGoBack"]
    assert any(f"POST {API}/tunings/demo/rollback" in line for line in back)


def test_the_promotion_tells_what_was_noted_when_the_approval_was_asked_for(rest: Rest, namespaces: Namespaces) -> None:
    at = "/namespaces/prod/tunings/demo"
    assert rest.get(f"{at}/promotion").json()["notes"] == []
    record = namespaces.stores["prod"].load("demo")
    assert record is not None
    noted = ("helm owns .spec.template; its next apply will set it back", f"--api-key {SECRET}")
    namespaces.stores["prod"].save(update(record, notes=noted))
    answer = rest.get(f"{at}/promotion")
    assert answer.json()["notes"][0] == noted[0]
    assert SECRET not in answer.text
