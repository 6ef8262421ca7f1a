"""Tunings in every phase, in a namespace of the benchmark's own, written as the store writes them.

Real: the API server, the custom resources, the Deployments and their controllers, the records and trials in their real
form. Not real: no container ever runs. Targets have no replica, or one that no node takes; spares wait for a GPU that
is not there; what the records say was measured was not.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from tunewright.clock import SystemClock
from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import Estimate, GeneratorHealth, Latency, Measurement
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.domain.state import (
    ConfirmStatus,
    Finalist,
    Gain,
    PhaseChange,
    PromotionState,
    TrialOutcome,
    TrialPhase,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.domain.tuning import Tuning
from tunewright.domain.verdict import Outcome, Verdict
from tunewright.kube import crds
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import NotFound
from tunewright.kube.resources import CRDS, DEPLOYMENTS, NAMESPACES, SERVICE_ACCOUNTS, TUNINGS, Resource
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.store.kubernetes import KubernetesStore

ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")

PATIENCE = 20.0
"""Seconds that the namespace's end is waited for."""
WRITERS = 16
"""Tunings that are made at once."""

BASELINE = Candidate(values={"max_num_seqs": 4})
WINNER = Candidate(values={"max_num_seqs": 64, "enable_prefix_caching": True})

MIX = (
    "awaiting", "promoted", "searching", "suspended", "awaiting",
    "profiling", "rejected", "promoted", "noImprovement", "awaiting",
    "promoted", "searching", "rejected", "suspended", "awaiting",
    "promoted", "recommended", "noImprovement", "failed", "promoted",
)  # fmt: skip
"""What every 20 tunings do; the first 10 have nearly all of it."""

LEARNING = ("profiling", "hanging")
"""The second asks a Prometheus that does not answer."""

ENDS = {
    "rejected": Phase.REJECTED,
    "noImprovement": Phase.NO_IMPROVEMENT,
    "recommended": Phase.RECOMMENDED,
    "failed": Phase.FAILED,
}


@dataclass(frozen=True)
class Made:
    """One tuning of the benchmark and what it does."""

    name: str
    kind: str


def install(kube: Kube, namespace: str) -> None:
    """The CRDs, and a namespace."""
    for document in crds.documents().values():
        kube.apply(CRDS, document, force=True)
    kube.create(NAMESPACES, {"metadata": {"name": namespace}})


@contextmanager
def own_namespace(kube: Kube, made: str = "") -> Iterator[str]:
    """A fresh namespace, or the one that was made before; deleted at the end, which is waited for a little."""
    name = made or f"bench-{uuid4().hex[:8]}"
    if not made:
        install(kube, name)
    try:
        yield name
    finally:
        kube.delete(NAMESPACES, name)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and _there(kube, name):
            time.sleep(1.0)


def _there(kube: Kube, namespace: str) -> bool:
    try:
        kube.get(NAMESPACES, namespace)
    except NotFound:
        return False
    return True


def names(kinds: Sequence[str]) -> list[Made]:
    """What the tunings are called."""
    return [Made(f"llm-{number:03d}", kind) for number, kind in enumerate(kinds)]


def populate(kube: Kube, namespace: str, kinds: Sequence[str], prometheus: dict[str, str], trials: int) -> None:
    """One tuning with a target of its own for each of `kinds`; `prometheus` is the URL for each kind, or for `""`."""
    with ThreadPoolExecutor(WRITERS) as pool:
        for _ in pool.map(lambda one: _make(kube, namespace, one, prometheus, trials), names(kinds)):
            pass


def _make(kube: Kube, namespace: str, one: Made, prometheus: dict[str, str], trials: int) -> None:
    promoted = one.kind == "promoted"
    running = WINNER if promoted else BASELINE
    kube.create(DEPLOYMENTS, deployment(one.name, running, replicas=1 if promoted else 0), namespace)
    asked = tuning(one.name, prometheus.get(one.kind, prometheus[""]), suspend=one.kind == "suspended")
    store = KubernetesStore(kube, namespace, SystemClock())
    store.save(record(asked, one.kind, time.time()))
    if one.kind in LEARNING:
        return
    for trial in made_trials(trials, time.time(), one.kind):
        store.save_trial(one.name, trial)


