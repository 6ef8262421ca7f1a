"""What is believed of each knob before it is tried: by how much it may move the objective, and which way.

These are priors, of what vLLM's documentation and published tunings report; trials correct them. A belief is an effect
on the log of the objective, relative to leaving the knob alone: a mean, and how wrong that mean may well be (its sd).
"""

import math
from dataclasses import dataclass

import numpy as np

from tunewright.domain.candidate import KnobValue
from tunewright.domain.profile import TrafficProfile
from tunewright.knobs.facts import ModelFacts
from tunewright.propose.encoding import Array, Encoding, Rows
from tunewright.propose.graphs import CAPTURED, launched_singly, slower
from tunewright.propose.memory import MemoryModel
from tunewright.propose.space import Axis

_BATCH_EXPONENT = 0.5
"""Throughput over requests that run at a time, below saturation: between memory-bound (1) and compute-bound (0)."""

_PLENTY = 1.3  # times the KV cache that the traffic fills: more of it then changes nothing
_REUSE_THAT_MATTERS = 0.02

_EFFECTS: dict[str, dict[KnobValue, tuple[float, float]]] = {
    "async_scheduling": {False: (-0.06, 0.06)},
    "enable_chunked_prefill": {False: (-0.10, 0.15)},
    "performance_mode": {"throughput": (0.0, 0.05), "interactivity": (-0.03, 0.05)},
    "kv_cache_dtype": {"fp8": (0.02, 0.10)},
    "enforce_eager": {True: (-0.30, 0.20)},
    "cudagraph_mode": {
        "NONE": (-0.25, 0.20),
        "PIECEWISE": (-0.05, 0.08),
        "FULL": (-0.03, 0.06),
        "FULL_DECODE_ONLY": (-0.03, 0.06),
    },
    "mamba_backend": {"flashinfer": (0.03, 0.06)},
    "enable_mamba_cache_stochastic_rounding": {True: (-0.05, 0.06)},
    "enable_expert_parallel": {True: (0.0, 0.15)},
}
_SPREAD = {"attention_backend": 0.06, "moe_backend": 0.08, "linear_backend": 0.05, "block_size": 0.04}
_SPREAD_OF_OTHERS = 0.05

_ORDERED: dict[str, tuple[float, float]] = {
    "max_num_seqs": (0.25, 3.0),
    "max_num_batched_tokens": (0.10, 2.0),
    "long_prefill_token_threshold": (0.04, 2.0),
    "max_cudagraph_capture_size": (0.06, 1.5),
    "stream_interval": (0.05, 1.5),
    "tensor_parallel_size": (0.30, 1.5),
    "pipeline_parallel_size": (0.30, 1.5),
    "data_parallel_size": (0.30, 1.5),
}
"""Sd of the effect, and over how many doublings of the value it stays much the same."""

_OWN_DRAFTER, _NGRAM = (0.10, -0.025, 0.15), (-0.02, -0.02, 0.15)
"""Of speculation: mean of one drafted token, of each more, and sd. Lookup of n-grams pays only on repetitive text."""
_SHARED_BY_DEPTHS = 1.5  # drafted tokens over which the effect of a method stays much the same

_HALF_STATE, _HALF_STATE_SD = 0.12, 0.12
"""Of a Mamba state in 16 bits, with many requests. Every decode step reads and writes the state of all of them: on one
H200, 256 requests at a hybrid model of 30B parameters, a step took 13.0 ms instead of 15.7 ms."""
_STREAMS_OF_HALF = 64.0  # requests at which half of that is left


@dataclass(frozen=True)
class Feature:
    """One knob, or a few that only mean something together: a level for every row, with the levels' joint prior."""

    columns: tuple[int, ...]
    levels: np.ndarray  # level by position(s)
    mean: Array  # of each level
    covariance: Array  # between levels
    likeness: Array  # between levels, 1 on the diagonal: how much of a surprise carries over

    def level(self, rows: Rows) -> np.ndarray:
        """Each row's level."""
        return np.asarray(self.levels[tuple(rows[:, column] for column in self.columns)])


