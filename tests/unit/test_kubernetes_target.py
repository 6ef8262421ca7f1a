"""Production as a Deployment, on a cluster in memory that rolls as Kubernetes does."""

from collections.abc import Callable
from contextlib import suppress

import pytest
from fake_cluster import NAMESPACE, FakeCluster
from fake_production import ARGS, BASELINE, NEW, OWNER, REF, container, node, production

from tunewright.domain.candidate import Candidate
from tunewright.domain.state import FailureKind
from tunewright.kube.errors import KubeConflict, Unavailable
from tunewright.kube.resources import AUTOSCALERS, DEPLOYMENTS, NODES, POD_DISRUPTION_BUDGETS, PODS, SERVICES
from tunewright.kube.times import format_time
from tunewright.platform.kubernetes.abandoned import release_abandoned
from tunewright.platform.kubernetes.fields import ROLLOUT_ANNOTATION
from tunewright.platform.kubernetes.names import PERSISTENT_VOLUME_CLAIMS, Owner
from tunewright.platform.kubernetes.target import DeploymentTarget
from tunewright.ports import PortError, Refused, TargetPlan, TargetStatus


def make(cluster: FakeCluster, **more) -> DeploymentTarget:
    given = {"start_timeout": 100.0, "drain_timeout": 60.0, **more}
    return DeploymentTarget(cluster, OWNER, REF, cluster.clock, **given)


def plan(updated: int = 0, *, canary: bool = False, candidate: Candidate = NEW) -> TargetPlan:
    return TargetPlan(BASELINE, candidate, updated, canary, 0.25 if canary else 0.0)


def ready_servers(cluster: FakeCluster) -> dict[str, int]:
    """Who would answer a request to the Service now: ready pods with its labels, by max_num_seqs."""
    found: dict[str, int] = {}
    for pod in cluster.pods(app="llm"):
        conditions = pod.get("status", {}).get("conditions") or []
        if "deletionTimestamp" in pod["metadata"] or not any(
            c["type"] == "Ready" and c["status"] == "True" for c in conditions
        ):
            continue
        args = pod["spec"]["containers"][0]["args"]
        value = args[args.index("--max-num-seqs") + 1]
        found[value] = found.get(value, 0) + 1
    return found


def until(
    cluster: FakeCluster,
    wanted: TargetPlan,
    *,
    new_target: Callable[[FakeCluster], DeploymentTarget] = make,
    least: int = 1,
    good: tuple[str, ...] = ("8", "64"),
    steps: int = 150,
) -> TargetStatus:
    """Each step by a controller of its own; known-good servers never fall below `least`."""
    for _ in range(steps):
        status = new_target(cluster).apply(wanted)
        if status.settled:
            return status
        serving = ready_servers(cluster)
        assert sum(serving.get(each, 0) for each in good) >= least, (serving, status.detail)
        cluster.tick()
    raise AssertionError(f"not settled: {status}")


def live(cluster: FakeCluster) -> dict:
    return cluster.edit(DEPLOYMENTS, "llm")


def test_it_is_observed_as_it_is_and_nothing_is_written(cluster, servers):
    production(cluster)
    target = make(cluster)
    before = len(cluster.writes())
    status = target.observe()
    assert status.settled, status.detail
    assert (status.desired, [r.ready for r in status.replicas]) == (2, [True, True])
    assert {r.candidate_hash for r in status.replicas} == {BASELINE.hash} == {target.baseline().hash}
    assert all(r.labels == {"pod": r.name} and r.version == "0.32.0" and not r.canary for r in status.replicas)
    assert status.failure is None
    assert status.foreign is None
    assert target.preflight(NEW) == []
    assert "2 × `serve some/model" in target.describe()
    assert "behind Service llm" in target.describe()
    assert len(cluster.writes()) == before
    assert len(servers.asked) == 2, "each server is asked for a token once"


def test_a_replica_that_completes_nothing_is_not_ready(cluster, servers):
    production(cluster)
    silent = cluster.pods(app="llm")[0]
    servers.answers_nothing.add(silent["status"]["podIP"])
    status = make(cluster).observe()
    assert not status.settled
    assert "completes nothing" in status.detail
    assert any("completes nothing" in reason for reason in make(cluster).preflight(NEW))


