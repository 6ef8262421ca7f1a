"""A whole world on a fake clock: spare, load test, production and metrics, over one known surface.

`Killed` can be raised before or after the effect of any call, as a `kill -9` would fall there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunewright.controller.context import Context
from tunewright.controller.reconcile import reconcile
from tunewright.domain.answers import Answer, QualityPrompt
from tunewright.domain.candidate import Candidate
from tunewright.domain.load import LoadFile
from tunewright.domain.measurement import Estimate, GeneratorHealth, Interim, Latency, Measurement
from tunewright.domain.phases import TERMINAL
from tunewright.domain.profile import Source
from tunewright.domain.recipe import Recipe
from tunewright.domain.state import Failure, FailureKind, SearchInputs, TrialRecord, TuningRecord
from tunewright.domain.tuning import Tuning
from tunewright.ports import (
    LoadPhase,
    LoadRequest,
    LoadStatus,
    PortError,
    Proposal,
    Refused,
    Replica,
    Series,
    SeriesWindow,
    ServerPhase,
    ServerStatus,
    TargetPlan,
    TargetStatus,
)
from tunewright.store.memory import MemoryStore

BASELINE = Candidate(values={"max_num_seqs": 4})
BEST = Candidate(values={"max_num_seqs": 64})
THEIRS = Candidate(values={"max_num_seqs": 17})
"""What somebody else sets."""


class Killed(BaseException):
    """The agent dies here, as by `kill -9`: nothing may catch it."""


class FakeClock:
    """Time that only moves when told to."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


@dataclass
class Behaviour:
    """What a candidate does in this world."""

    tokens: float = 1000.0
    ttft: float = 0.2
    start: float = 5.0
    failure: Failure | None = None
    fails_under_load: bool = False
    errors: int = 0


