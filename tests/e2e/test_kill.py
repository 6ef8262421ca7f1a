"""`kill -9` of the agent, for real: at random moments, and right after something was written; then started again."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import NAME, PATIENCE, Agent, Box, answers, clients, new_box

from tunewright.domain.phases import TERMINAL
from tunewright.domain.state import TrialRecord

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RANDOM_KILLS = 8
LONGEST_LIFE = 6
"""In changes of the store, so that it means the same on a slow machine: a whole quick tuning makes some forty."""


def end_of(box: Box, agent: Agent, traffic_failures: dict[str, int]) -> None:
    """The end state that every schedule of kills must come to."""
    record, trials = box.record(), box.trials()
    assert record is not None
    assert record.phase == "Promoted", (record.phase, record.sentence, agent.output())
    assert all(trial.phase == "Done" for trial in trials)
    assert all(trial.outcome == "complete" for trial in trials), [t.failure for t in trials if t.failure]
    searched = [trial.candidate.hash for trial in trials if trial.purpose == "search"]
    assert len(searched) == len(set(searched)) == 2, "a finished trial was repeated"
    assert record.winner is not None
    assert record.winner.values.get("max_num_seqs") != 4
    assert traffic_failures == {}, "requests failed through the proxy"
    assert answers(box.url)
    serving = [mark for mark in box.marks() if "/servers/" in mark]
    assert len(serving) == 2, f"two replicas, and nothing beside them: {box.marks()}"
    assert not any("/spare/" in mark or "/load/" in mark for mark in box.marks())
    box.command("stop", str(box.file))
    assert box.processes() == []
    assert box.listeners() == []


class Watch:
    """Notes every trial as it was when it was first seen done: it must never change again."""

    def __init__(self) -> None:
        self.done: dict[str, str] = {}

    def look(self, trials: list[TrialRecord]) -> None:
        for trial in trials:
            if trial.phase == "Done":
                text = trial.model_dump_json()
                assert self.done.setdefault(trial.id, text) == text, f"{trial.id} was run again after it was done"
        gone = set(self.done) - {trial.id for trial in trials}
        assert not gone, f"{gone} are lost"


def approve_when_asked(box: Box) -> bool:
    if box.phase() != "AwaitingApproval":
        return False
    box.command("approve", NAME, code=None)  # refused the second time, while the first is not taken up yet: no matter
    return True


def live(box: Box, agent: Agent, watch: Watch, until: Callable[[], bool]) -> bool:
    """Let the agent live until then; False when it ended by itself before."""
    deadline, asked = time.monotonic() + PATIENCE, False
    while not until():
        if agent.process.poll() is not None:
            assert agent.process.returncode == 0, agent.output()
            return False
        watch.look(box.trials())
        asked = asked or approve_when_asked(box)
        assert time.monotonic() < deadline, agent.output()
        time.sleep(0.02)
    return True


def changes(box: Box, wanted: int) -> Callable[[], bool]:
    """Becomes true once so many changes of phase, of the tuning or of a trial, were seen."""
    seen = -1
    before: object = None

    def look() -> bool:
        nonlocal seen, before
        now = (box.phase(), [(t.id, t.phase, t.attempt) for t in box.trials()])
        seen += now != before
        before = now
        return seen >= wanted

    return look


def test_killed_at_random_moments(tmp_path: Path) -> None:
    dice = random.Random(20)
    with new_box(tmp_path) as box:
        agent, watch, kills = box.tune(), Watch(), 0
        agent.until(lambda: answers(box.url), "production answers")
        with clients(box) as traffic:
            phases = []
            for _ in range(RANDOM_KILLS):
                lived = changes(box, dice.randint(1, LONGEST_LIFE))
                if not live(box, agent, watch, lived):
                    break
                phases.append(box.phase())
                time.sleep(dice.uniform(0.0, 0.5))  # between two changes, too
                agent.kill()
                kills += 1
                assert answers(box.url), "production must answer while no agent lives"
                agent = box.tune()
            live(box, agent, watch, lambda: False)
            told = traffic.end()
        assert kills >= 6, f"only {kills} kills, in {phases}: the tuning was over too soon"
        end_of(box, agent, told["failures"])


def moments() -> list[tuple[str, Callable[[Box], bool]]]:
    """States of the store, each followed by an action outside: the agent is killed as soon as it is seen."""

    def trial_is(purpose: str, phase: str) -> Callable[[Box], bool]:
        return lambda box: any(t.purpose == purpose and t.phase == phase for t in box.trials())

    def phase_is(phase: str) -> Callable[[Box], bool]:
        return lambda box: box.phase() == phase

    def canary_answers(box: Box) -> bool:
        record = box.record()
        return record is not None and record.promotion is not None and record.promotion.canary_since is not None

    def rolled(replicas: int) -> Callable[[Box], bool]:
        def seen(box: Box) -> bool:
            record = box.record()
            return record is not None and record.promotion is not None and record.promotion.updated >= replicas

        return seen

    return [
        ("the profile is learned", phase_is("Baselining")),
        ("the baseline is being started", trial_is("baseline", "Starting")),
        ("the baseline is being measured", trial_is("baseline", "Measuring")),
        ("a candidate is being started", trial_is("search", "Starting")),
        ("a candidate is being stopped", trial_is("search", "Stopping")),
        ("confirming began", phase_is("Confirming")),
        ("a finalist is being measured", trial_is("confirm", "Measuring")),
        ("the canary is being started", phase_is("Canary")),
        ("the canary answers", canary_answers),
        ("the roll began", rolled(1)),
        ("the second replica is being replaced", rolled(2)),
        ("it is watched", phase_is("Watching")),
    ]


def test_killed_the_moment_something_was_written(tmp_path: Path) -> None:
    with new_box(tmp_path) as box:
        agent, watch, hit = box.tune(), Watch(), []
        agent.until(lambda: answers(box.url), "production answers")
        with clients(box) as traffic:
            for what, seen in moments():
                if not live(box, agent, watch, lambda seen=seen: seen(box)):  # type: ignore[misc]
                    break
                agent.kill()
                hit.append(what)
                agent = box.tune()
            live(box, agent, watch, lambda: False)
            told = traffic.end()
        assert len(hit) >= len(moments()) - 1, f"killed only when {hit}"  # the last may be over too soon to be seen
        end_of(box, agent, told["failures"])


def test_killed_on_the_way_back(tmp_path: Path) -> None:
    with new_box(tmp_path) as box:
        agent, watch = box.tune(), Watch()
        agent.until(lambda: answers(box.url), "production answers")
        with clients(box) as traffic:
            record = box.record

            def half_rolled() -> bool:
                found = record()
                return found is not None and found.promotion is not None and found.promotion.updated >= 1

            assert live(box, agent, watch, half_rolled)
            box.command("rollback", NAME, "--reason", "enough")
            for _ in range(3):
                agent.until(lambda: box.phase() in ("RollingBack", "RolledBack"), "it goes back")
                agent.kill()
                assert answers(box.url)
                agent = box.tune()
            assert agent.wait() == 3, agent.output()
            told = traffic.end()
        found = record()
        assert found is not None
        assert found.phase == "RolledBack"
        assert found.phase in TERMINAL
        assert "enough" in found.sentence
        assert told["failures"] == {}
        serving = [mark for mark in box.marks() if "/servers/" in mark]
        assert len(serving) == 2
        box.command("stop", str(box.file))
        assert box.processes() == []
        assert box.listeners() == []


def test_production_that_dies_comes_back_and_is_never_without_a_server(tmp_path: Path) -> None:
    """The agent itself is not killed here: a replica is, while its tuning goes on."""
    import os

    with new_box(tmp_path) as box:
        agent = box.tune()
        agent.until(lambda: answers(box.url) and box.phase() not in ("", "Pending"), "production is whole")
        victims = [pid for pid, mark in box.marked().items() if "/servers/replica-0." in mark]
        os.kill(victims[0], signal.SIGKILL)
        agent.until(
            lambda: any("/servers/replica-0.2/" in mark for mark in box.marks()), "a new server takes its place"
        )
        assert answers(box.url)
        assert agent.interrupt() == 130
        box.command("stop", str(box.file))
        assert box.processes() == []
