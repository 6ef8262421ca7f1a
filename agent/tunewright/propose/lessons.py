"""What earlier trials taught: bounds that a failure told, values that do not exist here, memory that ran out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.state import Failure, FailureKind, TrialOutcome, TrialRecord
from tunewright.knobs.catalogue import CATALOGUE

MACHINE_FAULTS_PER_CANDIDATE = 2
"""After so many records of the machine's fault a candidate is proposed no more, though it is not held against it."""

_BACKENDS = (
    "attention_backend", "moe_backend", "linear_backend", "mamba_backend", "all2all_backend", "speculative_method",
)  # fmt: skip
_REFUSED = (
    FailureKind.INVALID_FLAG, FailureKind.INVALID_COMBINATION, FailureKind.UNSUPPORTED_BACKEND, FailureKind.CRASHED,
    FailureKind.HUNG, FailureKind.UNKNOWN,
)  # fmt: skip
"""Kinds for which some value, or some values together, are to blame, though no rule may tell which."""
_STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_OUT_OF_MEMORY = (FailureKind.OUT_OF_MEMORY, FailureKind.OUT_OF_MEMORY_UNDER_LOAD)
_UTILIZATION = "gpu_memory_utilization"
_MORE_MEMORY = ("max_num_batched_tokens", "max_num_seqs")


@dataclass(frozen=True)
class _Bound:
    knob: str
    limit: float
    told_by: Candidate


class Lessons:
    """Lessons of a list of trials, to be asked about new candidates."""

    def __init__(self, trials: Sequence[TrialRecord], defaults: Mapping[str, KnobValue]) -> None:
        self._defaults = defaults
        self._bounds: list[_Bound] = []
        self._banned: set[tuple[str, KnobValue | None]] = set()  # with None: every value of the knob
        self._most_utilization = float("inf")  # from here on it ran out of memory under load
        self._starved: list[tuple[FailureKind, Candidate]] = []
        self.tried: set[str] = set()
        self._suspects: dict[str, set[tuple[str, KnobValue]]] = {}
        proven = {pair for trial in trials if trial.measurement or trial.objective is not None
                  for pair in trial.candidate.values.items()}  # fmt: skip
        shares = [self._number(trial.candidate, _UTILIZATION) for trial in trials if trial.objective is not None]
        self._ran_with = [share for share in shares if share is not None]
        faults: dict[str, int] = {}
        for trial in trials:
            ended = trial.outcome is not None
            if not ended:  # it runs, or will run again: nobody else is to try the same meanwhile
                self.tried.add(trial.candidate.hash)
            if machine_fault(trial):
                faults[trial.candidate.hash] = faults.get(trial.candidate.hash, 0) + ended
                continue
            self.tried.add(trial.candidate.hash)
            if trial.failure is not None:
                self._learn(trial.candidate, trial.failure)
                if trial.failure.kind in _REFUSED:
                    self._suspect(trial.candidate, trial.failure, proven)
        self.tried.update(name for name, count in faults.items() if count >= MACHINE_FAULTS_PER_CANDIDATE)

    def _learn(self, candidate: Candidate, failure: Failure) -> None:
        for knob, limit in failure.limits.items():
            # A bound on max_model_len holds for that very memory only; `_starved` keeps what follows from it.
            if knob in CATALOGUE and CATALOGUE[knob].grid:
                self._bounds.append(_Bound(knob, limit, candidate))
        if failure.kind is FailureKind.INVALID_FLAG:
            self._banned.update(_named_flags(candidate, failure.cause))
        if failure.kind is FailureKind.UNSUPPORTED_BACKEND:
            self._banned.update(_named_backends(candidate, failure.cause))
        share = self._number(candidate, _UTILIZATION)
        less = share is not None and bool(self._ran_with) and max(self._ran_with) < share
        if failure.kind is FailureKind.OUT_OF_MEMORY_UNDER_LOAD and share is not None and less:
            # What start-up did not see has to fit in the rest: a gamble lost once, where less was seen to run.
            self._most_utilization = min(self._most_utilization, share)
        if failure.kind in (*_OUT_OF_MEMORY, FailureKind.KV_TOO_SMALL):
            self._starved.append((failure.kind, candidate))

    def _suspect(self, candidate: Candidate, failure: Failure, proven: set[tuple[str, KnobValue]]) -> None:
        """Of what failed with one message, keep the values that all have in common and that never ran."""
        message = re.sub(r"[\d.]+", "#", failure.cause)
        values = set(candidate.values.items()) - proven
        self._suspects[message] = self._suspects.get(message, values) & values

    def clamp(self, candidate: Candidate, searched: Sequence[str]) -> Candidate:
        """The candidate with its searched knobs lowered to the bounds that failures told."""
        for bound in self._bounds:
            if bound.knob in searched and self._exceeds(bound, candidate):
                limit = _scaled(bound, candidate)
                integer = CATALOGUE[bound.knob].kind == "int"
                candidate = candidate.with_value(bound.knob, max(1, int(limit)) if integer else limit)
        return candidate

    def objection(self, candidate: Candidate) -> str | None:
        """Why this candidate is known not to run; None when nothing speaks against it."""
        for knob, value in self._banned:
            own = candidate.values.get(knob)
            if own is not None and (value is None or own == value):
                return f"{knob} {own} does not work here"
        own_values = set(candidate.values.items())
        for suspects in self._suspects.values():
            if suspects and suspects <= own_values:
                return f"{', '.join(sorted(name for name, _ in suspects))} as in what failed before"
        for bound in self._bounds:
            if self._exceeds(bound, candidate):
                return f"{bound.knob} is bounded by {_scaled(bound, candidate):g}"
        if (self._number(candidate, _UTILIZATION) or 0.0) >= self._most_utilization:
            return f"{_UTILIZATION} {self._most_utilization:g} ran out of memory under load"
        seqs, batch = (self._number(candidate, name) for name in ("max_num_seqs", "max_num_batched_tokens"))
        depth = int(candidate.values.get("num_speculative_tokens") or 0)
        if depth and seqs and batch and batch < seqs * (1 + depth):
            return f"{seqs:g} requests with {depth} drafted tokens each do not fit a step of {batch:g} tokens"
        for kind, failed in self._starved:
            if self._starves_too(kind, failed, candidate):
                return "less hungry candidates ran out of memory"
        return None

    def _number(self, candidate: Candidate, name: str) -> float | None:
        value = candidate.values.get(name, self._defaults.get(name))
        return float(value) if isinstance(value, int | float) else None

    def _exceeds(self, bound: _Bound, candidate: Candidate) -> bool:
        value = candidate.values.get(bound.knob, self._defaults.get(bound.knob))
        if value is None:
            # The default is not known, but it is what failed if the failed candidate had it too.
            return bound.knob not in bound.told_by.values
        return isinstance(value, int | float) and float(value) > _scaled(bound, candidate)

    def _starves_too(self, kind: FailureKind, failed: Candidate, candidate: Candidate) -> bool:
        """Whether `candidate` differs from one that lacked memory only in ways that need more of it."""
        free = {*_MORE_MEMORY, _UTILIZATION}
        if any(name not in free for name in candidate.differences(failed)):
            return False
        names = [*_MORE_MEMORY, _UTILIZATION]
        for name in names:
            own, other = (side.values.get(name, self._defaults.get(name)) for side in (candidate, failed))
            if own is None or other is None:
                if own != other:
                    return False
                continue
            less = float(own) < float(other)
            if name == _UTILIZATION and kind is FailureKind.KV_TOO_SMALL:
                less = float(own) > float(other)  # there the KV cache wanted the memory
            if less:
                return False
        return candidate.hash != failed.hash