@dataclass
class World:
    """The surface and everything that stands on it."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    proposals: list[Candidate] = field(default_factory=lambda: [Candidate(values={"max_num_seqs": n}) for n in (8, 64)])
    noise: Callable[[str, int], float] = lambda _hash, _run: 1.0
    speed: Callable[[int], float] = lambda _slot: 1.0
    """How fast the GPU of each spare is."""
    spares: int = 1
    replicas: int = 2
    kill_at: int | None = None
    kill_after_effect: bool = True
    outages: dict[str, int] = field(default_factory=dict)
    """Calls by name that raise PortError so many times before they work."""

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.calls: list[str] = []
        self.place: tuple[str, str] = ("", "")
        self.places: list[tuple[str, str, str]] = []
        """Per call: the tuning's phase, the trial's phase, and the call."""
        self.behaviours.setdefault(BASELINE.hash, Behaviour(tokens=400.0, ttft=0.8))
        self.behaviours.setdefault(BEST.hash, Behaviour(tokens=1200.0, ttft=0.3))
        self.store = MemoryStore()
        self.servers: dict[str, tuple[Candidate, float, bool, int]] = {}
        """On the spares: candidate, since when, whether it is being ended, and which spare."""
        self.most_servers = 0
        self.loads: dict[str, tuple[LoadRequest, float]] = {}
        self.runs: dict[str, int] = {}
        self.fleet: list[Server] = [Server(f"server-{i}", BASELINE, -60.0) for i in range(self.replicas)]
        self.canary: Server | None = None
        self.surge: Server | None = None
        self.stable = BASELINE
        self.plans: list[TargetPlan] = []
        self.canary_behaviour: Behaviour | None = None
        self.lossy: tuple[str, ...] = ()
        self.answers: Callable[[Candidate, int, int], list[Answer]] = lambda _what, _run, count: same_answers(count)
        self.intruder: Candidate | None = None
        self.let_go = 0
        self.canary_stays = ""
        """Why the canary can't be taken away now."""
        self.target_is_gone = False
        self.beside_knobs = "vllm-openai:v0.32.0: `vllm serve m`"
        self.prompts: tuple[QualityPrompt, ...] | Refused = ()
        self.load_file: LoadFile | PortError | Refused | None = None
        self.problems: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ("helm owns the arguments",)
        self.objections: dict[str, str] = {}

    def behaviour(self, candidate: Candidate) -> Behaviour:
        return self.behaviours.get(candidate.hash, Behaviour())

    def context(self) -> Context:
        return Context(
            clock=self.clock,
            store=Wrapped(self, self.store, "store"),  # type: ignore[arg-type]
            metrics=Wrapped(self, FakeMetrics(self), "metrics"),  # type: ignore[arg-type]
            spare=Wrapped(self, FakeSpare(self), "spare"),  # type: ignore[arg-type]
            load=Wrapped(self, FakeLoad(self), "load"),  # type: ignore[arg-type]
            target=Wrapped(self, FakeTarget(self), "target"),  # type: ignore[arg-type]
            proposer=FakeProposer(self),
            prompts=self.read_prompts,
            load_file=lambda: self.step("loadFile.keep", self.keep_file),  # type: ignore[arg-type, return-value]
        )

    def read_prompts(self) -> tuple[QualityPrompt, ...]:
        if isinstance(self.prompts, Refused):
            raise self.prompts
        return self.prompts

    def keep_file(self) -> LoadFile | None:
        if isinstance(self.load_file, PortError | Refused):
            raise self.load_file
        return self.load_file

    def create(self, tuning: Tuning) -> TuningRecord:
        record = TuningRecord(tuning=tuning, spec_hash=tuning.spec.spec_hash, phase_since=self.clock.now())
        return self.store.save(record)

    def record(self, name: str = "demo") -> TuningRecord:
        record = self.store.load(name)
        assert record is not None
        return record

    def trials_now(self, name: str) -> list[TrialRecord]:
        return list(self.store.trials(name))

    def run(
        self, name: str = "demo", *, until: Callable[[TuningRecord], bool] | None = None, limit: int = 20_000
    ) -> TuningRecord:
        """Pass after pass, moving the clock as asked, until `until` (or the end); bounded."""
        context, again, rested = self.context(), None, False
        for _ in range(limit):
            record = self.record(name)
            self.place = (record.phase, next((t.phase for t in self.trials_now(name) if t.phase != "Done"), ""))
            if until(record) if until else rested and record.phase in TERMINAL:
                return record
            again = reconcile(name, context)
            rested = again is None
            self.clock.advance(max(again or 0.0, 0.05))
        raise AssertionError(f"not there after {limit} passes: {self.record(name).phase}: {self.record(name).sentence}")

    def step(self, call: str, act: Callable[[], object]) -> object:
        """One external call: counted, perhaps failing, perhaps the place where the agent is killed."""
        self.calls.append(call)
        self.places.append((*self.place, call))
        here = self.kill_at is not None and len(self.calls) == self.kill_at
        if here and not self.kill_after_effect:
            raise Killed
        if self.outages.get(call, 0) > 0:
            self.outages[call] -= 1
            raise PortError(f"{call} does not answer")
        result = act()
        if here:
            raise Killed
        return result

    def scale(self, servers: int) -> None:
        """What an autoscaler does: servers of the present template come, or the last ones go."""
        now, newest = self.clock.now(), self.fleet[0].candidate
        # A ReplicaSet gives up those that are not ready first.
        self.fleet.sort(key=lambda server: now < server.ready_at)
        del self.fleet[servers:]
        while len(self.fleet) < servers:
            start = self.behaviour(newest).start
            self.fleet.append(Server(f"server-{len(self.fleet)}", newest, now, now + start))

    def intrude(self, candidate: Candidate | None) -> None:
        """Somebody else gives production a configuration of theirs and keeps it (None: the one of the beginning).

        What the tuning itself would have there, its baseline or its winner, is nobody's change to it.
        """
        self.intruder, now = candidate or BASELINE, self.clock.now()
        self.stable = self.intruder
        self.fleet = [Server(server.name, self.stable, now) for server in self.fleet]

    def leftovers(self) -> list[str]:
        """What is still on the spare, or of the load test."""
        return [*self.servers, *self.loads]


@dataclass
class Server:
    """One server of production."""

    name: str
    candidate: Candidate
    since: float
    ready_at: float = 0.0