def test_the_whole_way_there_and_back(cluster, servers):
    production(cluster, 3)
    original = [dict(each) for each in live(cluster)["spec"]["template"]["spec"]["containers"]]
    old_pods = {pod["metadata"]["name"] for pod in cluster.pods(app="llm")}
    status = until(cluster, plan(canary=True), least=3)
    canaries = [r for r in status.replicas if r.canary]
    assert [(c.ready, c.candidate_hash) for c in canaries] == [(True, NEW.hash)]
    assert live(cluster)["spec"]["template"]["spec"]["containers"] == original, "the target itself is untouched"
    assert not cluster.pods(tier="serving", **{"tunewright.dev/role": "canary"}), "no part of what an autoscaler counts"
    for updated in (1, 2):
        status = until(cluster, plan(updated, canary=True), least=2)
        assert sum(r.candidate_hash == NEW.hash and not r.canary for r in status.replicas) == updated
        assert live(cluster)["spec"]["paused"] is True
        cluster.tick(500)
        assert make(cluster).apply(plan(updated, canary=True)).settled, "held, whatever time passes"
    until(cluster, plan(3, canary=True), least=2)
    status = until(cluster, plan(3), least=3)
    assert {r.candidate_hash for r in status.replicas} == {NEW.hash}
    assert len(status.replicas) == 3
    spec = live(cluster)["spec"]
    assert "paused" not in spec
    assert "minReadySeconds" not in spec
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": "25%"}
    assert make(cluster).baseline() == NEW
    status = until(cluster, plan(0), least=2)
    assert {r.candidate_hash for r in status.replicas} == {BASELINE.hash}
    assert live(cluster)["spec"]["template"]["spec"]["containers"] == original, "the very bytes of before"
    assert old_pods.isdisjoint(pod["metadata"]["name"] for pod in cluster.pods(app="llm"))


def test_going_back_half_way_restarts_only_what_was_updated(cluster, servers):
    production(cluster, 3)
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True), least=2)
    kept = {p["metadata"]["name"] for p in cluster.pods(app="llm") if "8" in p["spec"]["containers"][0]["args"]}
    until(cluster, plan(0), least=2)
    assert len(kept & {pod["metadata"]["name"] for pod in cluster.pods(app="llm")}) == 2


def test_the_canary_gets_requests_only_after_a_completion_and_is_drained_before_it_goes(cluster, servers):
    production(cluster)
    make(cluster).apply(plan(canary=True))
    cluster.tick()
    canary = cluster.pods(**{"tunewright.dev/role": "canary"})[0]
    address = canary["status"]["podIP"]
    servers.answers_nothing.add(address)
    for _ in range(3):
        cluster.tick()
        status = make(cluster).apply(plan(canary=True))
    assert not status.settled
    assert "app" not in canary["metadata"]["labels"]
    servers.answers_nothing.clear()
    until(cluster, plan(canary=True))
    assert canary["metadata"]["labels"]["app"] == "llm"
    servers.busy.add(address)
    make(cluster).apply(plan())
    assert "app" not in canary["metadata"]["labels"]
    cluster.tick(10)
    assert "last requests" in make(cluster).apply(plan()).detail
    assert "deletionTimestamp" not in canary["metadata"]
    servers.busy.clear()
    until(cluster, plan())
    assert cluster.pods(**{"tunewright.dev/role": "canary"}) == []


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_canary_is_drained_also_where_taking_its_requests_away_broke_off(cluster, servers, at):
    production(cluster)
    until(cluster, plan(canary=True))
    (canary,) = cluster.pods(**{"tunewright.dev/role": "canary"})
    servers.busy.add(canary["status"]["podIP"])
    writes = 0

    def before(verb, resource, name):
        nonlocal writes
        if verb == "patch":
            writes += 1
            if writes == at:
                raise Unavailable("PATCH", "/it", "no answer in 10 s")

    cluster.before = before
    for _ in range(4):
        with suppress(PortError):
            make(cluster).apply(plan())
        assert "deletionTimestamp" not in canary["metadata"]
        cluster.tick(10)
    assert writes >= at
    assert "app" not in canary["metadata"]["labels"]
    servers.busy.clear()
    until(cluster, plan())
    assert cluster.pods(**{"tunewright.dev/role": "canary"}) == []


