"""The search space of one tuning: an axis for each searched knob; all others are as the baseline or a pin has them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.state import TrialRecord
from tunewright.domain.tuning import Search
from tunewright.knobs.catalogue import CATALOGUE, is_lossy, near
from tunewright.knobs.facts import ModelFacts, default_value
from tunewright.knobs.knob import Knob, Searched
from tunewright.ports import Refused

_LEARNED = ("max_num_batched_tokens", "attention_backend", "mamba_ssm_cache_dtype")
"""Defaults that a server reports, and that do not hang on other knobs."""
TYPICAL: dict[str, KnobValue] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
"""Where an unknown default is put on its axis; the search corrects it."""


@dataclass(frozen=True)
class Axis:
    """The values of one knob in order; None is vLLM's default."""

    name: str
    values: tuple[KnobValue | None, ...]
    ordered: bool

    def position(self, value: KnobValue | None) -> int:
        """Where `value` is on the axis; on an ordered axis a foreign number counts as the nearest one (by ratio)."""
        for index, own in enumerate(self.values):
            if own == value and isinstance(own, bool) == isinstance(value, bool):
                return index
        if not self.ordered or not isinstance(value, int | float):
            return 0
        numbers = [(abs(_log(own) - _log(value)), index) for index, own in enumerate(self.values) if own is not None]
        return min(numbers)[1] if numbers else 0


def _log(value: KnobValue | None) -> float:
    return float((float(value or 0) + 1) ** 0.25)  # between linear and logarithmic: 0 is a value too