class Wrapped:
    """Passes every method call through `World.step`."""

    def __init__(self, world: World, inner: object, name: str) -> None:
        self._world, self._inner, self._name = world, inner, name

    def __getattr__(self, method: str) -> Callable[..., object]:
        inner = getattr(self._inner, method)
        return lambda *args, **kwargs: self._world.step(f"{self._name}.{method}", lambda: inner(*args, **kwargs))


class FakeSpare:
    """One server at a time on each spare; what fails says so after its start time."""

    def __init__(self, world: World) -> None:
        self.world = world

    def start(self, trial_id: str, candidate: Candidate, slot: int = 0) -> None:
        assert slot < self.world.spares, "that GPU is not ours"
        others = [name for name, held in self.world.servers.items() if name != trial_id and held[3] == slot]
        if others:
            raise PortError(f"{others[0]} is still there")
        self.world.servers.setdefault(trial_id, (candidate, self.world.clock.now(), False, slot))
        self.world.most_servers = max(self.world.most_servers, len(self.world.servers))

    def poll(self, trial_id: str) -> ServerStatus:
        held = self.world.servers.get(trial_id)
        if held is None:
            return ServerStatus(ServerPhase.ABSENT)
        candidate, since, stopping, _ = held
        behaviour = self.world.behaviour(candidate)
        if stopping:
            del self.world.servers[trial_id]
            return ServerStatus(ServerPhase.ABSENT)
        if self.world.clock.now() - since < behaviour.start:
            return ServerStatus(ServerPhase.STARTING, start_seconds=self.world.clock.now() - since)
        loaded = trial_id in self.world.loads and self.world.clock.now() - self.world.loads[trial_id][1] > 1
        if behaviour.failure and (not behaviour.fails_under_load or loaded):
            return ServerStatus(ServerPhase.FAILED, failure=behaviour.failure)
        return ServerStatus(
            ServerPhase.READY,
            url=f"http://spare/{trial_id}",
            version="0.32.0+simulated.demo",
            start_seconds=behaviour.start,
            effective=dict(candidate.values),
        )

    def cancel(self, trial_id: str) -> None:
        if trial_id in self.world.servers:
            candidate, since, _, slot = self.world.servers[trial_id]
            self.world.servers[trial_id] = (candidate, since, True, slot)

    def log_tail(self, trial_id: str, lines: int = 50) -> str:
        return ""

    def sweep(self, keep: Sequence[str]) -> list[str]:
        found = [name for name in self.world.servers if name not in keep]
        for name in found:
            del self.world.servers[name]
        return found


class FakeLoad:
    """Measures what the surface says, times the noise."""

    def __init__(self, world: World) -> None:
        self.world = world

    def start(self, run_id: str, request: LoadRequest) -> None:
        if run_id not in self.world.servers:
            raise PortError(f"nothing answers at {request.url}")
        self.world.loads.setdefault(run_id, (request, self.world.clock.now()))

    def poll(self, run_id: str) -> LoadStatus:
        held = self.world.loads.get(run_id)
        if held is None:
            return LoadStatus(LoadPhase.ABSENT)
        request, since = held
        passed = self.world.clock.now() - since
        if passed < request.duration:
            told = request.interim and passed >= request.duration / 2 and run_id in self.world.servers
            return LoadStatus(LoadPhase.RUNNING, interim=self._interim(run_id, passed) if told else None)
        if run_id not in self.world.servers:
            return LoadStatus(LoadPhase.FAILED, detail="connection refused")
        candidate, _, _, slot = self.world.servers[run_id]
        self.world.runs[candidate.hash] = self.world.runs.get(candidate.hash, 0) + 1
        factor = self.world.noise(candidate.hash, self.world.runs[candidate.hash]) * self.world.speed(slot)
        count = len(request.prompts) or request.quality_prompts
        answers = self.world.answers(candidate, self.world.runs[candidate.hash], count)
        return LoadStatus(
            LoadPhase.DONE,
            measurement=measured(self.world.behaviour(candidate), factor, self.world.clock.now()),
            answers=answers,
        )

    def _interim(self, run_id: str, passed: float) -> Interim:
        """As the whole run will measure it, over what has passed; latencies to a tenth."""
        candidate = self.world.servers[run_id][0]
        factor = self.world.noise(candidate.hash, self.world.runs.get(candidate.hash, 0) + 1)
        whole = measured(self.world.behaviour(candidate), factor, self.world.clock.now())
        names = [(name, p) for name in ("ttft", "tpot", "itl", "e2e") for p in ("p50", "p95", "p99")]
        least = {f"{name}{p.upper()}": 0.9 * whole.latency(name, p) for name, p in names}  # type: ignore[arg-type]
        return Interim(measurement=whole.model_copy(update={"duration": passed}), at_least=least)

    def cancel(self, run_id: str) -> None:
        self.world.loads.pop(run_id, None)