def test_a_canary_that_is_drained_takes_over_when_all_replicas_die(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    (canary,) = cluster.pods(**{"tunewright.dev/role": "canary"})
    servers.busy.add(canary["status"]["podIP"])
    make(cluster).apply(plan())
    assert "app" not in canary["metadata"]["labels"]
    servers.answers_nothing |= {pod["status"]["podIP"] for pod in cluster.pods(tier="serving")}
    for _ in range(5):
        make(cluster).apply(plan())
        assert canary["metadata"]["labels"]["app"] == "llm", "nothing else serves"
        assert "deletionTimestamp" not in canary["metadata"]
        cluster.tick()
    servers.answers_nothing.clear()
    servers.busy.clear()
    until(cluster, plan())
    assert cluster.pods(**{"tunewright.dev/role": "canary"}) == []


def test_a_canary_that_never_gets_empty_goes_at_its_deadline_and_one_wanted_again_stays(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    servers.busy.add(cluster.pods(**{"tunewright.dev/role": "canary"})[0]["status"]["podIP"])
    make(cluster).apply(plan())
    cluster.tick(30)
    until(cluster, plan(canary=True))
    make(cluster).apply(plan())
    cluster.tick(61)
    until(cluster, plan())


@pytest.mark.parametrize("with_canary", [True, False])
def test_a_single_replica_is_never_the_only_one_that_goes(cluster, servers, with_canary):
    production(cluster, 1)
    if with_canary:
        until(cluster, plan(canary=True))
        until(cluster, plan(1, canary=True))
    status = until(cluster, plan(1))
    assert [(r.candidate_hash, r.canary) for r in status.replicas] == [(NEW.hash, False)]
    status = until(cluster, plan(0), good=("8", "64"))
    assert [(r.candidate_hash, r.canary) for r in status.replicas] == [(BASELINE.hash, False)]
    assert cluster.pods(**{"tunewright.dev/role": "canary"}) == []


def test_a_candidate_that_can_not_start_is_told_and_production_stays(cluster, servers):
    production(cluster)
    cluster.starts = lambda pod: "crash" if "tunewright.dev/role" in pod["metadata"]["labels"] else "ready"
    for _ in range(4):
        status = make(cluster).apply(plan(canary=True))
        cluster.tick()
        for pod in cluster.pods(**{"tunewright.dev/role": "canary"}):
            cluster.previous_logs_of[pod["metadata"]["name"]] = "torch.OutOfMemoryError: CUDA out of memory. Tried"
    status = make(cluster).apply(plan(canary=True))
    assert status.failure is not None
    assert status.failure.kind is FailureKind.OUT_OF_MEMORY
    assert ready_servers(cluster) == {"8": 2}
    assert until(cluster, plan(), least=2).failure is None, "it is not wanted any more"


def test_a_replica_that_fails_in_the_roll_is_told_and_going_back_never_waits_for_it(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    cluster.starts = lambda pod: (
        "crash" if "64" in pod["spec"]["containers"][0]["args"] and "tier" in pod["metadata"]["labels"] else "ready"
    )
    for _ in range(30):
        status = make(cluster).apply(plan(1, canary=True))
        if status.failure:
            break
        cluster.tick()
    assert status.failure is not None
    assert ready_servers(cluster)["8"] == 1
    status = until(cluster, plan(), good=("8",))
    assert ready_servers(cluster) == {"8": 2}
    assert status.failure is None


def test_a_canary_without_a_gpu_is_told_and_given_up(cluster, servers):
    production(cluster)
    cluster.starts = lambda pod: "pending" if "tunewright.dev/role" in pod["metadata"]["labels"] else "ready"
    for _ in range(3):
        status = make(cluster).apply(plan(canary=True))
        cluster.tick()
    assert "Insufficient nvidia.com/gpu" in status.detail
    cluster.tick(101)
    failure = make(cluster).apply(plan(canary=True)).failure
    assert failure is not None
    assert failure.kind is FailureKind.UNSCHEDULABLE
    until(cluster, plan(), least=2)


def test_a_canary_older_than_a_start_may_take_is_no_failed_start_when_it_goes(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True), least=2)
    until(cluster, plan(2, canary=True), least=2)
    for pod in cluster.pods():
        servers.busy.add(pod["status"]["podIP"])  # it answers requests, and loses the labels of production meanwhile
    cluster.tick(500)
    for _ in range(5):
        status = make(cluster).apply(plan(2))
        assert status.failure is None, status
        cluster.tick()
    assert "gets no requests yet" in status.detail


def test_a_replica_that_is_not_ready_for_a_moment_is_no_failed_start(cluster, servers):
    production(cluster)
    until(cluster, plan(2), least=1)
    cluster.tick(5000)
    pod = cluster.pods(app="llm")[0]
    stored = cluster.edit(PODS, pod["metadata"]["name"])
    ready = next(c for c in stored["status"]["conditions"] if c["type"] == "Ready")
    ready |= {"status": "False", "lastTransitionTime": format_time(cluster.clock.now())}
    target = make(cluster)
    assert target.apply(plan(2)).failure is None
    cluster.clock.time += 101
    failure = target.apply(plan(2)).failure
    assert failure is not None
    assert failure.kind is FailureKind.HUNG


def test_a_new_controller_whose_first_question_is_not_answered_waits_as_long_as_for_a_start(cluster, servers):
    production(cluster)
    until(cluster, plan(2), least=1)
    cluster.tick(5000)
    servers.answers_nothing.add(cluster.pods(app="llm")[0]["status"]["podIP"])
    target = make(cluster)
    assert target.apply(plan(2)).failure is None
    cluster.clock.time += 101
    assert target.apply(plan(2)).failure is not None


# --- others -----------------------------------------------------------------------------------------------------------


def test_owners_of_what_would_be_written_are_named_and_taken_over_only_when_told(cluster, servers):
    production(cluster)["owners"] = {"containers/vllm/args": "helm", "strategy/maxSurge": "kubectl-client-side-apply"}
    obstacles = " ".join(make(cluster).preflight(NEW))
    assert "helm owns containers/vllm/args" in obstacles
    assert "kubectl-client-side-apply owns strategy/maxSurge" in obstacles
    assert "promotion.takeOver: true" in obstacles
    status = make(cluster).apply(plan(2))
    assert status.foreign is not None
    assert "helm owns" in status.foreign
    assert live(cluster)["spec"]["template"]["spec"]["containers"][0]["args"] == ARGS

    def taking(cluster: FakeCluster) -> DeploymentTarget:
        return make(cluster, take_over=True)

    assert taking(cluster).preflight(NEW) == []
    assert any("helm owns" in note and "set it back" in note for note in taking(cluster).notes(NEW))
    until(cluster, plan(2), new_target=taking)
    assert live(cluster)["owners"]["containers/vllm/args"] == "tunewright"


def test_what_can_not_be_rolled_out_at_all_is_noted_not_raised(cluster, servers):
    """An approver is told; whether it is an obstacle, pre-flight says."""
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    production(cluster, pod={"volumes": [claim]})
    modes = {"metadata": {"name": "models"}, "spec": {"accessModes": ["ReadWriteOncePod"]}}
    cluster.put(PERSISTENT_VOLUME_CLAIMS, modes)
    before = len(cluster.writes())
    assert any("ReadWriteOncePod" in note for note in make(cluster).notes(NEW))
    assert len(cluster.writes()) == before


def test_what_somebody_else_changes_is_named_and_never_fought(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True))
    args = live(cluster)["spec"]["template"]["spec"]["containers"][0]["args"]
    args[args.index("64")] = "16"
    live(cluster)["metadata"]["generation"] += 1
    for wanted in (plan(1, canary=True), plan(2, canary=True), plan(0)):
        status = make(cluster).apply(wanted)
        assert status.foreign is not None
        assert "--max-num-seqs 16" in status.foreign
        assert not status.settled
        assert live(cluster)["spec"]["template"]["spec"]["containers"][0]["args"] == args
    for _ in range(20):
        cluster.tick()
        make(cluster).apply(plan(0))
    assert cluster.pods(**{"tunewright.dev/role": "canary"}) == [], "what is ours goes all the same"


def test_what_somebody_else_keeps_is_left_to_them_without_a_trace_of_ours(cluster, servers):
    """Half-way rolled, paused, with a canary: then somebody sets other arguments, and does not take them back."""
    production(cluster)
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True))
    assert live(cluster)["spec"]["paused"]
    args = live(cluster)["spec"]["template"]["spec"]["containers"][0]["args"]
    args[args.index("64")] = "16"
    live(cluster)["metadata"]["generation"] += 1
    assert make(cluster).let_go()
    spec = live(cluster)["spec"]
    assert spec["template"]["spec"]["containers"][0]["args"] == args
    assert "paused" not in spec
    assert "minReadySeconds" not in spec
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": "25%"}
    assert make(cluster).let_go(), "it may be repeated"
    for _ in range(60):
        cluster.tick()
    assert ready_servers(cluster) == {"16": 2}, "Kubernetes rolls what they set"
    assert cluster.pods(**{"tunewright.dev/role": "canary"}) == []