def deployment(name: str, candidate: Candidate, *, replicas: int) -> Json:
    """A target whose pods, if it has any, wait for a node that is not there."""
    command = ["vllm", "serve", "bench-model", "--port", "8000"]
    for knob, value in sorted(candidate.values.items()):
        command += [f"--{knob.replace('_', '-')}"] + ([] if value is True else [str(value)])
    container = {"name": "vllm", "image": "vllm", "imagePullPolicy": "Never", "command": command}
    labels = {"app": name}
    pod = {"nodeSelector": {"tunewright.dev/benchmark": "no-such-node"}, "containers": [container]}
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    found = PodTemplate(spec["template"], "vllm").candidate
    if found.hash != candidate.hash:
        raise AssertionError(f"the Deployment says {found.values}, not {candidate.values}")
    return {"metadata": {"name": name}, "spec": spec}


def tuning(name: str, prometheus: str, *, suspend: bool) -> Tuning:
    """As a user asks for it; nothing in it ends while the benchmark runs."""
    return Tuning.model_validate(
        {
            "apiVersion": TUNINGS.api_version,
            "kind": TUNINGS.kind,
            "metadata": {"name": name},
            "spec": {
                "suspend": suspend,
                "target": {"deployment": name, "container": "vllm", "model": "bench-model"},
                "metrics": {"prometheus": prometheus},
                "objective": {"maximize": "outputTokensPerSecond"},
                "slo": {"ttftP95": "2s", "itlP95": "60ms"},
                "spare": {"startTimeout": "6h"},
                "promotion": {"mode": "approve", "approvalExpiry": "24h", "takeOver": True},
            },
        }
    )


def record(asked: Tuning, kind: str, now: float) -> TuningRecord:
    """The tuning's record as the loop would have left it."""
    gain = Gain(
        estimate=Estimate(value=0.58, low=0.52, high=0.64),
        rounds=3,
        status=ConfirmStatus.BETTER,
        reason="+58 % (from +52 % to +64 %, 3 rounds)",
    )
    fields: dict[str, object] = {"profile": profile(now), "baseline": BASELINE, "source": Source.GPU}
    phase = ENDS.get(kind, Phase.SEARCHING)
    if kind in LEARNING:
        phase = Phase.PROFILING
        fields.pop("profile")
    elif kind in ("searching", "suspended"):
        fields["search_since"] = now
        fields |= {"suspended_since": now} if kind == "suspended" else {}
    elif kind in ("awaiting", "promoted", "rejected", "recommended"):
        fields |= {"finalists": (Finalist(candidate=WINNER, gain=gain),), "winner": WINNER}
    if kind == "awaiting":
        phase = Phase.AWAITING_APPROVAL
        fields["approval_since"] = now
    elif kind == "promoted":
        phase = Phase.PROMOTED
        verdict = Verdict(outcome=Outcome.PASS, reason="0 of 523 requests in error; TTFT -35 %, TPOT -2 %", at=now)
        fields["promotion"] = PromotionState(
            candidate=WINNER, baseline=BASELINE, replicas=1, updated=1, verdict=verdict, canary_verdict=verdict
        )
    said = f"Written by the benchmark as {kind}."
    story = (Phase.PROFILING, phase)
    history = tuple(PhaseChange(at=now - 60 * (2 - i), phase=each, sentence=said) for i, each in enumerate(story))
    return TuningRecord(
        tuning=asked,
        spec_hash=asked.spec.spec_hash,
        phase=phase,
        phase_since=now,
        sentence=said,
        history=history[-1:] if kind in LEARNING else history,
        **fields,
    )


