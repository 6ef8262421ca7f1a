"""The records in custom resources: a Tuning's status holds its record, child Trials hold the trials.

Everything that decides what is promoted is kept in the status subresources, which only the controller may write:
whoever can merely edit objects of the namespace can forge neither a decision nor a measurement.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from uuid import uuid4

from pydantic import ValidationError

from tunewright.domain.phases import Phase
from tunewright.domain.state import Decision, TrialRecord, TuningRecord
from tunewright.domain.step import update
from tunewright.domain.tuning import Tuning
from tunewright.kube.client import Json, Kube, PatchType
from tunewright.kube.errors import AlreadyExists, KubeConflict, NotFound
from tunewright.kube.events import emit
from tunewright.kube.resources import MANAGED_BY, TRIALS, TUNING_LABEL, TUNINGS
from tunewright.kube.wakes import TRIALS_PAGE
from tunewright.ports import Clock, Conflict, Objected, Objection, PortError, Refused, no_objection
from tunewright.store.kubernetes_status import (
    conditions,
    known_conditions,
    pack,
    read_record,
    trial_status,
    tuning_status,
)
from tunewright.store.kubernetes_trials import TrialMemory
from tunewright.tuningfile import explain_validation

_WRITES = 30
"""Tries of a write that others' writes keep overtaking."""

_MOST_ASKED = 20 * 1024
"""Bytes of decisions in status beyond which no candidate can be asked for; people's other decisions always can."""

_MAX_TRIAL = 2**20
"""Bytes of a packed trial; etcd takes 1.5 MiB."""

_WARNING_PHASES = frozenset({Phase.FAILED, Phase.INFEASIBLE, Phase.ROLLING_BACK, Phase.ROLLED_BACK})


