"""Simulated request streams of a canary and the stable servers, as their counters would show them at each scrape.

Requests arrive as a Poisson process. Times to the first token and per token are log-normal and independent; the whole
request is the first token and `OUTPUT_TOKENS` more. A stream grows as it is looked at, so that what is judged early
costs little.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tunewright.domain.profile import Histogram
from tunewright.observe import names
from tunewright.rollout.evidence import Evidence, Latency, blocks_of
from tunewright.rollout.inference import Block

Floats = npt.NDArray[np.float64]

SCRAPE = 15.0  # seconds between two scrapes
TTFT, TPOT, OUTPUT_TOKENS = 0.3, 0.02, 100  # medians in seconds
CHUNK = 20  # scrapes that are drawn at once
LONGEST = 240  # scrapes of a whole rollout

VLLM_EDGES = {
    names.TTFT: (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    names.TPOT: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    names.E2E: (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
}
"""The buckets of vLLM 0.26 to 0.33, without the last few."""
FINE_EDGES = {name: tuple(float(e) for e in np.geomspace(e[0] / 2, e[-1], 400)) for name, e in VLLM_EDGES.items()}
"""So narrow that percentiles are as good as exact: what buckets cost is seen beside it."""
LATENCIES = tuple(VLLM_EDGES)


@dataclass(frozen=True)
class Behaviour:
    """What the servers of one side do: requests/s, log-sd, a factor on all latencies, and the share of errors.

    A share `tail` of the requests takes `tail_factor` times as long on top. `swell` is the log-sd of a slow movement of
    all latencies with the load, which both sides share; a fifth of it comes on top for each side alone.
    """

    rate: float
    spread: float
    factor: float = 1.0
    errors: float = 0.0
    tail: float = 0.0
    tail_factor: float = 1.0
    swell: float = 0.0


class Side:
    """One side's counters, scrape by scrape."""

    def __init__(
        self, behaviour: Behaviour, edges: dict[str, tuple[float, ...]], rng: np.random.Generator, common: Floats
    ) -> None:
        self.behaviour, self.edges, self._rng = behaviour, edges, rng
        self._level = np.exp(behaviour.swell * (common + 0.2 * slow_noise(rng)))
        self._arrays = {name: np.asarray(edge) for name, edge in edges.items()}
        self.finished: Floats = np.empty(0)
        self.errors: Floats = np.empty(0)
        self.sums: dict[str, Floats] = dict.fromkeys(edges, np.empty(0))
        self.buckets: dict[str, Floats] = {name: np.empty((0, len(edge) + 1)) for name, edge in edges.items()}

    def grow(self, scrapes: int) -> None:
        """Draw requests until there are so many scrapes."""
        while len(self.finished) < scrapes:
            self._draw()

    def evidence(self, scrapes: int) -> Evidence:
        """What the first so many scrapes tell, as `tunewright.rollout.evidence` would have it from their samples."""
        count = blocks_of(scrapes)
        # A scrape at time t belongs to the block that ends at or after it.
        block = np.ceil(np.arange(1, scrapes + 1) / (scrapes / count) - 1e-9).astype(int) - 1
        latencies = {}
        for name in LATENCIES:
            table = self.buckets[name][:scrapes]
            whole = table.sum(axis=0)
            counts = np.bincount(block, table.sum(axis=1), count)
            totals = np.bincount(block, self.sums[name][:scrapes], count)
            latencies[name] = Latency(
                Histogram(edges=self.edges[name], counts=tuple(whole[:-1].tolist()), overflow=float(whole[-1])),
                [Block(n, total) for n, total in zip(counts.tolist(), totals.tolist(), strict=True)],
            )
        finished, errors = float(self.finished[:scrapes].sum()), float(self.errors[:scrapes].sum())
        requests = np.bincount(block, self.finished[:scrapes], count)
        calm = [Block(n, 0.0) for n in requests.tolist()]
        return Evidence(
            finished=finished, errors=errors, aborted=0.0, latencies=latencies, problems=(), preemptions=calm
        )

    def _draw(self) -> None:
        b, rng = self.behaviour, self._rng
        arrivals = rng.poisson(b.rate * SCRAPE, CHUNK)
        total = int(arrivals.sum())
        scrape = np.repeat(np.arange(CHUNK), arrivals)
        done = len(self.finished)
        level = self._level[done : done + CHUNK][scrape]
        slow = np.where(rng.random(total) < b.tail, b.tail_factor, 1.0) * b.factor * level
        ttft = TTFT * np.exp(b.spread * rng.normal(size=total)) * slow
        tpot = TPOT * np.exp(b.spread * rng.normal(size=total)) * slow
        failed = rng.random(total) < b.errors
        good = ~failed
        self.finished = np.append(self.finished, arrivals.astype(float))
        self.errors = np.append(self.errors, np.bincount(scrape, failed, CHUNK))
        for name, values in ((names.TTFT, ttft), (names.TPOT, tpot), (names.E2E, ttft + tpot * OUTPUT_TOKENS)):
            width = len(self.edges[name]) + 1
            slot = scrape * width + np.searchsorted(self._arrays[name], values, side="left")
            table = np.bincount(slot, good, CHUNK * width).reshape(CHUNK, width)
            self.buckets[name] = np.concatenate([self.buckets[name], table])
            self.sums[name] = np.append(self.sums[name], np.bincount(scrape, good * values, CHUNK))


def slow_noise(rng: np.random.Generator) -> Floats:
    """Unit-variance noise, one value a scrape, that forgets half of itself every three scrapes."""
    values, state = np.empty(LONGEST), float(rng.normal())
    for at, kick in enumerate(rng.normal(size=LONGEST)):
        state = 0.8 * state + 0.6 * kick
        values[at] = state
    return values


@dataclass(frozen=True)
class Case:
    """One kind of canary in one kind of traffic. `slo_over_stable`: bound of ttftP95 over the stable servers' own."""

    name: str
    canary: Behaviour
    stable: Behaviour
    bad: bool
    fine_buckets: bool = False
    slo_over_stable: float | None = None


def case(
    name: str,
    *,
    rate: float = 10.0,
    spread: float = 0.5,
    swell: float = 0.0,
    share: float = 1 / 3,
    bad: bool = True,
    fine_buckets: bool = False,
    slo_over_stable: float | None = None,
    **canary: float,
) -> Case:
    """A case by the whole rate and the canary's share; the keywords left are the canary's behaviour."""
    stable = Behaviour(rate=rate * (1 - share), spread=spread, swell=swell)
    return Case(name, replace(stable, rate=rate * share, **canary), stable, bad, fine_buckets, slo_over_stable)


def sides(case: Case, seed: int) -> tuple[Side, Side]:
    """Canary and stable servers of one rollout."""
    edges = FINE_EDGES if case.fine_buckets else VLLM_EDGES
    canary, stable, shared = np.random.default_rng(seed).spawn(3)
    common = slow_noise(shared)
    return Side(case.canary, edges, canary, common), Side(case.stable, edges, stable, common)


def ttft_p95(behaviour: Behaviour) -> float:
    """The true 95th percentile of the time to the first token, in seconds, of a behaviour without a tail."""
    return TTFT * behaviour.factor * float(np.exp(1.6448536 * behaviour.spread))
