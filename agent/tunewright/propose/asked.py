"""Candidates that a person asks for: read, and refused with the reason where they make no sense."""

from collections.abc import Mapping

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.tuning import Search
from tunewright.knobs.catalogue import CATALOGUE, is_lossy, near
from tunewright.ports import Refused


def read_asked(search: Search, values: Mapping[str, str], where: str) -> dict[str, KnobValue]:
    """The knob values that a person named, as text. Raises `Refused` naming `where`, what is wrong and what is allowed.

    Whether they go together, and run on this model, is asked of the proposer.
    """
    if not values:
        raise Refused(f"{where}: it names no knob; write knob: value")
    found: dict[str, KnobValue] = {}
    for name, text in values.items():
        if name not in CATALOGUE:
            likely = near(name)
            told = f"did you mean {' or '.join(likely)}?" if likely else "see docs/knobs.md"
            raise Refused(f"{where}: {name!r} is no knob; {told}")
        try:
            found[name] = CATALOGUE[name].parse(text)
        except ValueError as error:
            raise Refused(f"{where}: {error}") from None
        if is_lossy(name, found[name]) and not search.allow_lossy:
            raise Refused(f"{where}: {name} {text} can change answers; set spec.search.allowLossy: true to allow that")
        if name in search.pin and CATALOGUE[name].parse(search.pin[name]) != found[name]:
            raise Refused(f"{where}: {name} is fixed to {search.pin[name]} by spec.search.pin")
    return found


def laid_over(baseline: Candidate, search: Search, values: Mapping[str, KnobValue]) -> Candidate:
    """The candidate that is meant: what production runs, with the pins and these values."""
    pins = {name: CATALOGUE[name].parse(text) for name, text in search.pin.items()}
    return Candidate(values={**baseline.values, **pins, **values})