@pytest.mark.parametrize("take_over", [False, True])
def test_letting_go_forces_nothing_though_the_strategy_is_theirs_as_well(cluster, servers, take_over):
    before = {"maxSurge": 1, "maxUnavailable": 0}
    production(cluster)["spec"]["strategy"] = {"rollingUpdate": dict(before)}
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True))
    theirs = {"maxSurge": 2, "maxUnavailable": 1}
    live(cluster)["spec"]["strategy"]["rollingUpdate"] = dict(theirs)
    live(cluster)["owners"].update({"strategy/maxSurge": "helm", "strategy/maxUnavailable": "helm"})
    assert make(cluster, take_over=take_over).let_go()
    spec = live(cluster)["spec"]
    assert spec["strategy"]["rollingUpdate"] == theirs
    assert "paused" not in spec
    assert "minReadySeconds" not in spec


def test_a_canary_that_alone_serves_is_not_taken_away_with_the_rest(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    for pod in cluster.pods():
        if "tunewright.dev/role" not in pod["metadata"]["labels"]:
            servers.answers_nothing.add(pod["status"]["podIP"])
    assert make(cluster).let_go()
    assert len(cluster.pods(**{"tunewright.dev/role": "canary"})) == 1


def test_a_new_image_in_the_middle_is_foreign_too(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True))
    live(cluster)["spec"]["template"]["spec"]["containers"][0]["image"] = "vllm/vllm-openai:v9"
    live(cluster)["metadata"]["generation"] += 1
    assert "pod template" in str(make(cluster).apply(plan(2, canary=True)).foreign)


