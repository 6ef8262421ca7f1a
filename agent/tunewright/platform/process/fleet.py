"""What to do next with the production servers: a pure function of what they are and what is wanted.

The rule above all others: a ready server leaves only while another one serves, and one of a known-good configuration
only while another of a known-good configuration serves. It is asked again until the very moment of stopping.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tunewright.domain.candidate import Candidate
from tunewright.ports import ServerPhase, TargetPlan

CANARY, SURGE = "canary", "surge"
"""Places beside the replicas; both are on the spare's GPU, so only one of them at a time.

The surge server carries the traffic of a single replica while that is replaced.
"""


PATIENCE = 10.0
"""Seconds that a ready server may leave /health unanswered, as a busy one does, before its requests go to others."""

_LARGEST_SHARE = 0.95
"""Of the canary: the stable servers stay warm, and are there when it fails."""


def replica_slot(index: int) -> str:
    """The place of one replica."""
    return f"replica-{index}"


@dataclass(frozen=True)
class View:
    """One server as the decision sees it."""

    name: str
    slot: str
    candidate: str  # hash
    current: bool  # its command is, but for the knobs, the one that is wanted
    phase: ServerPhase
    retiring: bool = False  # gets no new requests
    drained: bool = False  # and has none left, or has used its time up
    silent_seconds: float = 0.0  # that /health has been left unanswered

    @property
    def staying(self) -> bool:
        """Ready, and to be given requests."""
        return self.phase is ServerPhase.READY and not self.retiring

    @property
    def serving(self) -> bool:
        """The same, and it answers: others may go because this one is there."""
        return self.staying and self.silent_seconds <= PATIENCE


class Do(StrEnum):
    """A step with one server or place."""

    START = "start"
    RETIRE = "retire"  # no new requests from now on
    KEEP = "keep"  # give it requests again
    STOP = "stop"


@dataclass(frozen=True)
class Action:
    """One step; `name` is the server's, or the place's for START."""

    do: Do
    name: str
    reason: str
    candidate: Candidate | None = None


def wanted_servers(plan: TargetPlan, replicas: int) -> dict[str, Candidate]:
    """The candidate that each place is to run."""
    wanted = {replica_slot(i): plan.candidate if i < plan.updated else plan.baseline for i in range(replicas)}
    if plan.canary:
        wanted[CANARY] = plan.candidate
    return wanted


def known_good(plan: TargetPlan, replicas: int) -> frozenset[str]:
    """Hashes of the configurations that may be relied on: the candidate's only once all replicas are to run it."""
    good = {plan.baseline.hash}
    if plan.updated >= replicas:
        good.add(plan.candidate.hash)
    return frozenset(good)


def decide(
    servers: Sequence[View], plan: TargetPlan, replicas: int, may_start: Callable[[str, str], bool]
) -> list[Action]:
    """The steps to take now. `may_start(place, hash)` says whether another attempt is due there."""
    fleet = _Fleet(servers, plan, replicas)
    actions = list(fleet.endings())
    retirement = fleet.retirement()
    if retirement is not None:
        actions.append(retirement)
    actions.extend(fleet.starts(may_start))
    return actions


def settled(servers: Sequence[View], plan: TargetPlan, replicas: int) -> bool:
    """Whether production is exactly as planned."""
    fleet = _Fleet(servers, plan, replicas)
    places = sorted(view.slot for view in servers)
    return places == sorted(wanted_servers(plan, replicas)) and all(v.serving and fleet.fits(v) for v in servers)


def weights(servers: Sequence[View], canary_share: float) -> dict[str, float]:
    """What share of the requests each ready server is to get. One that does not answer gets none, if another does."""
    staying = [view for view in servers if view.staying]
    routed = [view for view in staying if view.serving] or staying
    canary = [view.name for view in routed if view.slot == CANARY]
    stable = [view.name for view in routed if view.slot != CANARY]
    share = 0.0 if not canary else min(max(canary_share, 0.0), _LARGEST_SHARE) if stable else 1.0
    each = {view.name: 0.0 for view in servers if view.phase is ServerPhase.READY}
    each |= dict.fromkeys(canary, share)
    return each | {name: round((1.0 - share) / len(stable), 6) for name in stable}


