"""Candidates as rows of positions on the axes of a space, and what those positions mean in numbers."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.propose.space import TYPICAL, Space

Rows = npt.NDArray[np.int64]  # one candidate a row, one axis a column
Array = npt.NDArray[np.float64]


class Encoding:
    """Rows of one space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.names = [axis.name for axis in space.axes]
        self.lengths = [len(axis.values) for axis in space.axes]

    def rows(self, candidates: Sequence[Candidate]) -> Rows:
        """Candidates as rows; what is off the axes counts as the nearest."""
        table = [list(self.space.positions(candidate).values()) for candidate in candidates]
        return np.array(table, dtype=np.int64).reshape(len(candidates), len(self.names))

    def candidate(self, row: Rows) -> Candidate:
        """The candidate of one row."""
        return self.space.candidate(dict(zip(self.names, map(int, row), strict=True)))

    def resolved(self, name: str, value: KnobValue | None) -> KnobValue | None:
        """`value`, or what vLLM makes of a knob that is not set, as far as that is known or usual."""
        if value is not None:
            return value
        return self.space.defaults.get(name, TYPICAL.get(name))

    def map(self, rows: Rows, name: str, meaning: Callable[[KnobValue | None], float]) -> Array:
        """`meaning` of a knob's resolved value, for every row; also for a knob that is not searched."""
        axis = self.space.axis(name)
        if axis is None:
            value = self.resolved(name, self.space.fixed.get(name))
            return np.full(len(rows), meaning(value))
        table = np.array([meaning(self.resolved(name, value)) for value in axis.values])
        return np.asarray(table[rows[:, self.names.index(name)]], dtype=np.float64)

    def number(self, rows: Rows, name: str, unknown: float = 0.0) -> Array:
        """A knob as a number (a switch counts 1 or 0)."""
        return self.map(rows, name, lambda value: float(value) if isinstance(value, int | float) else unknown)

    def depth(self, rows: Rows) -> Array:
        """Tokens of speculation; 0 where no method is set."""
        return self.number(rows, "num_speculative_tokens") * self.map(
            rows, "speculative_method", lambda v: float(bool(v))
        )

    def around(self, row: Rows) -> Rows:
        """Every row that differs from `row` on one axis, one value each."""
        changed = []
        for index, length in enumerate(self.lengths):
            for place in range(length):
                if place != row[index]:
                    other = row.copy()
                    other[index] = place
                    changed.append(other)
        return np.array(changed, dtype=np.int64).reshape(len(changed), len(self.names))