def made_trials(count: int, now: float, kind: str) -> list[TrialRecord]:
    """The baseline and `count - 1` candidates, all measured; a search that goes on has one more that is to start."""
    values: list[dict[str, object]] = [dict(BASELINE.values)]
    values += [{"max_num_seqs": 8 * n, "enable_prefix_caching": True} for n in range(1, count)]
    made = [
        TrialRecord(
            id=f"{number:03d}-{candidate.hash}",
            number=number,
            purpose=TrialPurpose.SEARCH if number else TrialPurpose.BASELINE,
            candidate=candidate,
            reason="far from what was tried, and promising by the model of the others",
            phase=TrialPhase.DONE,
            phase_since=now,
            created_at=now - 120,
            ready_at=now - 60,
            load_started_at=now - 60,
            finished_at=now,
            start_seconds=60.0,
            outcome=TrialOutcome.COMPLETE,
            measurement=measurement(1000.0 + 7 * number, now),
            objective=1000.0 + 7 * number,
            slo_margin=0.4,
            effective=dict(candidate.values) | {"max_num_batched_tokens": 8192, "tensor_parallel_size": 1},
        )
        for number, candidate in enumerate(Candidate(values=each) for each in values)
    ]
    if kind in ("searching", "suspended"):
        last = Candidate(values={"max_num_seqs": 8 * count, "enable_prefix_caching": True})
        made.append(
            TrialRecord(
                id=f"{count:03d}-{last.hash}",
                number=count,
                purpose=TrialPurpose.SEARCH,
                candidate=last,
                attempt=2 if kind == "suspended" else 1,  # one that was put back
            )
        )
    return made


def measurement(tokens: float, now: float) -> Measurement:
    """Of the size that real ones have."""

    def latency(value: float) -> Latency:
        return Latency(count=812, mean=value, p50=value * 0.93, p90=value * 1.41, p95=value * 1.87, p99=value * 2.95)

    return Measurement(
        started_at=now,
        duration=35.0,
        source=Source.GPU,
        vllm_version="0.32.0",
        seed=1234,
        warmup=12.345,
        warmup_settled=True,
        completed=812,
        failed=0,
        output_tokens_per_second=Estimate(value=tokens, low=tokens * 0.971, high=tokens * 1.034),
        input_tokens_per_second=tokens * 3.17,
        requests_per_second=tokens / 61,
        ttft=latency(0.3127),
        tpot=latency(0.0213),
        itl=latency(0.0209),
        e2e=latency(1.5241),
        generator=GeneratorHealth(
            asked=16, achieved=15.97, schedule_lag_p99=0.0013, cpu_share=0.114, merged_reads=0.01
        ),
    )


def profile(now: float) -> TrafficProfile:
    """Of the size that real ones have: vLLM's own buckets."""
    edges = tuple(float(each) for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000))
    lengths = Histogram(edges=edges, counts=tuple(float(7 * n % 97) for n in range(len(edges))))
    return TrafficProfile(
        start=now - 1800,
        end=now,
        replicas=1,
        via="Prometheus at http://prometheus.monitoring:9090",
        source=Source.GPU,
        finished_requests=12345,
        saturated=False,
        demand=6.9,
        burstiness=1.3,
        concurrency=14.2,
        concurrency_p95=22.0,
        running=13.9,
        waiting=0.3,
        prompt_tokens=lengths,
        output_tokens=lengths,
        prompt_tokens_mean=612.3,
        output_tokens_mean=201.8,
        prefix_reuse=0.31,
        error_rate=0.0001,
        output_tokens_per_second=1391.0,
        ttft_p95=0.41,
        itl_p95=0.031,
        e2e_p95=9.7,
    )


def approver(kube: Kube, namespace: str) -> str:
    """A token of a ServiceAccount that may read and decide, for our audience."""
    name, groups = "approver", ["tunewright.dev"]
    kube.create(SERVICE_ACCOUNTS, {"metadata": {"name": name}}, namespace)
    rules = [
        {"apiGroups": groups, "resources": ["tunings"], "verbs": ["get", "list"]},
        {"apiGroups": groups, "resources": ["tunings/approval"], "verbs": ["update"]},
    ]
    kube.create(ROLES, {"metadata": {"name": name}, "rules": rules}, namespace)
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    kube.create(BINDINGS, {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}, namespace)
    body: Json = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": ["tunewright"], "expirationSeconds": 3600},
    }
    made = kube.create(SERVICE_ACCOUNTS, body, namespace, name=name, subresource="token")
    return str(made["status"]["token"])
