"""What each candidate leaves for the KV cache, learned from what every start logged; so that no start is spent on one
that can't hold a single request.

A linear model with a broad prior: memory × utilisation, less weights and runtime, less activations per batched token,
less what each sequence needs, less the graphs, less the drafter. One start pins most of it; the priors of the slopes
are of the size that vLLM's profiling run shows on models of 1 to 100 billion parameters.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import FailureKind, TrialRecord
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.propose.encoding import Array, Encoding, Rows
from tunewright.propose.lessons import machine_fault

_LOGGED = 0.05  # GiB by which two starts of one configuration differ
_LOGGED_EARLIER = 0.5  # the same, of an earlier tuning
_CENSORED = 1.0  # GiB by which "no memory is left" may be short of it
_TOLD = re.compile(r"available KV cache memory \(([\d.]+) GiB\)")
_SLOPES = ((0.35, 0.25), (0.15, 0.15), (0.8, 0.6), (1.0, 1.5))
"""GiB, and the sd of that: per 1024 batched tokens, per 256 sequences, per 512 of capture size, per drafter."""


class MemoryModel:
    """Lessons in memory of a list of trials, to be asked about rows of candidates."""

    def __init__(
        self,
        trials: Sequence[TrialRecord],
        encoding: Encoding,
        facts: ModelFacts,
        earlier: Sequence[tuple[Candidate, float]] = (),
    ) -> None:
        """`earlier`: GiB for the KV cache that starts of earlier tunings logged; other things may have changed."""
        self._encoding, self._hybrid = encoding, facts.family is Family.HYBRID
        total = facts.gpu_memory_gib
        memory, spread = (total, 0.02 * total) if total else (80.0, 60.0)
        self._mean = np.array([memory, 0.5 * memory, *(mean for mean, _ in _SLOPES)])
        self._covariance = np.diag(np.square([spread, 0.4 * memory, *(sd for _, sd in _SLOPES)]))
        self._per_request: list[tuple[Rows, float]] = []
        self._per_token: list[tuple[Rows, float]] = []
        self.known = False
        self._last: tuple[bytes, tuple[Array, Array]] = (b"", (np.zeros(0), np.zeros(0)))
        for candidate, available in earlier:
            self._update(encoding.rows([candidate]), available, _LOGGED_EARLIER)
        for trial in trials:
            if not machine_fault(trial):
                self._learn(trial)

    def _learn(self, trial: TrialRecord) -> None:
        row = self._encoding.rows([trial.candidate])
        memory, failure = trial.memory, trial.failure
        if memory is not None and memory.available_kv_gib is not None:
            self._update(row, memory.available_kv_gib, _LOGGED)
            self.known = True
            if memory.max_concurrency:
                self._per_request.append((row, memory.available_kv_gib / memory.max_concurrency))
            if memory.kv_cache_tokens:
                self._per_token.append((row, memory.available_kv_gib / memory.kv_cache_tokens))
        elif failure is not None and failure.kind is FailureKind.KV_TOO_SMALL:
            told = _TOLD.search(failure.cause)
            expected = float(self.available(row)[0][0])
            self._update(row, float(told[1]) if told else min(-0.3, expected), _LOGGED if told else _CENSORED)

    def _update(self, row: Rows, available: float, sd: float) -> None:
        features = self._features(row)[0]
        gain = self._covariance @ features
        gain /= float(features @ gain) + sd**2
        self._mean = self._mean + gain * (available - float(features @ self._mean))
        self._covariance = self._covariance - np.outer(gain, features @ self._covariance)
        self._last = (b"", self._last[1])

    def _features(self, rows: Rows) -> Array:
        of = self._encoding
        depth = of.depth(rows)
        seqs = of.number(rows, "max_num_seqs", 256.0) * (1 + depth)
        # ngram looks back in the request itself; every other method brings a drafter's weights.
        drafter = (depth > 0) * of.map(rows, "speculative_method", lambda method: float(method != "ngram"))
        eager = of.number(rows, "enforce_eager")
        capture = of.number(rows, "max_cudagraph_capture_size", 512.0) * (1 - eager)
        return np.stack(
            [
                of.number(rows, "gpu_memory_utilization", 0.92),
                -np.ones(len(rows)),
                -of.number(rows, "max_num_batched_tokens", 2048.0) / 1024,
                -seqs / 256,
                -capture / 512,
                -drafter,
            ],
            axis=1,
        )

    def available(self, rows: Rows) -> tuple[Array, Array]:
        """GiB for the KV cache, and the sd of that."""
        key = rows.tobytes()
        if key != self._last[0]:  # the same rows are asked about several times in a row
            features = self._features(rows)
            variance = np.sum((features @ self._covariance) * features, axis=1)
            self._last = (key, (features @ self._mean, np.sqrt(np.maximum(variance, 0.0) + _LOGGED**2)))
        return self._last[1]

    def starts(self, rows: Rows) -> Array:
        """Chance that the cache holds at least one request of full length; 1 while nothing is known."""
        if not self.known:
            return np.ones(len(rows))
        mean, sd = self.available(rows)
        needed = self._scaled(rows, self._per_request, of_request=True)
        return np.asarray(ndtr((mean - (0.0 if needed is None else needed)) / sd), dtype=np.float64)

    def tokens(self, rows: Rows) -> Array | None:
        """Tokens that the KV cache will hold; None: not known. A hybrid's requests take pages, not tokens."""
        each = None if self._hybrid else self._scaled(rows, self._per_token, of_request=False)
        return None if each is None else np.maximum(self.available(rows)[0], 0.0) / each

    def _scaled(self, rows: Rows, seen: list[tuple[Rows, float]], *, of_request: bool) -> Array | None:
        """GiB per request or token as the last start told it, for rows of other data types and depths."""
        if not seen:
            return None
        row, told = seen[-1]
        scale = self._width(rows) / self._width(row)[0]
        if self._hybrid and of_request:
            scale = scale * (1 + self._encoding.depth(rows)) / (1 + self._encoding.depth(row)[0])
        return np.asarray(told * scale, dtype=np.float64)

    def _width(self, rows: Rows) -> Array:
        return self._encoding.map(rows, "kv_cache_dtype", lambda v: 0.5 if str(v).startswith(("fp8", "int8")) else 1.0)

    def lowered(self, candidate: Candidate, searched: Sequence[str], least: float) -> Candidate:
        """The candidate with fewer batched tokens, then fewer sequences, until it will start as likely as `least`."""
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            axis = self._encoding.space.axis(name)
            if name not in searched or axis is None:
                continue
            numbers = [float(v) for v in axis.values if v is not None]
            for value in sorted(numbers, reverse=True):
                if self.chance(candidate) >= least:
                    return candidate
                own = self._encoding.resolved(name, candidate.values.get(name))
                if own is not None and value < float(own) and value >= min(numbers):
                    candidate = candidate.with_value(name, int(value))
        return candidate

    def chance(self, candidate: Candidate) -> float:
        """`starts` of one candidate."""
        if not self.known:
            return 1.0
        return float(self.starts(self._encoding.rows([candidate]))[0])

    def told(self, candidate: Candidate) -> str:
        """For people: what is expected."""
        mean, sd = self.available(self._encoding.rows([candidate]))
        return f"{mean[0]:.1f} ± {sd[0]:.1f} GiB for the KV cache" if math.isfinite(mean[0]) else ""
