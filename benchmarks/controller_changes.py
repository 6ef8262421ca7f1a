"""Changes that the controller must react to, and how long it takes until the API server shows the reaction."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
from benchmarks.controller_world import BASELINE, Made, deployment

from tunewright.domain.candidate import Candidate
from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.errors import KubeError
from tunewright.kube.resources import DEPLOYMENTS, PODS, TRIALS, TUNING_LABEL, TUNINGS, Resource

LOST = 60.0
"""Seconds after which a reaction is no longer waited for; it is counted as this long."""

Predicate = Callable[[Json], bool]


@dataclass
class Change:
    """One change: what is done, and what of which object shows the reaction."""

    kind: str
    tuning: str
    shown_by: Predicate
    on: Resource = TUNINGS
    sent: float = 0.0
    seen: float | None = None

    @property
    def seconds(self) -> float:
        """From just before the change was sent to the reaction's arrival here."""
        return (self.seen - self.sent) if self.seen is not None else LOST


class Sight:
    """A watch of one kind of object that notes when what is waited for has come."""

    def __init__(self, kube: Kube, namespace: str, resource: Resource) -> None:
        self._kube, self._namespace, self._resource = kube, namespace, resource
        self._waiting: list[Change] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._version = kube.list(resource, namespace).resource_version
        self._thread.start()

    def expect(self, change: Change) -> None:
        """Wait for the reaction to a change that is about to be made."""
        with self._lock:
            self._waiting.append(change)

    def stop(self) -> None:
        """End the watch, with its present turn."""
        self._stop.set()
        self._thread.join(timeout=15)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                events = self._kube.watch(self._resource, self._namespace, resource_version=self._version, seconds=5)
                for event in events:
                    now = time.monotonic()
                    self._version = event.object["metadata"]["resourceVersion"]
                    if event.type in ("ADDED", "MODIFIED"):
                        self._note(event.object, now)
            except KubeError as error:
                print(f"the benchmark's own watch of {self._resource.plural}: {error}", flush=True)
                self._version = self._kube.list(self._resource, self._namespace).resource_version

    def _note(self, found: Json, now: float) -> None:
        metadata = found["metadata"]
        name = (metadata.get("labels") or {}).get(TUNING_LABEL) or metadata["name"]
        with self._lock:
            for change in self._waiting:
                if change.tuning == name and change.seen is None and change.shown_by(found):
                    change.seen = now
            self._waiting = [each for each in self._waiting if each.seen is None]