def same_answers(count: int) -> list[Answer]:
    """What every sound server says."""
    words = (" the", " same", " answer")
    top = tuple({word: -0.1, " else": -2.5} for word in words)
    return [Answer(prompt=f"p{n}", text="".join(words), tokens=words, top=top) for n in range(count)]


def measured(behaviour: Behaviour, factor: float = 1.0, now: float = 0.0) -> Measurement:
    """A sound measurement of a behaviour."""
    tokens = behaviour.tokens * factor

    def latency(seconds: float) -> Latency:
        return Latency(count=100, mean=seconds, p50=seconds, p90=seconds, p95=seconds, p99=seconds)

    return Measurement(
        started_at=now,
        duration=10.0,
        source=Source.SIMULATED,
        vllm_version="0.32.0+simulated.demo",
        seed=1,
        warmup=1.0,
        warmup_settled=True,
        completed=100 if behaviour.tokens else 0,
        failed=behaviour.errors,
        output_tokens_per_second=Estimate(value=tokens, low=tokens * 0.97, high=tokens * 1.03),
        input_tokens_per_second=tokens * 3,
        requests_per_second=tokens / 60,
        ttft=latency(behaviour.ttft),
        tpot=latency(0.02),
        itl=latency(0.02),
        e2e=latency(behaviour.ttft + 1.2),
        generator=GeneratorHealth(asked=16, achieved=16, schedule_lag_p99=0.0, cpu_share=0.1, merged_reads=0.0),
    )