def machine_fault(trial: TrialRecord) -> bool:
    """Whether the trial says nothing of its candidate."""
    if trial.failure is not None:
        return trial.failure.machine_fault
    return trial.outcome is TrialOutcome.FAILED


def _scaled(bound: _Bound, candidate: Candidate) -> float:
    """A bound on requests for another candidate: a request's state costs one page × (1 + k), and 16 bits halve it."""
    if bound.knob != "max_num_seqs":
        return bound.limit
    depths = [int(side.values.get("num_speculative_tokens") or 0) for side in (bound.told_by, candidate)]
    pages = (1 + depths[0]) / (1 + depths[1])
    widths = [_STATE_BYTES.get(str(s.values.get("mamba_ssm_cache_dtype")), 4) for s in (bound.told_by, candidate)]
    return bound.limit * pages * widths[0] / widths[1]


def _named_flags(candidate: Candidate, cause: str) -> set[tuple[str, KnobValue | None]]:
    """Knobs whose flag, or value, this version refused."""
    banned: set[tuple[str, KnobValue | None]] = set()
    unknown = "unrecognized arguments" in cause
    for name, value in candidate.values.items():
        knob = CATALOGUE.get(name)
        if knob is None:
            continue
        spellings = [s for s in (knob.flag, *knob.aliases) if s]
        negated = [f"--no-{s[2:]}" for s in spellings if s.startswith("--")]
        if any(re.search(rf"(?<![\w-]){re.escape(s)}(?![\w-])", cause) for s in (*spellings, *negated)):
            banned.add((name, None if unknown else value))
        elif re.match(rf"{name}\b", cause):
            banned.add((name, value))
    return banned


def _named_backends(candidate: Candidate, cause: str) -> set[tuple[str, KnobValue | None]]:
    """The backend that does not work here: the one that the message names, else the only one that is set."""
    chosen: list[tuple[str, KnobValue | None]] = [
        (name, candidate.values[name]) for name in _BACKENDS if name in candidate.values
    ]
    text = cause.lower()
    named = [(name, value) for name, value in chosen if name.split("_")[0] in text or str(value).lower() in text]
    return set(named or (chosen if len(chosen) == 1 else []))