def test_a_router_that_finds_servers_by_labels_finds_the_canary(cluster, servers):
    """Behind a router no Service may select the pods; its label comes only with a real completion, and goes again."""
    production(cluster)
    cluster.objects.pop((SERVICES.plural, NAMESPACE, "llm"))
    assert "promotion.canary.labels" in " ".join(make(cluster).preflight(NEW))

    def routed(cluster: FakeCluster) -> DeploymentTarget:
        return make(cluster, canary_labels={"llm-d.ai/model": "llama"})

    assert routed(cluster).preflight(NEW) == []
    routed(cluster).apply(plan(canary=True))
    assert cluster.pods(**{"llm-d.ai/model": "llama"}) == []
    for _ in range(30):
        cluster.tick()
        if routed(cluster).apply(plan(canary=True)).settled:
            break
    (pod,) = cluster.pods(**{"llm-d.ai/model": "llama"})
    assert pod["metadata"]["labels"]["tunewright.dev/role"] == "canary"
    routed(cluster).apply(plan())
    assert cluster.pods(**{"llm-d.ai/model": "llama"}) == [], "no new requests while it drains"


def test_labels_that_make_the_canary_one_of_the_replicas_are_refused(cluster, servers):
    chosen = production(cluster)["spec"]["selector"]["matchLabels"]
    obstacles = " ".join(make(cluster, canary_labels=dict(chosen)).preflight(NEW))
    assert "an autoscaler would count it in" in obstacles


