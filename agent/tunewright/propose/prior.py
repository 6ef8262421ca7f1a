"""What earlier tunings of the same target measured, as far as it bears on this one: same vLLM, same GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import Earlier, TrialRecord

_SAME_MEMORY = 0.02
"""Share by which two GPUs of one kind differ in what vLLM says of their memory."""
_ENOUGH = 8
"""Candidates of one earlier run from which the model knows its way without the chosen first trials."""


@dataclass(frozen=True)
class Prior:
    """Earlier trials by what they are good for. Levels may have shifted: only differences within a run count."""

    measured: tuple[Earlier, ...] = ()
    memory: tuple[tuple[Candidate, float], ...] = ()  # GiB for the KV cache
    failed: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, earlier: Sequence[Earlier], trials: Sequence[TrialRecord]) -> "Prior":
        """Those of the vLLM and the GPU that this tuning's own trials run on; none while that is not known."""
        versions = {trial.measurement.vllm_version for trial in trials if trial.measurement is not None}
        sizes = [trial.memory.device_gib for trial in trials if trial.memory and trial.memory.device_gib]
        runs = {one.tuning for one in earlier if one.version in versions}
        other = {one.tuning for one in earlier if sizes and not _same(one, sizes[0])}
        mine = [one for one in earlier if one.tuning in runs - other]
        measured = tuple(one for one in mine if one.objective)
        known = [(one.candidate, one.memory.available_kv_gib) for one in mine if one.memory is not None]
        ran = {one.candidate.hash for one in measured}
        return cls(
            measured=measured,
            memory=tuple((candidate, gib) for candidate, gib in known if gib is not None),
            failed=frozenset(one.candidate.hash for one in mine if one.failed) - ran,
        )

    @property
    def best(self) -> Candidate | None:
        """The best of the latest run that met the SLO."""
        latest = self.measured[-1].tuning if self.measured else None
        met = [one for one in self.measured if one.tuning == latest and (one.slo_margin or 0.0) >= 0]
        return max(met, key=lambda one: one.objective or 0.0).candidate if met else None

    @property
    def tells_enough(self) -> bool:
        """Whether one run measured enough candidates to go by."""
        runs: dict[str, set[str]] = {}
        for one in self.measured:
            runs.setdefault(one.tuning, set()).add(one.candidate.hash)
        return any(len(candidates) >= _ENOUGH for candidates in runs.values())


def _same(one: Earlier, gib: float) -> bool:
    own = one.memory.device_gib if one.memory is not None else None
    return own is None or abs(own - gib) <= _SAME_MEMORY * gib