@dataclass(frozen=True)
class Space:
    """Axes, and the values that every candidate has."""

    axes: tuple[Axis, ...]
    fixed: Mapping[str, KnobValue]  # the baseline's knobs that are not searched, and the pins
    defaults: Mapping[str, KnobValue]  # what an unset knob resolves to, where that is known

    @property
    def size(self) -> int:
        """How many combinations there are."""
        product = 1
        for axis in self.axes:
            product *= len(axis.values)
        return product

    def axis(self, name: str) -> Axis | None:
        """The axis of a knob; None when it is not searched."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def candidate(self, positions: Mapping[str, int]) -> Candidate:
        """The candidate at these positions, without knobs that have no effect beside the others."""
        values = dict(self.fixed)
        for axis in self.axes:
            value = axis.values[positions[axis.name]]
            if value is not None:
                values[axis.name] = value
        return self.tidy(values)

    def positions(self, candidate: Candidate) -> dict[str, int]:
        """Where a candidate is in this space; what is off the axes counts as the nearest."""
        return {axis.name: axis.position(self._on_axis(axis, candidate)) for axis in self.axes}

    def _on_axis(self, axis: Axis, candidate: Candidate) -> KnobValue | None:
        value = candidate.values.get(axis.name)
        if value is not None and value not in axis.values and value == self.defaults.get(axis.name):
            return None
        if value is None and None not in axis.values:
            return self.defaults.get(axis.name)
        return value

    def tidy(self, values: Mapping[str, KnobValue]) -> Candidate:
        """Drop searched knobs that would have no effect: equal servers are then equal candidates."""
        kept = dict(values)

        def drop(*names: str) -> None:
            for name in names:
                if name not in self.fixed:
                    kept.pop(name, None)

        depth = kept.get("num_speculative_tokens")
        if depth == 0 or (depth is None and self.axis("num_speculative_tokens")):
            drop("num_speculative_tokens", "speculative_method")
            if "speculative_method" in kept:
                kept["num_speculative_tokens"] = 0  # a method alone would mean its own depth
        dtype = kept.get("mamba_ssm_cache_dtype", self.defaults.get("mamba_ssm_cache_dtype"))
        if dtype != "float16":
            drop("enable_mamba_cache_stochastic_rounding")
        if kept.get("enable_mamba_cache_stochastic_rounding") is not True:
            drop("mamba_cache_philox_rounds")
        if kept.get("enable_expert_parallel") is not True:
            drop("all2all_backend")
        if kept.get("enforce_eager") is True:
            drop("cudagraph_mode", "max_cudagraph_capture_size")
        if kept.get("kv_cache_memory_bytes") is not None:
            drop("gpu_memory_utilization")
        return Candidate(values=kept)


# --- building it -----------------------------------------------------------------------------------------------------


def check_search(search: Search) -> None:
    """Refuse knob names and pin values that mean nothing, naming the field and the likely names.

    Raises `Refused`.
    """
    for field, names in (("include", search.include), ("exclude", search.exclude)):
        for index, name in enumerate(names):
            _known(f"spec.search.{field}[{index}]", name)
    for name, text in search.pin.items():
        where = f"spec.search.pin.{name}"
        knob = _known(where, name)
        try:
            value = knob.parse(text)
        except ValueError as error:
            raise Refused(f"{where}: {error}") from None
        if is_lossy(name, value) and not search.allow_lossy:
            raise Refused(f"{where}: {text} can change answers; set spec.search.allowLossy: true to allow that")
    for index, name in enumerate(search.include):
        knob = CATALOGUE[name]
        if not knob.grid:
            raise Refused(
                f"spec.search.include[{index}]: {name} is not searched, because it changes more than speed; "
                f"it can be set with spec.search.pin.{name}"
            )
        lossless = [value for value in knob.grid if not is_lossy(name, value) and value != knob.nominal]
        if not search.allow_lossy and not lossless:
            raise Refused(
                f"spec.search.include[{index}]: every other value of {name} can change answers; "
                "set spec.search.allowLossy: true to allow that"
            )


def _known(where: str, name: str) -> Knob:
    if name in CATALOGUE:
        return CATALOGUE[name]
    likely = near(name)
    raise Refused(
        f"{where}: {name!r} is no knob; " + (f"did you mean {' or '.join(likely)}?" if likely else "see docs/knobs.md")
    )


def build_space(search: Search, facts: ModelFacts, baseline: Candidate, trials: Sequence[TrialRecord] = ()) -> Space:
    """The space of this search on this model and machine. Raises `Refused` as `check_search`."""
    check_search(search)
    pins = {name: CATALOGUE[name].parse(text) for name, text in search.pin.items()}
    defaults = _defaults(facts, trials)
    axes = []
    for knob in CATALOGUE.values():
        if knob.name in pins or knob.name in search.exclude or not _searched(knob, search, facts, baseline):
            continue
        axis = _axis(knob, search, facts, baseline, defaults)
        if len(axis.values) > 1 or knob.name == "speculative_method":
            axes.append(axis)
    names = {axis.name for axis in axes}
    fixed = {name: value for name, value in baseline.values.items() if name not in names} | pins
    if fixed.get("num_speculative_tokens") == 0:
        axes = [axis for axis in axes if axis.name != "speculative_method"]
        fixed.pop("speculative_method", None)
    return Space(tuple(axes), fixed, defaults)


def _searched(knob: Knob, search: Search, facts: ModelFacts, baseline: Candidate) -> bool:
    wanted = knob.name in search.include if search.include else knob.search is Searched.ALWAYS
    if knob.name == "speculative_method" and knob.name not in baseline.values:  # a depth without a method is none
        wanted = wanted or "num_speculative_tokens" in (*search.include, *search.pin)
    return wanted and bool(knob.grid) and applies(knob, facts)


def applies(knob: Knob, facts: ModelFacts) -> bool:
    """Whether the knob can matter for this model, machine and version; what is not known speaks for it.

    Parallel sizes are the exception: without a known number of GPUs they are left as they are.
    """
    if facts.family is not None and facts.family not in knob.families:
        return False
    if facts.family is None and len(knob.families) == 1:
        return False
    if knob.name in ("enable_expert_parallel", "all2all_backend") and facts.experts == 0:
        return False
    if knob.min_gpus > 1 and (facts.gpu_count is None or facts.gpu_count < knob.min_gpus):
        return False
    if knob.name == "moe_backend" and facts.experts == 0:
        return False
    if facts.flags is not None:  # what the binary itself says goes before the catalogue's versions
        return not (knob.gpu and facts.gpu_count == 0) and facts.flags.takes(knob)
    return not (knob.gpu and facts.gpu_count == 0) and knob.available(facts.vllm_version)


def _defaults(facts: ModelFacts, trials: Sequence[TrialRecord]) -> dict[str, KnobValue]:
    found: dict[str, KnobValue] = {}
    for knob in CATALOGUE.values():
        value = knob.nominal if knob.nominal is not None else default_value(knob.name, facts)
        if value is not None:
            found[knob.name] = value
    for trial in trials:
        for name in _LEARNED:
            value = trial.effective.get(name)
            if name not in trial.candidate.values and value is not None and name not in found:
                found[name] = value
    return found


def _axis(
    knob: Knob, search: Search, facts: ModelFacts, baseline: Candidate, defaults: Mapping[str, KnobValue]
) -> Axis:
    own = baseline.values.get(knob.name)
    values = [value for value in _grid(knob, facts) if search.allow_lossy or not is_lossy(knob.name, value)]
    if facts.flags is not None:
        values = [value for value in values if facts.flags.takes(knob, value)]
    if own is not None and own not in values:
        values.append(own)
    if knob.name == "speculative_method":  # no speculation is a depth of 0, not a method
        first = [own] if own is not None else []
        return Axis(knob.name, (*first, *(value for value in values if value != own)), ordered=False)
    default = defaults.get(knob.name)
    ordered = knob.kind in ("int", "float")
    if default is not None and own != default:
        values = [value for value in values if value != default]
    slots: list[KnobValue | None] = list(values)
    if default is None or own != default:
        slots.append(None)
    if ordered:
        place = default if default is not None else TYPICAL.get(knob.name, own if own is not None else 0)
        slots.sort(key=lambda value: float(place) + 1e-9 if value is None else float(value))
    else:
        slots.sort(key=lambda value: (value is not None, value != own))
    return Axis(knob.name, tuple(slots), ordered)


def _grid(knob: Knob, facts: ModelFacts) -> Iterable[KnobValue]:
    if knob.name == "speculative_method" and not facts.mtp_layers:
        return [value for value in knob.grid if value != "mtp"]
    if knob.min_gpus > 1 and knob.kind == "int" and facts.gpu_count:
        return [value for value in knob.grid if int(value) <= facts.gpu_count]
    return knob.grid