@dataclass
class Changes:
    """Makes changes one after the other, each to a tuning at rest, and keeps what came of them."""

    kube: Kube
    namespace: str
    rest_url: str
    token: str
    made: Sequence[Made]
    seed: int = 1
    done: list[Change] = field(default_factory=list)

    def run(self, samples: int, gap: float, deadline: float) -> list[Change]:
        """At most `samples` changes, `gap` seconds apart on average, and none begun after `deadline` seconds."""
        rng, began = random.Random(self.seed), time.monotonic()
        kinds = [self._suspend, self._decide_suspend, self._reject, self._edit_target, self._fail_pod]
        awaiting = [one.name for one in self.made if one.kind == "awaiting"]
        searching = [one.name for one in self.made if one.kind == "searching"]
        # Two may be changed again and again, the others once each: every kind has tunings of its own.
        fields: list[list[str]] = [awaiting[0::4], awaiting[1::4], awaiting[2::4], awaiting[3::4], searching]
        sights = {TUNINGS: Sight(self.kube, self.namespace, TUNINGS), TRIALS: Sight(self.kube, self.namespace, TRIALS)}
        open_: dict[str, Change] = {}
        turns = {name: 0 for names in fields for name in names}
        with httpx.Client(
            trust_env=False, timeout=30.0, headers={"Authorization": f"Bearer {self.token}"}, base_url=self.rest_url
        ) as client:
            while len(self.done) < samples and time.monotonic() - began < deadline:
                at = rng.randrange(len(kinds))
                ready = [
                    name
                    for name in fields[at]
                    if (name not in open_ or open_[name].seen is not None) and (at < 2 or turns[name] < 1)
                ]
                if not ready:
                    at = rng.randrange(2)
                    ready = [n for n in fields[at] if n not in open_ or open_[n].seen is not None]
                if ready:
                    name = rng.choice(ready)
                    found = kinds[at](client, name, turns[name], sights)
                    if found is not None:
                        turns[name] += 1
                        open_[name] = found
                        self.done.append(found)
                time.sleep(rng.expovariate(1 / gap))
            end = time.monotonic() + LOST
            while time.monotonic() < end and any(change.seen is None for change in self.done):
                time.sleep(0.1)
        for sight in sights.values():
            sight.stop()
        return self.done

    # --- the kinds of change ---

    def _suspend(self, _client: httpx.Client, name: str, turn: int, sights: dict[Resource, Sight]) -> Change:
        wanted = turn % 2 == 0
        change = Change("spec.suspend edited", name, _suspended(wanted))
        self._make(change, sights, lambda: self._patch(TUNINGS, name, {"spec": {"suspend": wanted}}))
        return change

    def _decide_suspend(self, client: httpx.Client, name: str, turn: int, sights: dict[Resource, Sight]) -> Change:
        wanted = turn % 2 == 0
        change = Change("suspend or resume over REST", name, _suspended(wanted))
        action = "suspend" if wanted else "resume"
        self._make(change, sights, lambda: _post(client, name, action, {"reason": "benchmark"}))
        return change

    def _reject(self, client: httpx.Client, name: str, _turn: int, sights: dict[Resource, Sight]) -> Change:
        promotion = client.get(f"/api/v1alpha1/tunings/{name}/promotion")
        promotion.raise_for_status()
        body = promotion.json()["bind"] | {"reason": "benchmark"}
        change = Change("rejected over REST", name, lambda found: _phase(found) == "Rejected")
        self._make(change, sights, lambda: _post(client, name, "reject", body))
        return change

    def _edit_target(self, _client: httpx.Client, name: str, _turn: int, sights: dict[Resource, Sight]) -> Change:
        other = deployment(name, Candidate(values=dict(BASELINE.values) | {"max_num_seqs": 5}), replicas=0)
        patch = {"spec": {"template": other["spec"]["template"]}}
        change = Change("target's arguments edited", name, lambda found: _phase(found) != "AwaitingApproval")
        self._make(change, sights, lambda: self._patch(DEPLOYMENTS, name, patch))
        return change

    def _fail_pod(self, _client: httpx.Client, name: str, _turn: int, sights: dict[Resource, Sight]) -> Change | None:
        pods = self.kube.list(PODS, self.namespace, labels=f"{TUNING_LABEL}={name}").items
        if not pods:
            return None
        status = {"status": {"phase": "Failed", "reason": "Evicted", "message": "by the benchmark"}}
        change = Change(
            "spare's pod evicted",
            name,
            lambda found: (found.get("status") or {}).get("phase") in ("Stopping", "Pending"),
            on=TRIALS,
        )
        pod = pods[0]["metadata"]["name"]
        self._make(change, sights, lambda: self._patch(PODS, pod, status, subresource="status"))
        return change

    def _make(self, change: Change, sights: dict[Resource, Sight], act: Callable[[], object]) -> None:
        change.sent = time.monotonic()
        sights[change.on].expect(change)
        act()

    def _patch(self, resource: Resource, name: str, patch: Json, subresource: str = "") -> None:
        self.kube.patch(resource, name, patch, self.namespace, type=PatchType.MERGE, subresource=subresource)


def _post(client: httpx.Client, name: str, action: str, body: Json) -> None:
    answer = client.post(f"/api/v1alpha1/tunings/{name}/{action}", json=body)
    if answer.status_code != 202:
        raise RuntimeError(f"{action} of {name}: {answer.status_code} {answer.text}")


def _phase(found: Json) -> str:
    return str((found.get("status") or {}).get("phase"))


def _suspended(wanted: bool) -> Predicate:
    def shown(found: Json) -> bool:
        conditions = (found.get("status") or {}).get("conditions") or []
        return any(c["type"] == "Suspended" and c["status"] == str(wanted) for c in conditions)

    return shown
