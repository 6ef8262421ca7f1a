"""What to do next with a Deployment in production: a pure function of what it is and what is wanted.

A Deployment has no partition. It is rolled one replica at a time by `maxSurge 0, maxUnavailable 1`, and is `paused` as
soon as as many replicas are updated as the plan wants; `minReadySeconds` holds Kubernetes back until that has happened.
If nobody pauses it (we are away), Kubernetes goes on by itself, one replica after the other, each by its readiness.

The rule above all others: what serves goes only while another one serves, and a known-good one only while another
known-good one serves. `maxUnavailable 1` keeps it for two replicas and more; a single one has the extra server beside
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tunewright.domain.candidate import Candidate
from tunewright.ports import TargetPlan


@dataclass(frozen=True)
class Extra:
    """The one server beside the replicas: the canary, or what carries a single replica's traffic meanwhile."""

    candidate: str  # hash
    ready: bool = False  # proven, and given requests
    retiring: bool = False
    drained: bool = False  # and has nothing left to answer, or has used its time up
    ending: bool = False
    fixed: bool = False
    """It can't be taken away now: its route may still send it requests and can't be asked, or we may not."""


@dataclass(frozen=True)
class View:
    """Production as the decision sees it."""

    replicas: int  # that the Deployment wants, whoever said so
    template: str | None  # hash of the knobs in its pod template; None: neither ours nor the baseline's
    observed: bool  # Kubernetes has seen this template
    paused: bool
    updated: int  # replicas on the present template
    ready: Mapping[str, int]  # proven servers by hash
    under_way: bool  # our rolling strategy is in force
    extra: Extra | None = None

    @property
    def serving(self) -> int:
        """Replicas that serve, of whatever configuration."""
        return sum(self.ready.values())


class Do(StrEnum):
    """One step."""

    WAIT = "wait"
    WRITE = "write"  # the pod template, with our rolling strategy
    RESTORE = "restore"  # the strategy as it was before
    EXTRA = "extra"  # create the extra server
    RETIRE = "retire"  # no new requests for it
    KEEP = "keep"  # give it requests again
    DELETE = "delete"  # the extra server


@dataclass(frozen=True)
class Action:
    """A step, and why."""

    do: Do
    reason: str
    candidate: Candidate | None = None
    paused: bool = False


def decide(view: View, plan: TargetPlan) -> Action:
    """The one step to take now."""
    return _Roll(view, plan).next()


def settled(view: View, plan: TargetPlan) -> bool:
    """Whether production is exactly as planned."""
    roll = _Roll(view, plan)
    extra = view.extra
    as_planned = extra is None if not plan.canary else extra is not None and extra.ready and roll.fits(extra)
    held = view.paused == roll.partial
    return as_planned and roll.done and held and roll.next().do is Do.WAIT


