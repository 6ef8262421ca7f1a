"""`tunewright tune` on a person's own box: stopped and started again, approved, edited, rolled back, stopped."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from agents import NAME, Agent, Box, answers, clients, new_box, quick

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with new_box(tmp_path) as made:
        yield made


def api_of(agent: Agent) -> tuple[str, Path]:
    """URL and token file, as they are printed."""
    found = agent.until(
        lambda: re.search(r"REST API: (http://\S+) with the token in (\S+?);", agent.output().replace("\n", " ")),
        "the API is told",
    )
    return found[1], Path(found[2])


def done(box: Box) -> list[str]:
    return [trial.id for trial in box.trials() if trial.phase == "Done"]


def test_interrupted_and_started_again_it_goes_on_and_is_approved_by_the_command(box: Box) -> None:
    agent = box.tune()
    agent.until(lambda: answers(box.url), "production answers")
    with clients(box) as traffic:
        agent.until(lambda: len(done(box)) >= 1 and box.phase() == "Searching", "the search goes on")
        assert agent.interrupt() == 130
        assert "the same command goes on" in agent.output().replace("\n", " ").lower()
        before = {trial.id: trial.model_dump_json() for trial in box.trials() if trial.phase == "Done"}
        assert answers(box.url), "production must keep serving when the agent stops"
        assert not any("/spare/" in mark or "/load/" in mark for mark in box.marks()), (
            "the spare must be free once the agent has stopped"
        )

        agent = box.tune()
        agent.until(lambda: box.phase() == "AwaitingApproval", "it waits for approval")
        now = {trial.id: trial.model_dump_json() for trial in box.trials()}
        assert before.items() <= now.items(), "finished trials were run again"
        searched = [trial.candidate.hash for trial in box.trials() if trial.purpose == "search"]
        assert len(searched) == len(set(searched))

        refused = box.command("approve", NAME, "--candidate", "0000000000", code=5)
        assert "the candidate is" in refused
        shown = json.loads(box.command("show", NAME, "--json"))
        assert shown["phase"] == "AwaitingApproval"
        assert "is noted" in box.command("approve", NAME, "--reason", "as good as we hoped")
        assert agent.wait() == 0, agent.output()
        told = traffic.end()
    record = box.record()
    assert record is not None
    assert record.phase == "Promoted"
    assert [(d.action, d.reason) for d in record.decisions] == [("approve", "as good as we hoped")]
    assert told["failures"] == {}
    assert told["answered"] == told["sent"] > 50
    assert answers(box.url), "production goes on after the end"
    assert "approve" in box.command("approve", NAME, code=5)  # nothing waits any more

    assert "production is stopped" in box.command("stop", str(box.file))
    assert box.processes() == []
    assert box.listeners() == []
    assert not answers(box.url)


def test_approved_over_rest_and_rolled_back_by_the_command(box: Box) -> None:
    agent = box.tune("--keep-going")
    url, token_file = api_of(agent)
    assert token_file.stat().st_mode & 0o777 == 0o600
    headers = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
    tuning = f"{url}/api/v1alpha1/tunings/{NAME}"
    agent.until(lambda: answers(box.url), "production answers")
    with clients(box) as traffic:
        agent.until(lambda: box.phase() == "AwaitingApproval", "it waits for approval")
        assert httpx.get(f"{tuning}/promotion", timeout=10.0).status_code == 401
        bind = httpx.get(f"{tuning}/promotion", headers=headers, timeout=10.0).json()["bind"]
        stale = httpx.post(
            f"{tuning}/approve", headers=headers, json={**bind, "spec": "0000000000", "reason": "x"}, timeout=10.0
        )
        assert (stale.status_code, stale.json()["type"].rpartition("/")[2]) == (409, "stale")
        assert box.phase() == "AwaitingApproval"
        taken = httpx.post(f"{tuning}/approve", headers=headers, json={**bind, "reason": "by REST"}, timeout=10.0)
        assert taken.status_code == 202
        agent.until(lambda: box.phase() == "Promoted", "it is promoted")
        assert "RolledBack" not in agent.output()

        box.command("rollback", NAME, "--reason", "the on-call asked for it")
        agent.until(lambda: box.phase() == "RolledBack", "it is rolled back")
        told = traffic.end()
    assert told["failures"] == {}
    assert agent.interrupt() == 3  # as a tuning ends that a person took back
    record = box.record()
    assert record is not None
    assert "the on-call asked for it" in record.sentence
    box.command("stop", str(box.file))
    assert box.processes() == []
    assert box.listeners() == []


def test_an_edited_file_starts_anew_only_when_results_depend_on_it(box: Box) -> None:
    agent = box.tune()
    agent.until(lambda: answers(box.url), "production answers")
    with clients(box) as traffic:
        agent.until(lambda: len(done(box)) >= 1, "the baseline is measured")
        agent.interrupt()
        before = done(box)
        box.write(retune={"mode": "never", "drift": "50%"})  # nothing that a result depends on
        agent = box.tune()
        agent.until(lambda: len(done(box)) > len(before), "it goes on")
        assert set(before) <= set(done(box))
        assert "starting anew" not in agent.output()
        agent.interrupt()

        box.write(slo={"ttftP95": "29s", "errorRate": "1%"})
        agent = box.tune()
        agent.until(lambda: "starting anew" in agent.output(), "it starts anew")
        agent.until(lambda: box.phase() == "Baselining", "it learns the traffic again")
        assert done(box) == []
        box.command("abort", NAME)
        assert agent.wait() == 3
        assert "Production was not touched" in agent.output().replace("\n", " ")
        assert answers(box.url)
        assert traffic.end()["failures"] == {}
    box.file.write_text("apiVersion: nonsense\n")
    assert "apiVersion" in box.command("tune", str(box.file), code=2)
    assert answers(box.url), "a file that can't be read must not touch production"
    box.write()
    box.command("stop", str(box.file))
    assert box.processes() == []


def test_without_production_a_command_is_tuned_on_the_spare_alone(box: Box) -> None:
    target = quick(box.proxy_port, box.first_port)["spec"]["target"] | {"replicas": 0}
    box.write(target=target, promotion={"mode": "recommend"})
    agent = box.tune()
    agent.until(lambda: len(done(box)) >= 1, "the baseline is measured")
    assert agent.interrupt() == 130
    assert "keeps serving" not in agent.output().replace("\n", " ")
    assert box.processes() == [], "there is nothing to keep"

    agent = box.tune()
    assert agent.wait() == 0, agent.output()
    assert box.phase() == "Recommended"
    assert [trial.purpose for trial in box.trials()].count("baseline") == 1
    assert box.processes() == []
    assert box.listeners() == []
    assert not (box.state / NAME / "production").exists()
    assert "max_num_seqs" in (box.state / NAME / "report.html").read_text()