class Beliefs:
    """The features of a space, and the mean that no single knob explains: requests that run at a time."""

    def __init__(
        self,
        encoding: Encoding,
        memory: MemoryModel,
        profile: TrafficProfile | None,
        facts: ModelFacts,
        *,
        latency: bool,
    ) -> None:
        self._encoding, self._memory, self._profile, self._facts = encoding, memory, profile, facts
        self._latency = latency
        self._clients = max(1.0, profile.concurrency_p95) if profile is not None else math.inf
        space = encoding.space
        together = ("speculative_method", "num_speculative_tokens")
        joint = all(space.axis(name) is not None for name in together)
        self.features = [
            self._single(index, axis) for index, axis in enumerate(space.axes) if not (joint and axis.name in together)
        ]
        if joint:
            self.features.append(self._speculation(*(encoding.names.index(name) for name in together)))

    def mean(self, rows: Rows) -> Array:
        """The expected log objective, up to a constant."""
        total = np.zeros(len(rows))
        for feature in self.features:
            total += feature.mean[feature.level(rows)]
        if not self._latency:
            total += _BATCH_EXPONENT * np.log(self.running(rows)) - np.log1p(self._launching(rows))
        return total

    def _launching(self, rows: Rows) -> Array:
        """What steps without a CUDA graph are believed to add to the time of the traffic's steps: 1 doubles it."""
        longer = slower(self._facts)
        if longer == 0.0 or self._profile is None or math.isinf(self._clients):
            return np.zeros(len(rows))
        mixed = self._encoding.map(rows, "cudagraph_mode", lambda mode: float(mode != "FULL_DECODE_ONLY"))
        seqs = self._encoding.number(rows, "max_num_seqs", 256.0)
        captured = self._encoding.number(rows, "max_cudagraph_capture_size")
        captured = np.where(captured > 0, captured, np.minimum(2 * seqs, CAPTURED))
        batch = self._encoding.number(rows, "max_num_batched_tokens", math.inf)
        depth = self._encoding.depth(rows)
        return longer * launched_singly(self._profile, self.running(rows), depth, captured, mixed, batch)

    def running(self, rows: Rows) -> Array:
        """Requests that run at a time: as many as clients, max_num_seqs and the KV cache allow."""
        running = np.minimum(self._encoding.number(rows, "max_num_seqs", 256.0), min(self._clients, 1e6))
        tokens = self._memory.tokens(rows)
        if tokens is not None and self._profile is not None:
            each = self._profile.prompt_tokens_mean + self._profile.output_tokens_mean / 2
            running = np.minimum(running, np.maximum(tokens / max(1.0, each), 1.0))
        return np.maximum(running, 1.0)

    # --- one knob ---

    def _single(self, index: int, axis: Axis) -> Feature:
        count = len(axis.values)
        values = [self._encoding.resolved(axis.name, value) for value in axis.values]
        if axis.ordered:
            spread, doublings = _ORDERED.get(axis.name, (_SPREAD_OF_OTHERS, 1.0))
            places = np.array([self._place(axis.name, value) for value in values])
            if axis.name == "gpu_memory_utilization":
                spread, doublings = self._spread_of_memory(), 0.05
            if axis.name == "omp_num_threads":
                spread = 0.15 if self._facts.gpu_count == 0 else 0.02
            likeness = np.exp(-0.5 * np.square((places[:, None] - places[None, :]) / doublings))
            return Feature((index,), np.arange(count), np.zeros(count), spread**2 * likeness, likeness)
        told = [self._effect(axis.name, value) for value in values]
        same = np.array([[float(left == right) for right in values] for left in values])
        spread_of = np.array([sd for _, sd in told])
        return Feature((index,), np.arange(count), np.array([mean for mean, _ in told]),
                       same * np.outer(spread_of, spread_of), np.where(same > 0, 1.0, 0.3))  # fmt: skip

    def _effect(self, name: str, value: KnobValue | None) -> tuple[float, float]:
        if name == "enable_prefix_caching":
            return self._caching() if value is True else (0.0, 0.0)
        if name == "mamba_ssm_cache_dtype":
            return self._state(value)
        known = _EFFECTS.get(name)
        if known is not None:
            mean, sd = known.get(value, (0.0, 0.0)) if value is not None else (0.0, 0.0)
            return (0.0 if self._latency else mean), sd
        spread = _SPREAD.get(name, _SPREAD_OF_OTHERS)
        return 0.0, 0.0 if value is None or value == "auto" else spread

    def _state(self, value: KnobValue | None) -> tuple[float, float]:
        """What 16 bits are worth grows with the requests that run, up to what the step spends on their states."""
        if value not in ("float16", "bfloat16"):
            return 0.0, 0.02
        clients = min(self._clients, 1e6)
        mean = _HALF_STATE * clients / (clients + _STREAMS_OF_HALF)
        return (0.0 if self._latency else mean), _HALF_STATE_SD

    def _caching(self) -> tuple[float, float]:
        """What is reused need not be prefilled; a prompt token costs about a tenth of a generated one."""
        profile = self._profile
        if profile is None or profile.prefix_reuse is None:
            return 0.0, 0.12
        if profile.prefix_reuse <= _REUSE_THAT_MATTERS:
            return -0.01, 0.02
        prompt, output = profile.prompt_tokens_mean, profile.output_tokens_mean
        return profile.prefix_reuse * prompt / max(1.0, prompt + 10 * output), 0.12

    def _place(self, name: str, value: KnobValue | None) -> float:
        """Where a value stands on its axis, in doublings; values beyond what can matter stand together."""
        number = float(value) if isinstance(value, int | float) else 1.0
        if name == "gpu_memory_utilization":
            return number
        if name == "max_num_seqs":
            number = min(number, self._clients)
        if name == "long_prefill_token_threshold":
            longest = (
                self._profile.prompt_tokens.edges[-1] if self._profile and self._profile.prompt_tokens.edges else 1e5
            )
            number = min(number or longest, longest)
        if name == "num_speculative_tokens":
            return number
        return math.log2(max(number, 1.0))

    def _spread_of_memory(self) -> float:
        """More memory helps only where the KV cache bounds what runs."""
        tokens = self._memory.tokens(self._encoding.rows([self._encoding.space.tidy(self._encoding.space.fixed)]))
        if tokens is None or self._profile is None or math.isinf(self._clients):
            return 0.04
        wanted = self._clients * (self._profile.prompt_tokens_mean + self._profile.output_tokens_mean)
        return 0.005 if tokens[0] > _PLENTY * wanted else 0.08

    # --- speculation: a method and a depth ---

    def _speculation(self, method_at: int, depth_at: int) -> Feature:
        axes = self._encoding.space.axes
        methods, depths = axes[method_at].values, axes[depth_at].values
        levels = np.zeros((len(methods), len(depths)), dtype=np.int64)
        pairs: list[tuple[KnobValue | None, int]] = [(None, 0)]
        for i, method in enumerate(methods):
            for j, value in enumerate(depths):
                depth = int(self._encoding.resolved("num_speculative_tokens", value) or 0)
                if depth and method is not None:
                    levels[i, j] = len(pairs)
                    pairs.append((method, depth))
        mean = np.array([self._drafting(method, depth) for method, depth in pairs])
        sd = np.array([0.0] + [(_NGRAM if method == "ngram" else _OWN_DRAFTER)[2] for method, _ in pairs[1:]])
        likeness = np.array([[self._alike(left, right) for right in pairs] for left in pairs])
        return Feature((method_at, depth_at), levels, mean, likeness * np.outer(sd, sd), np.maximum(likeness, 0.2))

    def _drafting(self, method: KnobValue | None, depth: int) -> float:
        if not depth or method is None:
            return 0.0
        first, each, _ = _NGRAM if method == "ngram" else _OWN_DRAFTER
        return first + each * (depth - 1)

    @staticmethod
    def _alike(left: tuple[KnobValue | None, int], right: tuple[KnobValue | None, int]) -> float:
        if left[0] != right[0]:
            return 0.0
        return math.exp(-0.5 * ((left[1] - right[1]) / _SHARED_BY_DEPTHS) ** 2)
