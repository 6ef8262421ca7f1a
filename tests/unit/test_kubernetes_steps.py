"""The decision on the next step of a roll: every view that can be, against every plan."""

from itertools import product

import pytest

from tunewright.domain.candidate import Candidate
from tunewright.platform.kubernetes.steps import Action, Do, Extra, View, decide, settled
from tunewright.ports import TargetPlan

BASE, NEW = Candidate(values={"max_num_seqs": 4}), Candidate(values={"max_num_seqs": 8})
HASHES = (BASE.hash, NEW.hash)


def plans(replicas: int) -> list[TargetPlan]:
    return [TargetPlan(BASE, NEW, updated, canary) for updated in range(replicas + 1) for canary in (False, True)]


def extras() -> list[Extra | None]:
    states = [
        {"ready": True},
        {},
        {"retiring": True},
        {"retiring": True, "drained": True},
        {"ending": True},
        {"ready": True, "fixed": True},
        {"fixed": True},
        {"retiring": True, "fixed": True},
    ]
    return [None, *(Extra(each, **state) for each in HASHES for state in states)]


def views(replicas: int) -> list[View]:
    ready = [{BASE.hash: old, NEW.hash: new} for old in range(replicas + 1) for new in range(replicas + 1 - old)]
    return [
        View(replicas, template, observed, paused, updated, ready_now, under_way, extra)
        for template, observed, paused, updated, ready_now, under_way, extra in product(
            (*HASHES, None), (True, False), (True, False), range(replicas + 1), ready, (True, False), extras()
        )
    ]


def good(plan: TargetPlan, replicas: int) -> set[str]:
    return {BASE.hash} | ({NEW.hash} if plan.updated >= replicas else set())


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_that_serves_goes_while_nothing_else_serves(replicas: int) -> None:
    for plan, view in product(plans(replicas), views(replicas)):
        action = decide(view, plan)
        told = f"{plan} {view} {action}"
        known_good = {each: view.ready.get(each, 0) for each in good(plan, replicas)}
        extra = view.extra
        if extra is not None and extra.fixed:
            assert action.do not in (Do.RETIRE, Do.KEEP, Do.DELETE, Do.EXTRA), told
            forward = plan.updated > 0 and (action.candidate == NEW != view.template or view.paused)
            assert not (action.do is Do.WRITE and forward and not action.paused), told
        if action.do in (Do.RETIRE, Do.DELETE) and extra is not None:
            others = sum(known_good.values()) if extra.candidate in known_good else view.serving
            if view.template is None:
                others = view.serving
            assert others or not (extra.ready or extra.retiring), told
            assert action.do is Do.RETIRE or not extra.ready, f"drained first: {told}"
        if action.do is Do.WRITE and action.candidate is not None and action.candidate.hash != view.template:
            assert view.template is not None, f"somebody else's is never overwritten: {told}"
            if replicas == 1 and view.serving:
                assert extra is not None, told
                assert extra.ready, told
                assert extra.candidate in known_good, told


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_write_is_what_the_plan_says_and_settled_is_only_what_it_says(replicas: int) -> None:
    reached = 0
    for plan, view in product(plans(replicas), views(replicas)):
        action = decide(view, plan)
        wanted = NEW if plan.updated else BASE
        if action.do in (Do.WRITE, Do.RESTORE):
            assert action.candidate == wanted
            assert not action.paused or 0 < plan.updated < replicas
        if settled(view, plan):
            reached += 1
            assert action.do is Do.WAIT
            assert (view.template, view.serving, view.observed) == (wanted.hash, replicas, True)
            assert view.ready[NEW.hash] >= plan.updated
            assert plan.updated or not view.ready[NEW.hash]
            assert view.paused == (0 < plan.updated < replicas)
            assert (view.extra is not None) == plan.canary
    assert reached, "it can be reached at all"


def test_kubernetes_is_held_and_let_go_replica_by_replica() -> None:
    plan = TargetPlan(BASE, NEW, 1)
    view = View(3, NEW.hash, True, False, 0, {BASE.hash: 3}, True)
    assert decide(view, plan).do is Do.WAIT
    view = View(3, NEW.hash, True, False, 1, {BASE.hash: 2}, True)
    assert decide(view, plan) == Action(Do.WRITE, "enough replicas are updated", NEW, paused=True)
    view = View(3, NEW.hash, True, True, 1, {BASE.hash: 2}, True)
    assert decide(view, plan).do is Do.WAIT
    assert not settled(view, plan), "the new one does not answer yet"
    assert decide(view, TargetPlan(BASE, NEW, 2)).do is Do.WAIT
    view = View(3, NEW.hash, True, True, 1, {BASE.hash: 2, NEW.hash: 1}, True)
    assert settled(view, plan)
    assert decide(view, TargetPlan(BASE, NEW, 2)) == Action(Do.WRITE, "the next replica", NEW)


def test_going_back_does_not_wait_for_what_is_broken() -> None:
    view = View(2, NEW.hash, True, True, 1, {BASE.hash: 1}, True)
    assert decide(view, TargetPlan(BASE, NEW, 0)) == Action(Do.WRITE, "rolling back to the baseline", BASE)
    view = View(1, NEW.hash, True, False, 1, {}, True)
    assert decide(view, TargetPlan(BASE, NEW, 0)).do is Do.WRITE


def test_what_can_not_be_taken_away_holds_the_way_forward_and_not_the_way_back() -> None:
    extra = Extra(NEW.hash, ready=True, fixed=True)
    view = View(3, NEW.hash, True, True, 1, {BASE.hash: 2, NEW.hash: 1}, True, extra)
    assert decide(view, TargetPlan(BASE, NEW, 2, canary=True)).do is Do.WAIT
    assert decide(view, TargetPlan(BASE, NEW, 0)) == Action(Do.WRITE, "rolling back to the baseline", BASE)
    back = View(3, BASE.hash, True, False, 3, {BASE.hash: 3}, True, extra)
    assert decide(back, TargetPlan(BASE, NEW, 0)) == Action(Do.RESTORE, "the roll is over", BASE)
    assert not settled(back, TargetPlan(BASE, NEW, 0)), "the extra server is left"


def test_production_that_was_scaled_to_nothing_keeps_what_it_runs() -> None:
    """As by an autoscaler at night: in the morning it is to come up with what was promoted."""
    promoted = TargetPlan(BASE, NEW, updated=2)
    view = View(0, NEW.hash, observed=True, paused=False, updated=0, ready={}, under_way=False)
    assert decide(view, promoted).do is Do.WAIT
    back = TargetPlan(BASE, NEW, updated=0)
    assert decide(view, back) == Action(Do.WRITE, "rolling back to the baseline", BASE)
