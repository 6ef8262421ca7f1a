"""Who acts: leader election by a Lease (coordination.k8s.io/v1), timed by the monotonic clock alone.

The clocks of two machines are never compared: a candidate takes the Lease over once it has itself seen it unchanged
for its whole duration. The leader stops acting `renew_deadline` seconds after it began its last good renewal, which is
before anybody can take over, however long its calls hang.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import AlreadyExists, KubeConflict, KubeError, NotFound
from tunewright.kube.resources import LEASES
from tunewright.kube.times import format_micro_time
from tunewright.ports import Clock, Stop

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimes:
    """In seconds: how long a Lease holds, when its holder stops acting without a renewal, and between two tries."""

    duration: int = 15
    renew_deadline: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not self.retry < self.renew_deadline < self.duration:
            raise ValueError("retry must be below renew_deadline, and that below duration")


class Role(StrEnum):
    """Where we are."""

    CANDIDATE = "candidate"  # never led; waits
    LEADER = "leader"  # holds the Lease; whether it may act now, `acting` says
    LOST = "lost"  # led, and saw another holder: for good


class LeaderElection:
    """Holds one Lease. `acting` may be asked from any thread, before every write; the rest is of one thread.

    Its own client must be without the fence that asks `acting`.
    """

    def __init__(
        self,
        kube: Kube,
        clock: Clock,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """`identity` must be of this very process (pod name and a random part): a namesake would lead beside it.

        `labels` tell others what its holder does.
        """
        self._kube, self._clock, self._namespace, self._name = kube, clock, namespace, name
        self._labels = dict(labels or {})
        self.identity, self.times = identity, times or LeaseTimes()
        self.role = Role.CANDIDATE
        self.holder = ""
        self.term = 0
        """Counts the times that we began to act: what was remembered before may have been changed by others since."""
        self._renewed: float | None = None
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = 0.0

    @property
    def acting(self) -> bool:
        """Whether we may act now: we lead, and our last renewal is younger than the renew deadline."""
        renewed = self._renewed
        if self.role is not Role.LEADER or renewed is None:
            return False
        return self._clock.monotonic() - renewed < self.times.renew_deadline

    def run(self, stop: Stop) -> None:
        """Try until `stop` (then the Lease is released), or until the leadership is lost."""
        while not stop.is_set() and self.role is not Role.LOST:
            self.step()
            stop.wait(self.times.retry)
        self.release()

    def step(self) -> None:
        """One try to acquire or renew. A failure is logged, and changes nothing but the time that runs out."""
        if self.role is Role.LOST:
            return
        before = self._clock.monotonic()
        try:
            self._try(before)
        except KubeConflict:
            pass  # somebody else was quicker: the next try sees who
        except KubeError as error:
            _log.warning("the Lease %s could not be renewed: %s", self._name, error)

    def release(self) -> None:
        """Give the Lease back, so that the next one need not wait; stops acting first. Without it, it just runs out."""
        if self.role is not Role.LEADER:
            return
        self._renewed, self.role = None, Role.CANDIDATE
        try:
            lease = self._kube.get(LEASES, self._name, self._namespace, total=self._patience)
            if lease.get("spec", {}).get("holderIdentity") == self.identity:
                spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._now()}
                self._kube.replace(LEASES, {**lease, "spec": spec}, self._namespace, total=self._patience)
        except KubeError as error:
            _log.warning("the Lease %s was not released and will run out: %s", self._name, error)

    def _try(self, before: float) -> None:
        try:
            lease = self._kube.get(LEASES, self._name, self._namespace, total=self._patience)
        except NotFound:
            spec = self._spec({})
            body = {"metadata": {"name": self._name, "labels": self._labels}, "spec": spec}
            try:
                self._kube.create(LEASES, body, self._namespace, total=self._patience)
            except AlreadyExists:
                return
            self._lead(before)
            return
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self.identity):
            self._see(holder, lease, spec, before)
            if self.role is Role.LOST or not self._ran_out(spec):
                return
        labels = {**(lease["metadata"].get("labels") or {}), **self._labels}
        ours = {**lease, "metadata": {**lease["metadata"], "labels": labels}, "spec": self._spec(spec)}
        self._kube.replace(LEASES, ours, self._namespace, total=self._patience)
        self._lead(before)

    def _see(self, holder: str, lease: Json, spec: Json, now: float) -> None:
        if self.role is Role.LEADER:
            self.role, self._renewed = Role.LOST, None
            _log.error("the Lease %s is held by %s now: this process stops for good", self._name, holder)
        self.holder = holder
        sight = (holder, f"{spec.get('renewTime')} {lease['metadata'].get('resourceVersion')}")
        if sight != self._seen:
            self._seen, self._seen_at = sight, now

    def _ran_out(self, spec: Json) -> bool:
        """Whether the Lease that another holds was seen unchanged for its own duration, and for ours."""
        duration = max(float(spec.get("leaseDurationSeconds") or 0), float(self.times.duration))
        return self._clock.monotonic() - self._seen_at > duration

    def _lead(self, before: float) -> None:
        self.term += not self.acting
        # From before the request was sent: others count from when they saw its effect.
        self._renewed = before
        if self.role is not Role.LEADER:
            _log.info("this process (%s) holds the Lease %s", self.identity, self._name)
        self.role, self.holder = Role.LEADER, self.identity

    def _spec(self, old: Json) -> Json:
        held = old.get("holderIdentity") == self.identity
        return {
            **old,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.times.duration,
            "acquireTime": old.get("acquireTime") if held and old.get("acquireTime") else self._now(),
            "renewTime": self._now(),
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (0 if held or not old else 1),
        }

    @property
    def _patience(self) -> float:
        """Seconds for one call, so that several fit in before the renew deadline."""
        return self.times.renew_deadline / 2

    def _now(self) -> str:
        return format_micro_time(self._clock.now())
