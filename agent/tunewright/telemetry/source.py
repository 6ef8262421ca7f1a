"""A metrics source that is watched itself: its failures must show before somebody needs its numbers."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tunewright.ports import MetricsSource, SeriesWindow


class Questions(Protocol):
    """What is told of each question: `Instruments` implements it."""

    def asked(self, outcome: str) -> None:
        """One question ended so: data, empty or error."""
        ...


class WatchedSource:
    """Implements `ports.MetricsSource` by another one, and tells `questions` how each question ended."""

    def __init__(self, source: MetricsSource, questions: Questions) -> None:
        self._source, self._questions = source, questions

    def describe(self) -> str:
        """As the source describes itself."""
        return self._source.describe()

    def fetch(
        self, names: Sequence[str], start: float, end: float, matchers: Mapping[str, str] | None = None
    ) -> SeriesWindow:
        """As the source answers; what it raises is raised."""
        try:
            window = self._source.fetch(names, start, end, matchers)
        except Exception:
            self._questions.asked("error")
            raise
        self._questions.asked("data" if window.series else "empty")
        return window