class FakeTarget:
    """A fleet whose servers take their start time; every call moves it one step, as the real one."""

    def __init__(self, world: World) -> None:
        self.world = world

    def describe(self) -> str:
        return "2 servers at 127.0.0.1:8000"

    def baseline(self) -> Candidate:
        return self.world.stable

    def beside_knobs(self) -> str:
        return self.world.beside_knobs

    def observe(self) -> TargetStatus:
        return self._status(settled=True, detail="as it is")

    def preflight(self, candidate: Candidate) -> Sequence[str]:
        return self.world.problems

    def notes(self, candidate: Candidate) -> Sequence[str]:
        return self.world.notes

    def recipe(self, candidate: Candidate) -> Recipe:
        return Recipe(args=("vllm", "serve", "m", *map(str, candidate.values.values())))

    def recommend(self, candidate: Candidate) -> str:
        return str(dict(candidate.values))

    def let_go(self) -> bool:
        self._not_gone()
        self.world.surge = None
        if not self.world.canary_stays:
            self.world.canary = None
        self.world.let_go += 1
        return True

    def _not_gone(self) -> None:
        if self.world.target_is_gone:
            raise Refused("there is no Deployment vllm in namespace prod; name it right")

    def apply(self, plan: TargetPlan) -> TargetStatus:
        world, now = self.world, self.world.clock.now()
        self._not_gone()
        world.plans.append(plan)
        self._follow_canary(plan, now)
        if world.intruder is not None and world.intruder.hash not in (plan.baseline.hash, plan.candidate.hash):
            foreign = f"argocd changed the arguments to {dict(world.intruder.values)}"
            return replace(self._status(False, "somebody else changed it"), foreign=foreign)
        settled = plan.canary == (world.canary is not None) and self._is_ready(world.canary, now)
        held = world.canary_stays if world.canary is not None else ""
        for slot, server in enumerate(world.fleet):
            wanted = plan.candidate if slot < plan.updated else plan.baseline
            if server.candidate.hash == wanted.hash:
                if not self._is_ready(server, now):
                    settled = False
                    break
                continue
            settled = False
            others = [s for s in (*world.fleet, world.canary) if s is not None and s is not server]
            start = world.behaviour(wanted).start
            if any(self._is_ready(s, now) for s in others):
                world.fleet[slot] = Server(server.name, wanted, now, now + start)
            elif world.surge is None or world.surge.candidate.hash != wanted.hash:
                world.surge = Server(server.name, wanted, now, now + start)
            elif self._is_ready(world.surge, now):
                world.fleet[slot], world.surge = world.surge, None
            break
        if settled:
            world.surge = None  # it was not needed after all
        if settled and not plan.canary:
            world.stable = plan.candidate if plan.updated == len(world.fleet) else plan.baseline
        self.check(plan.updated)
        failure = None
        if world.canary and (broken := self._canary_behaviour().failure):
            failure = broken
        status = self._status(settled, "moving" if not settled else "settled", failure)
        return replace(status, foreign=held) if held else status

    def check(self, updated: int) -> None:
        """Invariant 1: somebody of a known-good configuration answers at every moment.

        The canary's is one once the last replica is to run it: it was judged before.
        """
        now, canary = self.world.clock.now(), self.world.canary
        trusted = [*self.world.fleet, *([canary] if canary and updated >= len(self.world.fleet) else [])]
        assert any(self._is_ready(server, now) for server in trusted), "no ready server is left"

    def _follow_canary(self, plan: TargetPlan, now: float) -> None:
        if plan.canary and self.world.canary is None:
            start = self.world.behaviour(plan.candidate).start
            self.world.canary = Server("canary", plan.candidate, now, now + start)
        elif not plan.canary and not self.world.canary_stays:
            self.world.canary = None

    def _canary_behaviour(self) -> Behaviour:
        assert self.world.canary is not None
        return self.world.canary_behaviour or self.world.behaviour(self.world.canary.candidate)

    def _is_ready(self, server: Server | None, now: float) -> bool:
        return server is None or now >= server.ready_at

    def _status(self, settled: bool, detail: str, failure: Failure | None = None) -> TargetStatus:
        now = self.world.clock.now()
        servers = [*self.world.fleet, *([self.world.canary] if self.world.canary else [])]
        replicas = [
            Replica(
                name=s.name,
                candidate_hash=s.candidate.hash,
                ready=self._is_ready(s, now),
                canary=s is self.world.canary,
                labels={"instance": s.name},
                since=s.since,
                version="0.32.0+simulated.demo",
            )
            for s in servers
        ]
        return TargetStatus(
            replicas=replicas, desired=len(self.world.fleet), settled=settled, detail=detail, failure=failure
        )