class _Fleet:
    def __init__(self, servers: Sequence[View], plan: TargetPlan, replicas: int) -> None:
        self.servers = servers
        self.replicas = [replica_slot(i) for i in range(replicas)]
        self.good = known_good(plan, replicas)
        self.wanted: Mapping[str, Candidate] = wanted_servers(plan, replicas)
        self.serving = [v for v in servers if v.serving]
        if self._surge_needed():
            self.wanted = {**self.wanted, SURGE: self.wanted[self.replicas[0]]}

    def fits(self, view: View) -> bool:
        """Whether it is what its place is to run."""
        wanted = self.wanted.get(view.slot)
        return wanted is not None and wanted.hash == view.candidate and view.current

    def endings(self) -> Iterable[Action]:
        """Servers that serve nobody and are not wanted, and those that were retired."""
        for view in self.servers:
            if view.phase is ServerPhase.FAILED:
                yield Action(Do.STOP, view.name, "it failed")
            elif view.phase is ServerPhase.STARTING and not self.fits(view):
                yield Action(Do.STOP, view.name, "it is not wanted any more")
            elif view.phase is ServerPhase.READY and view.retiring:
                if self.fits(view):
                    yield Action(Do.KEEP, view.name, "it is wanted again")
                elif not self._may_go(view):
                    yield Action(Do.KEEP, view.name, "no other known-good server is ready any more")
                elif view.drained:
                    yield Action(Do.STOP, view.name, "it is drained")

    def retirement(self) -> Action | None:
        """One ready server that is to go, the canary before the replicas; one at a time."""
        if any(view.retiring for view in self.servers):
            return None
        order = {slot: index for index, slot in enumerate((CANARY, SURGE, *self.replicas))}
        for view in sorted(self.serving, key=lambda v: order.get(v.slot, len(order))):
            if not self.fits(view) and self._may_go(view) and self._calm(view):
                return Action(
                    Do.RETIRE, view.name, "it is to be replaced" if view.slot in self.wanted else "it is over"
                )
        return None

    def starts(self, may_start: Callable[[str, str], bool]) -> Iterable[Action]:
        """Places that are empty: what was there before is proven gone."""
        taken = {view.slot for view in self.servers}
        if taken & {CANARY, SURGE}:
            taken |= {CANARY, SURGE}
        for slot, candidate in self.wanted.items():
            if slot not in taken and may_start(slot, candidate.hash):
                yield Action(Do.START, slot, "its place is empty", candidate)

    def _may_go(self, view: View) -> bool:
        others = [other for other in self.serving if other is not view]
        if view.candidate in self.good:
            return any(other.candidate in self.good for other in others)
        return bool(others)

    def _calm(self, view: View) -> bool:
        """No other replica is missing. Only what is not known good may go earlier, for a known-good one serves."""
        if view.slot not in self.replicas:
            return True
        serving = {other.slot for other in self.serving}
        missing = [slot for slot in self.replicas if slot != view.slot and slot not in serving]
        good_serves = any(o.candidate in self.good for o in self.serving if o is not view)
        return not missing or (view.candidate not in self.good and good_serves)

    def _surge_needed(self) -> bool:
        """A single replica is to be replaced, and no canary of a known-good configuration is to carry its traffic."""
        if len(self.replicas) != 1:
            return False
        mine = [view for view in self.servers if view.slot == self.replicas[0]]
        if any(view.serving and self.fits(view) for view in mine):
            return False
        if any(view.slot == SURGE and view.phase in (ServerPhase.STARTING, ServerPhase.READY) for view in self.servers):
            return True
        canary = self.wanted.get(CANARY)
        if canary is not None and canary.hash in self.good:
            return False
        return any(view.serving and not self._may_go(view) for view in mine)