def test_an_autoscaler_is_followed(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True))
    live(cluster)["spec"]["replicas"] = 3
    live(cluster)["metadata"]["generation"] += 1
    cluster.put(
        AUTOSCALERS[0], {"metadata": {"name": "hpa"}, "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "llm"}}}
    )
    assert any("HorizontalPodAutoscaler hpa" in note for note in make(cluster).notes(NEW))
    assert until(cluster, plan(3)).desired == 3
    live(cluster)["spec"]["replicas"] = 1
    live(cluster)["metadata"]["generation"] += 1
    assert until(cluster, plan(3)).desired == 1


def test_two_tunings_never_roll_one_deployment(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True))
    other = DeploymentTarget(cluster, Owner("other", "uid-of-other"), REF, cluster.clock)
    with pytest.raises(PortError, match="not of Tuning other"):
        other.preflight(NEW)
    until(cluster, plan(0))
    assert other.preflight(NEW) == []


def test_what_a_deleted_tuning_left_half_way_is_brought_back(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True))
    assert make(cluster).release() == f"Deployment llm goes back to {BASELINE.hash}"
    assert make(cluster).release() is None
    for _ in range(60):
        cluster.tick()
    assert ready_servers(cluster)["8"] == 2
    spec = live(cluster)["spec"]
    assert spec["template"]["spec"]["containers"][0]["args"] == ARGS
    assert "paused" not in spec
    assert "minReadySeconds" not in spec


def test_a_new_controller_brings_back_what_a_deleted_tuning_left_and_nothing_else(cluster, servers):
    production(cluster)
    until(cluster, plan(canary=True))
    until(cluster, plan(1, canary=True))
    assert release_abandoned(cluster, NAMESPACE, {OWNER.uid}, cluster.clock) == []
    cluster.objects.pop((DEPLOYMENTS.plural, NAMESPACE, "llm-canary"))
    done = release_abandoned(cluster, NAMESPACE, set(), cluster.clock)
    assert done == [f"Deployment llm goes back to {BASELINE.hash}: Tuning {NAMESPACE}/chat was deleted half-way"]
    assert live(cluster)["spec"]["template"]["spec"]["containers"][0]["args"] == ARGS
    assert "paused" not in live(cluster)["spec"]
    assert release_abandoned(cluster, NAMESPACE, set(), cluster.clock) == []


# --- pre-flight -------------------------------------------------------------------------------------------------------


def labelled(**labels: str):
    return lambda cluster: live(cluster)["metadata"].setdefault("labels", {}).update(labels)


def template_of(cluster: FakeCluster) -> dict:
    return live(cluster)["spec"]["template"]["spec"]["containers"][0]


def scaled_to_nothing(cluster: FakeCluster) -> None:
    live(cluster)["spec"]["replicas"] = 0


def budget(allowed: int):
    body = {
        "metadata": {"name": "pdb"},
        "spec": {"selector": {"matchLabels": {"app": "llm"}}},
        "status": {"disruptionsAllowed": allowed},
    }
    return lambda cluster: cluster.put(POD_DISRUPTION_BUDGETS[0], body)


KSERVE = {"kind": "InferenceService", "name": "i", "uid": "u", "controller": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (labelled(**{"argocd.argoproj.io/instance": "prod"}), "Argo CD"),
        (labelled(**{"kustomize.toolkit.fluxcd.io/name": "prod"}), "Flux"),
        (lambda c: live(c)["metadata"].update(ownerReferences=[KSERVE]), "InferenceService i owns it"),
        (lambda c: live(c)["spec"].update(paused=True), "is paused by somebody"),
        (lambda c: live(c)["spec"]["strategy"].update(type="Recreate"), "ends every replica at once"),
        (lambda c: live(c)["metadata"].update(generation=9), "has not taken up"),
        (lambda c: live(c)["status"].update(updatedReplicas=1), "another rollout or scaling is in progress"),
        (scaled_to_nothing, "scaled to 0"),
        (lambda c: template_of(c).pop("readinessProbe"), "no readinessProbe"),
        (lambda c: c.objects.pop((SERVICES.plural, NAMESPACE, "llm")), "no Service selects"),
        (budget(0), "PodDisruptionBudget pdb allows no replica"),
        (lambda c: live(c)["spec"].update(progressDeadlineSeconds=20), "would refuse the change"),
        (lambda c: c.put(NODES, node(2), None), "no node has them free"),
    ],
)  # fmt: skip
def test_preflight_finds_it_before_anything_moves(cluster, servers, change, reason):
    production(cluster)
    change(cluster)
    before = len(cluster.writes())
    assert reason in " ".join(make(cluster).preflight(NEW))
    assert len(cluster.writes()) == before