class FakeProposer:
    """Proposes a fixed list, each once."""

    def __init__(self, world: World) -> None:
        self.world = world

    def propose(
        self, baseline: Candidate, trials: Sequence[TrialRecord], profile: object, earlier: object = ()
    ) -> Proposal | None:
        tried = {t.candidate.hash for t in trials if t.purpose == "search"}
        left = [c for c in self.world.proposals if c.hash not in tried]
        return Proposal(left[0], "next of the list") if left else None

    def inputs(self, baseline: Candidate, trials: Sequence[TrialRecord]) -> SearchInputs:
        return SearchInputs(version="0.32.0", not_tuned=("--api-server-count",))

    def objection(self, candidate: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> str | None:
        return self.world.objections.get(candidate.hash)

    def simplify(self, winner: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> Candidate:
        return winner

    def rungs(self, winner: Candidate, baseline: Candidate, trials: Sequence[TrialRecord]) -> Sequence[Candidate]:
        changes = list(winner.differences(baseline))[:-1]
        steps = [changes[: count + 1] for count in range(len(changes))]
        return [Candidate(values={**baseline.values, **{k: winner.values[k] for k in step}}) for step in steps]

    def lossy(self, candidate: Candidate, baseline: Candidate) -> Sequence[str]:
        return self.world.lossy


class FakeMetrics:
    """Counters that rise evenly, as servers with steady traffic would show."""

    rate = 60.0

    def __init__(self, world: World) -> None:
        self.world = world

    def describe(self) -> str:
        return "a fake"

    def fetch(
        self, names: Sequence[str], start: float, end: float, matchers: Mapping[str, str] | None = None
    ) -> SeriesWindow:
        servers = {s.name: s for s in (*self.world.fleet, self.world.canary) if s is not None}
        if matchers:
            servers = {name: s for name, s in servers.items() if name == matchers.get("instance")}
        series: list[Series] = []
        for name, server in servers.items():
            canary = server is self.world.canary
            behaviour = self.world.behaviour(server.candidate)
            if canary and self.world.canary_behaviour is not None:
                behaviour = self.world.canary_behaviour
            since = max(start, server.ready_at)
            if since < end:
                series += [s for s in self._series(name, behaviour, server.ready_at, since, end) if s.name in names]
        return SeriesWindow(start=start, end=end, series=series, queries=[f"{{instance=~{list(servers)}}}"])

    def _series(self, name: str, behaviour: Behaviour, born: float, start: float, end: float) -> list[Series]:
        labels = {"instance": name, "model_name": "m", "engine": "0"}
        step = max(1.0, (end - start) / 20)
        times = [start + step * i for i in range(int((end - start) / step) + 1)]

        def counter(metric: str, rate: float, **more: str) -> Series:
            return Series({"__name__": metric, **labels, **more}, [(t, rate * (t - born)) for t in times])

        def gauge(metric: str, value: float) -> Series:
            return Series({"__name__": metric, **labels}, [(t, value) for t in times])

        def histogram(metric: str, value: float, edges: Sequence[float]) -> list[Series]:
            buckets = [counter(f"{metric}_bucket", self.rate if edge >= value else 0.0, le=str(edge)) for edge in edges]
            infinite = counter(f"{metric}_bucket", self.rate, le="+Inf")
            return [
                *buckets,
                infinite,
                counter(f"{metric}_sum", self.rate * value),
                counter(f"{metric}_count", self.rate),
            ]

        bad = self.rate * behaviour.errors / 100
        lengths = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
        seconds = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
        return [
            counter("vllm:request_success_total", self.rate - bad, finished_reason="length"),
            counter("vllm:request_success_total", bad, finished_reason="error"),
            counter("vllm:request_success_total", 0.0, finished_reason="abort"),
            counter("vllm:prompt_tokens_total", self.rate * 200),
            counter("vllm:generation_tokens_total", self.rate * 60),
            counter("vllm:prefix_cache_queries_total", self.rate * 200),
            counter("vllm:prefix_cache_hits_total", self.rate * 100),
            counter("vllm:num_preemptions_total", 0.0),
            gauge("vllm:num_requests_running", 4.0),
            gauge("vllm:num_requests_waiting", 0.0),
            *histogram("vllm:request_prompt_tokens", 200.0, lengths),
            *histogram("vllm:request_generation_tokens", 60.0, lengths),
            *histogram("vllm:time_to_first_token_seconds", behaviour.ttft, seconds),
            *histogram("vllm:inter_token_latency_seconds", 0.02, (0.01, 0.025, 0.05, 0.1)),
            *histogram("vllm:request_time_per_output_token_seconds", 0.02, (0.01, 0.025, 0.05, 0.1)),
            *histogram("vllm:e2e_request_latency_seconds", behaviour.ttft + 1.2, seconds),
            *histogram("vllm:request_queue_time_seconds", 0.1, seconds),
        ]


def oom() -> Failure:
    """A candidate's own fault."""
    return Failure(kind=FailureKind.OUT_OF_MEMORY, cause="CUDA out of memory")


def port_in_use() -> Failure:
    """A machine's fault."""
    return Failure(kind=FailureKind.PORT_IN_USE, cause="[Errno 98] Address already in use")