class KubernetesStore:
    """Implements `ports.Store` on the Tunings of one namespace; safe to use from several threads and processes.

    A record's version goes with the status in one write, guarded by the object's resourceVersion. The spec is the
    user's: it is written only when a record is saved whose Tuning is not there yet, and `load` always reads it anew.

    It remembers which Tuning of a name was loaded last, so that a record is never written to another of the same
    name: the loop and the API each take a store of their own. In the loop, one tuning is in work only once at a time.
    """

    def __init__(self, kube: Kube, namespace: str, clock: Clock, *, trials: TrialMemory | None = None) -> None:
        """`trials` are answered from there as far as it knows them; without it, they are listed whenever asked for."""
        self._kube, self._namespace, self._clock = kube, namespace, clock
        self._shared, self._memory = trials is not None, trials or TrialMemory()
        # What was read or written last: which Tuning of a name was meant, its version, and how many phase changes
        # were told as Events.
        self._uids: dict[str, str] = {}
        self._versions: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def names(self) -> list[str]:
        """Names of all tunings, sorted."""
        found = self._kube.list(TUNINGS, self._namespace).items
        return sorted(each["metadata"]["name"] for each in found if not _ending(each))

    def load(self, name: str) -> TuningRecord | None:
        """The record, with the spec as it is now; a new one (version 0, Pending) for a Tuning not taken up yet.

        None when it is not there, is being deleted, or never had a valid spec (`acknowledge` tells the user). While
        an edited spec is not valid, the last valid one stays in force. Raises `Refused` for an unreadable record.
        """
        found = self.find(name)
        return self.record_of(found) if found is not None else None

    def acknowledge(self, name: str) -> list[str]:
        """Say in status that the spec was seen: in force, or Stalled with the field named. What is wrong with it.

        To be called before each pass. Writes only when something is to be said.
        """
        found = self.find(name)
        return self.acknowledge_found(found)[1] if found is not None else []

    def acknowledge_found(self, found: Json) -> tuple[Json, list[str]]:
        """As `acknowledge`, of a Tuning as it was read; also the Tuning as it is after that."""
        _, faults = _read_spec(found)
        status, generation = found.get("status") or {}, found["metadata"]["generation"]
        if not faults and (not status.get("record") or status.get("observedGeneration") == generation):
            return found, []
        before = known_conditions(status)
        record = self.record_of(found)
        wanted = conditions(record, faults, generation=generation, before=before, now=self._clock.now())
        if wanted == before:
            return found, faults
        body = {**found, "status": {**status, "observedGeneration": generation, "conditions": wanted}}
        written = self._kube.replace(TUNINGS, body, self._namespace, subresource="status")
        if faults:
            message = f"The spec is not valid: {'; '.join(faults)}"
            emit(self._kube, found, reason="InvalidSpec", message=message, at=self._clock.now(), warning=True)
        return written, faults

    def save(self, record: TuningRecord) -> TuningRecord:
        """Write it if its version is the stored one (0: not there yet); the record with its new version.

        Raises `Conflict` otherwise, also when the Tuning was deleted since it was loaded.
        """
        return self.write(record, None)[0]

    def write(self, record: TuningRecord, found: Json | None) -> tuple[TuningRecord, Json]:
        """As `save`; `found` is the Tuning as it was read, which is read again where it has changed since.

        The record with its new version, and the Tuning with it.
        """
        for _ in range(_WRITES):
            found = found or self._find(record.name) or self._create(record)
            status: Json = found.get("status") or {}
            stored, uid = int(status.get("version") or 0), found["metadata"]["uid"]
            if record.version != stored or self._uids.setdefault(record.name, uid) != uid:
                raise Conflict(f"the tuning {record.name} was written by somebody else; read it again")
            # A deleted name goes on counting: an old reader must not take the new record for the one it read.
            version = (stored or self._versions.get(record.name, 0)) + 1
            saved = record.model_copy(update={"version": version})
            body = {**found, "status": self._status(saved, found)}
            try:
                written = self._kube.replace(TUNINGS, body, self._namespace, subresource="status")
            except (KubeConflict, NotFound):
                found = None  # a decision or an edit came between: the version tells whether the record was written
                continue
            self._versions[record.name] = version
            self._tell(found, saved, int(status.get("told") or 0))
            return saved, written
        raise Conflict(f"the tuning {record.name} is written by others all the time; read it again")

    def trials(self, name: str) -> list[TrialRecord]:
        """The tuning's trials by number."""
        uid, key = self._uid(name), (self._namespace, name)
        if uid is None:
            return []
        if not self._shared or not self._memory.knows(key):
            labels = f"{TUNING_LABEL}={name}"
            self._memory.read(key, lambda: self._kube.list(TRIALS, self._namespace, labels=labels, page=TRIALS_PAGE))
        return self._memory.of(key, uid)

    def save_trial(self, name: str, trial: TrialRecord) -> None:
        """Write one trial, over the one of the same id; raises `Conflict` when the tuning was deleted."""
        uid = self._uid(name)
        if uid is None:
            raise Conflict(f"the tuning {name} is not there (any more); read again")
        packed = pack(trial)
        if len(packed) > _MAX_TRIAL:
            raise Refused(
                f"trial {trial.id} of {name} has {len(packed)} bytes, more than the API server keeps; "
                "lower quality.prompts or quality.maxTokens"
            )
        key = _trial_name(name, trial.id)
        status = {"status": {**trial_status(trial), "record": packed}}
        with self._memory.changing((self._namespace, name)):
            try:
                written = self._patch_trial(key, status)
            except NotFound:
                with suppress(AlreadyExists):
                    self._kube.create(TRIALS, _new_trial(name, uid, key, trial), self._namespace)
                written = self._patch_trial(key, status)
            if not _owned(written, uid):
                raise PortError(
                    f"Trial {key} belongs to an earlier tuning {name} that is still being deleted; it is tried again"
                )
        self._memory.wrote((self._namespace, name), written)

    def clear_trials(self, name: str) -> None:
        """Forget the trials of a tuning that starts anew."""
        with self._memory.changing((self._namespace, name)):
            self._kube.delete_all(TRIALS, self._namespace, labels=f"{TUNING_LABEL}={name}")
        self._memory.forget((self._namespace, name))

    def decide(self, name: str, decision: Decision, unless: Objection = no_objection) -> None:
        """Keep a person's decision; raises `Refused` when there is no such tuning, `Objected` by `unless`."""
        entry = decision.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"id": uuid4().hex}
        for _ in range(_WRITES):
            found = self._find(name)
            if found is None:
                raise Refused(
                    f"there is no tuning {name} in namespace {self._namespace}; "
                    f"there are: {', '.join(self.names()) or 'none'}"
                )
            status: Json = found.get("status") or {}
            taken = status.get("decisions") or []
            if any(each.get("id") == entry["id"] for each in taken):
                return  # it was written, and only the answer got lost
            if (why_not := unless(decisions_of(found))) is not None:
                raise Objected(why_not)
            if decision.action == "propose" and len(json.dumps(taken)) > _MOST_ASKED:
                raise Objected("so many candidates were asked for that the Tuning's status holds no more of them")
            body = {**found, "status": {**status, "decisions": [*taken, entry]}}
            try:
                written = self._kube.replace(TUNINGS, body, self._namespace, subresource="status")
            except (KubeConflict, NotFound):
                continue
            why = f": {decision.reason}" if decision.reason else ""
            message = f"{decision.action} by {decision.by}{why}"
            emit(self._kube, written, reason="Decision", message=message, at=decision.at)
            return
        raise PortError(f"the decision on {name} could not be written: others write it all the time; decide again")

    def decisions(self, name: str) -> list[Decision]:
        """Every decision ever taken on this tuning, oldest first."""
        found = self._find(name)
        return decisions_of(found) if found is not None else []

    def delete(self, name: str) -> None:
        """Forget the tuning and all that belongs to it; what it owns goes by garbage collection."""
        self._kube.delete(TUNINGS, name, self._namespace)
        self._uids.pop(name, None)
        self._told.pop(name, None)
        self._memory.forget((self._namespace, name))

    def keep(self, names: Collection[str]) -> None:
        """Forget what is remembered of tunings that are not among `names`: they are gone."""
        for name in self._told.keys() - set(names):
            self._told.pop(name, None)

    def written(self, name: str) -> int:
        """The version of the record that was written here last; 0: none was."""
        return self._versions.get(name, 0)

    def find(self, name: str) -> Json | None:
        """The Tuning as it is now, which is the one that is meant from here on; None: as in `load`, or invalid."""
        found = self._find(name)
        if found is not None and self._uids.get(name) != found["metadata"]["uid"]:
            self._told.pop(name, None)
            self._uids[name] = found["metadata"]["uid"]
        return found

    def record_of(self, found: Json) -> TuningRecord | None:
        """The record of a Tuning as it was read; None when it never had a valid spec. Raises `Refused`."""
        return record_of(found, self._clock.now())

    def _find(self, name: str) -> Json | None:
        """The Tuning; None when it is not there or is being deleted."""
        try:
            found = self._kube.get(TUNINGS, name, self._namespace)
        except NotFound as error:
            if error.reason != "NotFound":
                raise  # the kind itself is unknown: the CRDs are not installed
            return None
        return None if _ending(found) else found

    def _uid(self, name: str) -> str | None:
        if name not in self._uids:
            found = self._find(name)
            if found is None:
                return None
            self._uids[name] = found["metadata"]["uid"]
        return self._uids[name]

    def _create(self, record: TuningRecord) -> Json:
        """The Tuning of a record that was not read from one."""
        if record.version or record.name in self._uids:
            raise Conflict(f"the tuning {record.name} is not there (any more); read again")
        # Defaults are filled in by the API server.
        document = record.tuning.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        body = {"metadata": {"name": record.name, "labels": MANAGED_BY}, "spec": document["spec"]}
        try:
            return self._kube.create(TUNINGS, body, self._namespace)
        except AlreadyExists as error:
            raise Conflict(f"the tuning {record.name} was made by somebody else; read it again") from error

    def _status(self, record: TuningRecord, found: Json) -> Json:
        name, before = record.name, found.get("status") or {}
        tuning, faults = _read_spec(found)
        generation = found["metadata"]["generation"]
        # The record may have been read before an edit: then the status is not yet about the new generation.
        seen = tuning == record.tuning or bool(faults) or not before.get("observedGeneration")
        observed = generation if seen else before["observedGeneration"]
        known = self._memory.knows((self._namespace, name))
        trials = self._memory.of((self._namespace, name), found["metadata"]["uid"]) if known else self.trials(name)
        shown = conditions(record, faults, generation=observed, before=known_conditions(before), now=self._clock.now())
        kept = {key: before[key] for key in ("decisions", "told") if key in before}
        return {
            **kept,
            **tuning_status(record, trials),
            "observedGeneration": observed,
            "conditions": shown,
            "version": record.version,
            "told": max(int(before.get("told") or 0), min(self._told.get(name, 0), len(record.history))),
            "record": pack(record),
        }

    def _tell(self, about: Json, record: TuningRecord, told: int) -> None:
        """An Event for each phase change not told yet. What fails is told with the next write."""
        for change in record.history[max(told, self._told.get(record.name, 0)) :]:
            by_person = change.by or (change.phase is Phase.ROLLED_BACK and record.stopped_by)
            warning = change.phase in _WARNING_PHASES and not by_person
            if not emit(
                self._kube, about, reason=change.phase.value, message=change.sentence, at=change.at, warning=warning
            ):
                return
        self._told[record.name] = len(record.history)

    def _patch_trial(self, key: str, status: Json) -> Json:
        return self._kube.patch(TRIALS, key, status, self._namespace, type=PatchType.MERGE, subresource="status")