class _Roll:
    def __init__(self, view: View, plan: TargetPlan) -> None:
        self.view, self.plan = view, plan
        self.wanted_updated = min(plan.updated, view.replicas)
        self.partial = 0 < self.wanted_updated < view.replicas
        # Scaled to nothing, it keeps for its return what it was updated to.
        forward = self.wanted_updated > 0 or (view.replicas == 0 and plan.updated > 0)
        self.wanted = plan.candidate if forward else plan.baseline
        self.good = {plan.baseline.hash}
        if self.wanted_updated and not self.partial:
            self.good.add(plan.candidate.hash)
        self.extra_wanted = plan.candidate if plan.canary else self._surge()

    @property
    def on_template(self) -> bool:
        """Whether the Deployment says what it is to say, and Kubernetes knows."""
        return self.view.template == self.wanted.hash and self.view.observed

    @property
    def done(self) -> bool:
        """Whether the replicas are as planned, and all of them serve."""
        view = self.view
        if not self.on_template or view.serving < view.replicas:
            return False
        ready = view.ready.get(self.wanted.hash, 0)
        return ready >= (self.wanted_updated if self.partial else view.replicas)

    @property
    def _fixed(self) -> bool:
        return self.view.extra is not None and self.view.extra.fixed

    @property
    def _moving_on(self) -> bool:
        """Whether Kubernetes rolls what was written already: that is paused as ever, and never begun."""
        return self.view.template == self.wanted.hash and not self.view.paused

    def fits(self, extra: Extra) -> bool:
        """Whether the extra server is what it is to be."""
        return self.extra_wanted is not None and extra.candidate == self.extra_wanted.hash

    def next(self) -> Action:
        """The extra server first: it carries the traffic."""
        action = self._next_of_extra()
        if action is None:
            action = self._next_of_template()
        if action is None:
            action = self._next_when_done()
        return action

    def _surge(self) -> Candidate | None:
        """A single replica that serves is to be replaced without a canary: the same configuration beside it first."""
        view = self.view
        if view.replicas != 1 or self.done or view.template is None:
            return None
        begun = view.extra is not None and view.extra.candidate == self.wanted.hash and not view.extra.ending
        replacing = view.serving > 0 and view.template != self.wanted.hash
        return self.wanted if begun or replacing else None

    def _next_of_extra(self) -> Action | None:
        extra = self.view.extra
        if extra is None:
            wanted = self.extra_wanted
            return Action(Do.EXTRA, "the extra server is to come", wanted) if wanted is not None else None
        if extra.ending:
            return Action(Do.WAIT, "the extra server ends") if self.extra_wanted is not None else None
        if extra.fixed:
            return None  # it stays as it is, and what does not depend on it goes on
        if self.fits(extra):
            return Action(Do.KEEP, "the extra server is wanted again") if extra.retiring else None
        if not extra.ready and not extra.retiring:
            return Action(Do.DELETE, "the extra server serves nobody and is not wanted")
        if not self._may_go(extra):
            return Action(Do.KEEP, "nothing else serves any more") if extra.retiring else None
        if not extra.retiring:
            return Action(Do.RETIRE, "the extra server is over")
        if extra.drained:
            return Action(Do.DELETE, "the extra server is drained")
        return Action(Do.WAIT, "the extra server answers its last requests")

    def _may_go(self, extra: Extra) -> bool:
        if self.view.template is None:  # somebody else's configuration: theirs to answer for
            return self.view.serving > 0
        if extra.candidate in self.good:
            return any(self.view.ready.get(each, 0) for each in self.good)
        return self.view.serving > 0

    def _next_of_template(self) -> Action | None:
        view = self.view
        if view.template is None:
            return Action(Do.WAIT, "somebody else changed the Deployment")
        if self._fixed and self.wanted_updated and not self._moving_on:
            return Action(Do.WAIT, "nothing goes forward while the extra server can't be taken away")
        if view.template != self.wanted.hash:
            obstacle = self._obstacle()
            if obstacle:
                return Action(Do.WAIT, obstacle)
            what = "to the candidate" if self.wanted_updated else "back to the baseline"
            return Action(Do.WRITE, f"rolling {what}", self.wanted)
        if not view.observed:
            return Action(Do.WAIT, "Kubernetes has not seen the change yet")
        if self.partial and view.updated >= self.wanted_updated:
            return None if view.paused else Action(Do.WRITE, "enough replicas are updated", self.wanted, paused=True)
        if not view.paused:
            return None
        if self.wanted_updated and view.serving < view.replicas:
            return Action(Do.WAIT, f"{view.serving} of {view.replicas} replicas serve")
        return Action(Do.WRITE, "the next replica", self.wanted)

    def _obstacle(self) -> str | None:
        """Why the template may not be written yet."""
        view, extra = self.view, self.view.extra
        if view.replicas == 1:
            beside = extra is not None and extra.ready and not extra.retiring and extra.candidate in self.good
            if view.serving and not beside:
                return "the extra server that is to carry the traffic is not ready"
            return None
        # Forward only from a whole production. Back at once: Kubernetes takes what does not serve first.
        if self.wanted_updated and view.serving < view.replicas:
            return f"{view.serving} of {view.replicas} replicas serve"
        return None

    def _next_when_done(self) -> Action:
        view = self.view
        if not self.done:
            return Action(Do.WAIT, f"{view.serving} of {view.replicas} replicas serve")
        gone = view.extra is None or self._fixed
        if view.under_way and not self.partial and not self.plan.canary and gone:
            return Action(Do.RESTORE, "the roll is over", self.wanted)
        return Action(Do.WAIT, f"{view.serving} of {view.replicas} replicas serve")