def test_preflight_passes_what_is_well(cluster, servers):
    production(cluster)
    budget(1)(cluster)
    assert make(cluster).preflight(NEW) == []
    assert make(cluster, cold_start=lambda _: 60.0).preflight(NEW) == []
    assert not any("not known" in note for note in make(cluster).notes(NEW))


def test_what_may_not_be_read_holds_before_anything_moves_or_is_said(cluster, servers):
    production(cluster)
    cluster.forbidden.add("poddisruptionbudgets")
    assert "whether a PodDisruptionBudget forbids the roll is not known" in " ".join(make(cluster).preflight(NEW))
    cluster.forbidden = {"horizontalpodautoscalers"}
    assert make(cluster).preflight(NEW) == []
    assert "whether an autoscaler scales it is not known" in " ".join(make(cluster).notes(NEW))


def test_times_that_are_too_short_are_said(cluster, servers):
    production(cluster, pod={"containers": [container()], "terminationGracePeriodSeconds": 20})
    notes = " ".join(make(cluster, cold_start=lambda _: 500.0, longest_answer=lambda: 25.0).notes(NEW))
    assert "its progressDeadlineSeconds are 600, and the winner took 500 s cold" in notes
    assert "its terminationGracePeriodSeconds are 20, and answers took up to 25 s" in notes
    notes = " ".join(make(cluster, cold_start=lambda _: 300.0, longest_answer=lambda: 15.0).notes(NEW))
    assert "progressDeadlineSeconds" not in notes
    assert "terminationGracePeriodSeconds" not in notes


def test_what_runs_beside_the_knobs_changes_with_image_and_model_alone(cluster, servers):
    production(cluster)
    before = make(cluster).beside_knobs()
    assert before == "vllm/vllm-openai:v0.32.0: `serve some/model --port 8000`"
    template_of(cluster)["args"] = ["serve", "some/model", "--port", "8000", "--max-num-seqs", "64"]
    assert make(cluster).beside_knobs() == before
    template_of(cluster)["args"] = ["serve", "another/model", "--port", "8000"]
    assert make(cluster).beside_knobs() != before
    template_of(cluster).update(args=ARGS, image="mine/vllm-openai:v0.32.0")
    assert make(cluster).beside_knobs() != before


def test_probes_leave_room_for_a_cold_start(cluster, servers):
    slow = container(livenessProbe={"periodSeconds": 10, "failureThreshold": 3}, readinessProbe={"x": 1})
    production(cluster, pod={"containers": [slow]})
    assert make(cluster).preflight(NEW) == []
    told = " ".join(make(cluster, cold_start=lambda _: 60.0).preflight(NEW))
    assert "livenessProbe kills a server that is not up after 30 s" in told
    assert "allow 90 s" in told


def test_unreadable_nodes_are_unknown_capacity_and_no_obstacle(cluster, servers):
    production(cluster)
    cluster.forbidden.add("nodes")
    assert make(cluster).preflight(NEW) == []
    assert any("nodes may not be read" in note for note in make(cluster).notes(NEW))


def test_what_can_not_be_tuned_is_refused_and_an_unknown_knob_is_an_obstacle(cluster, servers):
    production(cluster)
    assert "no_such_knob" in " ".join(make(cluster).preflight(Candidate(values={"no_such_knob": 1})))
    template_of(cluster)["command"] = ["/start.sh"]
    with pytest.raises(Refused, match="Deployment llm: none of the containers"):
        make(cluster).baseline()
    del cluster.objects[(DEPLOYMENTS.plural, NAMESPACE, "llm")]
    with pytest.raises(Refused, match="there is no Deployment llm"):
        make(cluster).observe()