def record_of(found: Json, now: float) -> TuningRecord | None:
    """The record of a Tuning, with its spec as it is; a new one of `now` where there is none yet.

    None when it never had a valid spec. Raises `Refused` for a record that can't be read.
    """
    name = found["metadata"]["name"]
    tuning, _ = _read_spec(found)
    packed = (found.get("status") or {}).get("record")
    if packed:
        stored = read_record(TuningRecord, packed, f"Tuning {name}")
        return stored if tuning is None or tuning == stored.tuning else update(stored, tuning=tuning)
    if tuning is None:
        return None
    return TuningRecord(tuning=tuning, spec_hash=tuning.spec.spec_hash, phase_since=now)


def decisions_of(found: Json) -> list[Decision]:
    """The decisions in a Tuning's status, oldest first. Raises `Refused` for one that can't be read."""
    name = found["metadata"]["name"]
    return [_decision(each, name) for each in (found.get("status") or {}).get("decisions") or []]


def _read_spec(found: Json) -> tuple[Tuning | None, list[str]]:
    """The tuning as it is asked for, or what is wrong with it."""
    document = {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "metadata": {"name": found["metadata"]["name"]},
        "spec": found.get("spec"),
    }
    try:
        return Tuning.model_validate(document), []
    except ValidationError as error:
        return None, explain_validation(error)