def test_the_recipe_is_what_the_container_would_be_given_and_who_made_it(cluster, servers):
    deployment = production(cluster)
    found = make(cluster).recipe(NEW)
    assert (found.namespace, found.deployment, found.container) == (NAMESPACE, "llm", "vllm")
    assert "64" in found.args
    assert (found.helm_release, found.stack_model) == ("", "")
    deployment["metadata"].setdefault("labels", {}).update({"helm-release-name": "stack", "model": "llama"})
    assert make(cluster).recipe(NEW).stack_model == "", "its name is not the chart's"
    deployment["metadata"]["annotations"] = {"meta.helm.sh/release-name": "rel"}
    assert make(cluster).recipe(NEW).helm_release == "rel"


def test_the_recommendation_is_a_patch(cluster, servers):
    production(cluster)
    text = make(cluster).recommend(NEW)
    assert "max_num_seqs: 8 → 64" in text
    assert "kind: Deployment" in text
    assert "- '64'" in text


# --- faults -----------------------------------------------------------------------------------------------------------


class Broken(Unavailable):
    """A call that failed."""


@pytest.mark.parametrize("every", [2, 3, 5, 7])
@pytest.mark.parametrize("fault", [Broken("PATCH", "x", "gone"), KubeConflict("PATCH", "x", "changed", status=409)])
def test_a_fault_at_any_write_comes_to_the_same_end(cluster, servers, every, fault):
    production(cluster)
    calls = 0

    def before(verb, resource, name):
        nonlocal calls
        if verb in ("create", "patch", "apply", "delete"):
            calls += 1
            if calls % every == 0:
                raise fault

    cluster.before = before
    for wanted in (plan(canary=True), plan(1, canary=True), plan(2, canary=True), plan(2), plan(0)):
        for _ in range(200):
            try:
                if make(cluster).apply(wanted).settled:
                    break
            except PortError:
                pass
            assert sum(ready_servers(cluster).values()) >= 1
            cluster.tick()
        else:
            raise AssertionError(f"{wanted} is not reached")
    assert ready_servers(cluster) == {"8": 2}
    assert [name for plural, _, name in cluster.objects if plural == "deployments"] == ["llm"]


def test_nothing_is_written_once_it_is_settled(cluster, servers):
    production(cluster)
    for wanted in (plan(canary=True), plan(1, canary=True), plan(2), plan(0)):
        until(cluster, wanted)
        before = len(cluster.writes())
        for _ in range(3):
            cluster.tick()
            assert make(cluster).apply(wanted).settled
        assert len(cluster.writes()) == before
    assert ROLLOUT_ANNOTATION in live(cluster)["metadata"]["annotations"]


def test_evicted_pods_that_lie_about_do_not_count(cluster, servers):
    production(cluster)
    pod = cluster.pods(app="llm")[0]
    cluster.put(
        PODS,
        {
            **pod,
            "metadata": {**pod["metadata"], "name": "llm-old", "uid": "uid-99"},
            "status": {"phase": "Failed", "reason": "Evicted"},
        },
    )
    assert len(make(cluster).observe().replicas) == 2


def test_where_nothing_is_to_be_done_production_is_read_once(cluster, servers):
    production(cluster)
    target = make(cluster)
    target.apply(plan())
    cluster.calls.clear()
    assert target.apply(plan()).settled
    assert [call[:2] for call in cluster.calls] == [
        ("get", "deployments"),
        ("get", "deployments"),
        ("list", "pods"),
        ("list", "replicasets"),
        ("list", "pods"),
    ]


def test_after_a_step_production_is_read_again(cluster, servers):
    production(cluster)
    status = make(cluster).apply(plan(canary=True))
    assert "canary" in {call[2].rpartition("-")[2] for call in cluster.writes()}
    reads = [call for call in cluster.calls if call[:2] == ("get", "deployments") and call[2] == "llm"]
    assert len(reads) == 2
    assert not status.settled