def _new_trial(tuning: str, uid: str, key: str, trial: TrialRecord) -> Json:
    return {
        "metadata": {
            "name": key,
            "labels": {**MANAGED_BY, TUNING_LABEL: tuning},
            "ownerReferences": [TUNINGS.owner(tuning, uid)],
        },
        "spec": {
            "id": trial.id,
            "number": trial.number,
            "purpose": trial.purpose.value,
            "round": trial.round,
            "candidate": dict(trial.candidate.values),
            **({"reason": trial.reason} if trial.reason else {}),
        },
    }


def _trial_name(tuning: str, trial: str) -> str:
    """Deterministic, so that nothing is created twice; a digest stands in for an id that can't be part of a name."""
    plain = re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,120}[a-z0-9])?", trial)
    return f"{tuning}-{trial if plain else hashlib.sha256(trial.encode()).hexdigest()[:20]}"


def _owned(found: Json, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences") or [])


def _ending(found: Json) -> bool:
    return bool(found["metadata"].get("deletionTimestamp"))


def _decision(entry: Mapping[str, object], name: str) -> Decision:
    try:
        return Decision.model_validate({key: value for key, value in entry.items() if key != "id"})
    except ValidationError as error:
        raise Refused(f"a decision in the status of Tuning {name} can't be read: {error.errors()[0]['msg']}") from error
