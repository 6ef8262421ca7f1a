import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from telemetry_samples import (
    BASELINE,
    T0,
    confirm_trials,
    failed_trial,
    history,
    promoted,
    promotion,
    record,
    search_trials,
    trial,
    tuning,
)

from tunewright import __version__
from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import Estimate
from tunewright.domain.phases import Phase
from tunewright.domain.state import ConfirmStatus, Finalist, Gain, TrialPhase, TrialPurpose
from tunewright.ports import Conflict, PortError, Refused, Series, SeriesWindow
from tunewright.store.one import OneStore
from tunewright.telemetry import catalog
from tunewright.telemetry.facts import idle_seconds
from tunewright.telemetry.metrics import Metrics
from tunewright.telemetry.samples import MAX_CANDIDATES, MAX_EFFECTS, MAX_TRIALS
from tunewright.telemetry.server import MetricsServer
from tunewright.telemetry.source import WatchedSource


class Several:
    """The stores of several namespaces; its own is `tunewright`."""

    own, everywhere = "tunewright", True

    def __init__(self, **stores):
        self.stores = stores

    def of(self, namespace):
        return self.stores.get(namespace)

    def tunings(self):
        return [(namespace, name) for namespace, store in sorted(self.stores.items()) for name in store.names()]


class MemoryStore:
    def __init__(self, *tunings):
        self.tunings = {held.name: (held, trials) for held, trials in tunings}
        self.broken = self.unreadable = None

    def names(self):
        if self.broken:
            raise self.broken
        return sorted(self.tunings)

    def load(self, name):
        if self.unreadable:
            raise self.unreadable
        return self.tunings[name][0] if name in self.tunings else None

    def trials(self, name):
        return self.tunings[name][1]


def metrics_of(*tunings, now=T0 + 100):
    store = MemoryStore(*tunings)
    return Metrics(OneStore(store), SimpleNamespace(now=lambda: now, monotonic=lambda: now)), store


def samples(metrics):
    """By name and sorted labels."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is exported twice"
            found[key] = sample.value
    return found


def value(found, name, **labels):
    matching = [v for (n, pairs), v in found.items() if n == name and labels.items() <= dict(pairs).items()]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


def test_exactly_the_catalogue_is_exported_with_its_types_and_labels():
    done, trials = promoted()
    done = done.model_copy(update={"drift": 0.1, "foreign": "Argo CD"})
    waiting = record(Phase.AWAITING_APPROVAL, tuning=tuning().model_copy(update={"metadata": named("other")}))
    searching = record(Phase.SEARCHING, tuning=tuning().model_copy(update={"metadata": named("third")}))
    running = trial(0, BASELINE, phase=TrialPhase.STARTING, outcome=None, measurement=None, objective=None)
    metrics, _ = metrics_of((done, trials), (waiting, []), (searching, [running]))
    metrics.instruments.reconciled(0.1, ValueError())
    metrics.instruments.watches("tunings", lambda: 1.0)
    metrics.instruments.sent("get", "tunings", 200)
    exposed = {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}
    wanted = {metric.name.removesuffix("_total"): metric for metric in catalog.METRICS}
    exposed = {n: f for n, f in exposed.items() if not n.endswith("_created") and not n.startswith("process_")}
    assert exposed.keys() == wanted.keys()
    for name, family in exposed.items():
        metric = wanted[name]
        assert family.type == metric.type, name
        assert family.documentation == metric.help
        assert family.samples, f"{name} has no sample"
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), name


def named(name):
    return tuning().metadata.model_copy(update={"name": name})


@pytest.mark.parametrize("metric", catalog.METRICS, ids=lambda metric: metric.name)
def test_names_follow_prometheus_conventions(metric):
    assert metric.name.startswith("tunewright_")
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert not set(metric.labels) & {"le", "quantile", "job", "instance"}
    assert metric.help.endswith(".")


def test_the_phase_is_a_state_set():
    found = samples(metrics_of((record(Phase.SEARCHING), []))[0])
    phases = {dict(pairs)["phase"]: v for (name, pairs), v in found.items() if name == "tunewright_tuning_phase"}
    assert phases == {phase.value: float(phase is Phase.SEARCHING) for phase in Phase}


def test_time_suspended_does_not_count_as_time_in_the_phase():
    held = record(Phase.SEARCHING, waited=20.0, suspended_since=T0 + 90)
    found = samples(metrics_of((held, []))[0])
    assert value(found, "tunewright_tuning_phase_seconds") == 70
    assert value(found, "tunewright_tuning_suspended") == 1


def test_trials_objectives_and_gpu_time_come_from_the_records():
    done, trials = promoted()
    running = trial(40, BASELINE, phase=TrialPhase.MEASURING, outcome=None, measurement=None, objective=None)
    found = samples(metrics_of((done, [*trials, running]))[0])
    assert value(found, "tunewright_tuning_trials", purpose="search", outcome="complete") == 7
    assert value(found, "tunewright_tuning_trials", purpose="search", outcome="infeasible") == 3
    assert value(found, "tunewright_tuning_trials", purpose="search", outcome="running") == 1
    assert value(found, "tunewright_tuning_trials", purpose="confirm", outcome="complete") == 6
    assert value(found, "tunewright_tuning_baseline_objective", source="simulated") == 1000
    assert value(found, "tunewright_tuning_best_objective", objective="outputTokensPerSecond") == 1610
    assert value(found, "tunewright_tuning_gain_ratio") == 0.584
    assert value(found, "tunewright_tuning_gain_low_ratio") == 0.521
    assert value(found, "tunewright_tuning_gain_rounds") == 3
    assert value(found, "tunewright_tuning_gpu_seconds", use="starting") == 16 * 60 + 2 * 110
    assert value(found, "tunewright_tuning_gpu_seconds", use="warming") == 16 * 12
    assert value(found, "tunewright_tuning_gpu_seconds", use="measuring") == 16 * 35
    assert value(found, "tunewright_tuning_gpu_seconds", use="other") == 16 * 3


def test_the_objectives_have_the_intervals_of_their_runs_where_there_are_any():
    held, trials = promoted()  # each run's is ±2 %; the baseline's mean is of two runs
    found = samples(metrics_of((held, trials))[0])
    names = [f"tunewright_tuning_{of}_objective_{end}" for of in ("baseline", "best") for end in ("low", "high")]
    told = [value(found, name, source="simulated") for name in names]
    half = (19.8**2 + 20.2**2) ** 0.5 / 2
    assert told == pytest.approx([1000 - half, 1000 + half, 1610 * 0.98, 1610 * 1.02])
    latency = record(tuning=tuning(objective={"minimize": "ttftP95"}))
    found = samples(metrics_of((latency, [trial(0, BASELINE, TrialPurpose.BASELINE, objective=-0.36)]))[0])
    assert value(found, "tunewright_tuning_baseline_objective") == 0.36
    assert not any(name in names for name, _ in found)


def test_gpu_time_counts_every_gpu_of_a_server():
    wide = trial(0, Candidate(values={"tensor_parallel_size": 2}), effective={"tensor_parallel_size": 4})
    found = samples(metrics_of((record(), [wide]))[0])
    assert value(found, "tunewright_tuning_gpu_seconds", use="measuring") == 35 * 4


def test_a_latency_that_is_minimized_is_exported_as_it_is():
    spec = tuning(objective={"minimize": "ttftP95"})
    slow, quick = trial(0, BASELINE, objective=-0.4), trial(1, Candidate(), objective=-0.2)
    found = samples(metrics_of((record(tuning=spec), [slow, quick]))[0])
    assert value(found, "tunewright_tuning_best_objective", objective="ttftP95") == 0.2


def test_several_running_trials_are_counted_and_the_longest_in_a_phase_is_told():
    def running(number, phase, since):
        return trial(number, BASELINE.with_value("max_num_seqs", number + 1), phase=phase, phase_since=since,
                     slot=number, outcome=None, measurement=None, objective=None)  # fmt: skip

    trials = [running(n, phase, T0 + since) for n, (phase, since) in enumerate(
        [(TrialPhase.STARTING, 70), (TrialPhase.STARTING, 10), (TrialPhase.MEASURING, 60)]
    )]  # fmt: skip
    found = samples(metrics_of((record(Phase.SEARCHING, baseline=BASELINE), trials))[0])
    assert value(found, "tunewright_tuning_spare_phase_seconds", phase="Starting") == 90
    assert value(found, "tunewright_tuning_spare_phase_seconds", phase="Measuring") == 40
    assert value(found, "tunewright_tuning_trials", purpose="search", outcome="running") == 3


def test_idle_time_is_that_of_each_spare():
    def held(number, slot, start, end):
        return trial(number, BASELINE, slot=slot, created_at=T0 + start, finished_at=T0 + end)

    beside = [held(0, 0, 0, 100), held(1, 0, 130, 200), held(2, 1, 50, 150), held(3, 1, 160, 200)]
    assert idle_seconds(beside) == 30 + 10
    assert idle_seconds(beside[:2]) == 30
    assert idle_seconds([]) == 0


def test_a_gain_is_not_exported_before_there_is_an_interval():
    placeholder = Gain(
        estimate=Estimate(value=0, low=-1, high=1e9), rounds=1, status=ConfirmStatus.RUNNING, reason="1 of 3"
    )
    early = record(Phase.CONFIRMING, finalists=(Finalist(candidate=BASELINE, gain=placeholder),))
    assert not [key for key in samples(metrics_of((early, []))[0]) if "gain" in key[0]]


def test_the_number_of_candidates_is_bounded_and_keeps_baseline_winner_and_best():
    many = [trial(n, Candidate(values={"max_num_seqs": n + 1}), rate=100.0 - n) for n in range(300)]
    held = record(baseline=many[5].candidate, winner=many[7].candidate)
    found = samples(metrics_of((held, many))[0])
    kept = {dict(pairs)["candidate"] for (name, pairs) in found if name == "tunewright_candidate_objective"}
    assert len(kept) == MAX_CANDIDATES + 3
    assert {many[5].candidate.hash, many[7].candidate.hash, many[0].candidate.hash, many[299].candidate.hash} <= kept


def test_the_promotion_shows_replicas_verdicts_and_the_samples_they_rest_on():
    held = record(Phase.ROLLING, promotion=promotion(updated=1))
    found = samples(metrics_of((held, []))[0])
    assert value(found, "tunewright_promotion_updated_replicas") == 1
    assert value(found, "tunewright_promotion_replicas") == 2
    assert value(found, "tunewright_promotion_verdict", metric="TTFT p95", outcome="pass") == 1
    assert value(found, "tunewright_promotion_verdict", metric="all", outcome="inconclusive") == 0
    assert value(found, "tunewright_promotion_verdict_samples", metric="TTFT p95", side="stable") == 540


def test_an_approval_that_is_waited_for_and_rollbacks_are_told():
    waiting = record(Phase.AWAITING_APPROVAL, approval_since=T0 + 40)
    found = samples(metrics_of((waiting, []))[0])
    assert value(found, "tunewright_tuning_approval_waiting") == 1
    assert value(found, "tunewright_tuning_approval_waiting_seconds") == 60
    back = record(Phase.ROLLED_BACK, history=history(Phase.CANARY, Phase.ROLLING_BACK, Phase.ROLLED_BACK))
    found = samples(metrics_of((back, []))[0])
    assert value(found, "tunewright_tuning_approval_waiting") == 0
    assert value(found, "tunewright_tuning_rollbacks_total", cause="guard") == 1
    assert value(found, "tunewright_tuning_rollbacks_total", cause="person") == 0
    assert "tunewright_tuning_approval_waiting_seconds" not in {name for name, _ in found}


def test_the_series_of_a_deleted_tuning_go_and_the_process_keeps_its_own():
    metrics, store = metrics_of(promoted())
    metrics.instruments.reconciled(0.2)
    assert any("tuning" in dict(pairs) for _, pairs in samples(metrics))
    store.tunings.clear()
    found = samples(metrics)
    assert not any("tuning" in dict(pairs) for _, pairs in found)
    assert value(found, "tunewright_reconcile_duration_seconds_count") == 1
    assert value(found, "tunewright_build_info", version=__version__) == 1


@pytest.mark.parametrize("error", [PortError("locked"), Refused("corrupt")])
def test_a_store_that_cannot_be_read_is_told_and_hides_nothing_else(error):
    metrics, store = metrics_of(promoted())
    store.broken = error
    found = samples(metrics)
    assert value(found, "tunewright_store_readable") == 0
    assert value(found, "tunewright_build_info") == 1
    assert not any("tuning" in dict(pairs) for _, pairs in found)
    store.broken = None
    assert value(samples(metrics), "tunewright_store_readable") == 1


def test_reconciling_is_counted():
    metrics, _ = metrics_of()
    for error in (None, Conflict("a"), PortError("b"), Refused("c"), KeyError("d")):
        metrics.instruments.reconciled(0.02, error)
    found = samples(metrics)
    assert value(found, "tunewright_reconcile_duration_seconds_count") == 5
    for kind in ("conflict", "port", "refused", "fault"):
        assert value(found, "tunewright_reconcile_errors_total", kind=kind) == 1


class Source:
    """Answers with a series, with nothing, or not at all."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def describe(self):
        return "a source"

    def fetch(self, names, start, end, matchers=None):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SeriesWindow(start, end, answer, names)


def test_questions_to_the_metrics_source_are_counted_by_what_came_of_them():
    metrics, _ = metrics_of(now=T0 + 500)
    found = samples(metrics)
    assert value(found, "tunewright_metric_source_last_data_timestamp_seconds") == 0
    source = WatchedSource(Source([Series({}, ())], [], PortError("down"), [Series({}, ())]), metrics.instruments)
    assert source.describe() == "a source"
    assert source.fetch(["a"], 1, 2).series
    assert not source.fetch(["a"], 1, 2).series
    with pytest.raises(PortError, match="down"):
        source.fetch(["a"], 1, 2)
    assert source.fetch(["a"], 1, 2, {"pod": "x"}).series
    found = samples(metrics)
    counts = [value(found, "tunewright_metric_source_requests_total", outcome=o) for o in ("data", "empty", "error")]
    assert counts == [2, 1, 1]
    assert value(found, "tunewright_metric_source_last_data_timestamp_seconds") == T0 + 500


def test_leadership_and_watches_are_asked_at_each_scrape():
    metrics, _ = metrics_of()
    assert value(samples(metrics), "tunewright_leader") == 0
    state = {"acting": True, "silent": None}
    metrics.instruments.leads(lambda: state["acting"])
    metrics.instruments.watches("tunings", lambda: state["silent"])
    found = samples(metrics)
    assert value(found, "tunewright_leader") == 1
    assert value(found, "tunewright_watch_age_seconds", resource="tunings") == float("inf")
    state |= {"acting": False, "silent": 12.0}
    found = samples(metrics)
    assert value(found, "tunewright_leader") == 0
    assert value(found, "tunewright_watch_age_seconds", resource="tunings") == 12


class CountingStore(MemoryStore):
    """Knows whether something changed, and counts what was read."""

    def __init__(self, *tunings):
        super().__init__(*tunings)
        self.versions, self.read = {}, []

    def version(self, name):
        return self.versions.get(name, 0)

    def load(self, name):
        self.read.append(name)
        return super().load(name)


def test_what_did_not_change_is_not_read_again_but_its_age_grows():
    now = [T0 + 100]
    waiting = record(Phase.AWAITING_APPROVAL, tuning=tuning().model_copy(update={"metadata": named("other")}))
    running = trial(1, BASELINE, phase=TrialPhase.STARTING, outcome=None, measurement=None, phase_since=T0 + 60)
    store = CountingStore((record(Phase.SEARCHING), [running]), (waiting, []))
    metrics = Metrics(OneStore(store), SimpleNamespace(now=lambda: now[0], monotonic=lambda: now[0]))
    first = samples(metrics)
    now[0] += 50
    second = samples(metrics)
    assert store.read == ["chat", "other"]
    grown = {key for key in first if second[key] == first[key] + 50}
    assert {(name, dict(pairs)["tuning"]) for name, pairs in grown} == {
        ("tunewright_tuning_phase_seconds", "chat"),
        ("tunewright_tuning_phase_seconds", "other"),
        ("tunewright_tuning_approval_waiting_seconds", "other"),
        ("tunewright_tuning_spare_phase_seconds", "chat"),
    }
    same = {name for name, _ in first if not name.startswith("process_")} - {name for name, _ in grown}
    assert all(second[key] == first[key] for key in first if key[0] in same)


def test_what_changed_is_read_again_and_what_went_is_gone():
    store = CountingStore((record(Phase.SEARCHING), []))
    metrics = Metrics(OneStore(store), SimpleNamespace(now=lambda: T0, monotonic=lambda: T0))
    assert value(samples(metrics), "tunewright_tuning_phase", phase="Searching") == 1
    store.tunings["chat"] = (record(Phase.CONFIRMING), [])
    assert value(samples(metrics), "tunewright_tuning_phase", phase="Searching") == 1
    store.versions["chat"] = 1
    assert value(samples(metrics), "tunewright_tuning_phase", phase="Searching") == 0
    store.tunings.clear()
    assert not [name for name, _ in samples(metrics) if name.startswith("tunewright_tuning")]


def test_tunings_of_several_namespaces_are_told_apart_and_one_broken_store_hides_no_other():
    team, other = MemoryStore((record(), [])), MemoryStore((record(Phase.SEARCHING), []))
    stores = Several(team=team, other=other)
    metrics = Metrics(stores, SimpleNamespace(now=lambda: T0, monotonic=lambda: T0))
    found = samples(metrics)
    assert value(found, "tunewright_tuning_phase", namespace="team", tuning="chat", phase="Pending") == 1
    assert value(found, "tunewright_tuning_phase", namespace="other", tuning="chat", phase="Searching") == 1
    assert value(found, "tunewright_store_readable", namespace="tunewright") == 1, "its own is told of, though empty"
    team.unreadable = PortError("no answer")
    found = samples(metrics)
    assert value(found, "tunewright_store_readable", namespace="team") == 0
    assert value(found, "tunewright_store_readable", namespace="other") == 1
    assert not [k for k in found if ("namespace", "team") in k[1] and k[0].startswith("tunewright_tuning")]
    team.unreadable = None
    del other.tunings["chat"]
    assert not [k for k in samples(metrics) if ("namespace", "other") in k[1]], "what was deleted goes"
    team.broken = PortError("no answer")
    found = samples(metrics)
    assert value(found, "tunewright_store_readable") == 0
    assert not [k for k in found if k[0].startswith("tunewright_tuning")]


def test_a_phase_tells_its_deadline_and_when_it_began():
    held = record(Phase.CANARY, history=history(Phase.PROFILING, Phase.CANARY), promotion=promotion())
    found = samples(metrics_of((held, []))[0])
    assert value(found, "tunewright_tuning_phase_deadline_seconds") > 600
    assert value(found, "tunewright_tuning_phase_start_timestamp_seconds", phase="Canary") == T0 + 600
    back = samples(metrics_of((record(Phase.ROLLING_BACK, promotion=promotion()), []))[0])
    assert "tunewright_tuning_phase_deadline_seconds" not in {name for name, _ in back}


def test_the_slo_the_traffic_and_the_effects_are_told():
    done, trials = promoted()
    found = samples(metrics_of((done.model_copy(update={"drift": 0.42}), trials))[0])
    assert value(found, "tunewright_slo_bound_seconds", latency="ttft", percentile="p95") == 0.5
    assert value(found, "tunewright_slo_error_ratio") == 0.01
    assert value(found, "tunewright_traffic_demand_requests_per_second") == done.profile.demand
    assert value(found, "tunewright_traffic_tokens", kind="output", statistic="mean") == done.profile.output_tokens_mean
    assert value(found, "tunewright_tuning_drift_ratio") == 0.42
    effect = {"knob": "max_num_seqs", "value": "128"}
    low, mid, high = (
        value(found, f"tunewright_tuning_knob_effect{part}_ratio", **effect) for part in ("_low", "", "_high")
    )
    assert low < mid < high
    assert 0 < mid < 0.5


def test_each_of_the_latest_trials_is_told_with_what_came_of_it():
    many = [trial(n, Candidate(values={"max_num_seqs": n + 1}), rate=100.0 + n) for n in range(MAX_TRIALS + 20)]
    bad = failed_trial(500, Candidate(values={"x": "a" * 999, "api_key": "token=S3CRET"}))
    found = samples(metrics_of((record(baseline=BASELINE), [*many, bad]))[0])
    told = [dict(pairs) for name, pairs in found if name == "tunewright_trial_info"]
    assert len(told) == MAX_TRIALS
    last = next(labels for labels in told if labels["trial"] == "500")
    assert (last["outcome"], last["failure"]) == ("infeasible", "outOfMemory")
    assert len(last["changes"]) <= 200
    assert "S3CRET" not in metrics_of((record(baseline=BASELINE), [bad]))[0].exposition().decode()
    assert value(found, "tunewright_trial_objective", trial="069") == 169
    effects = [pairs for name, pairs in found if name == "tunewright_tuning_knob_effect_ratio"]
    assert len(effects) == MAX_EFFECTS
    assert value(found, "tunewright_tuning_trial_failures", kind="outOfMemory") == 1


def test_the_spare_tells_what_it_is_at_and_how_long_it_was_idle():
    starting = trial(1, BASELINE, phase=TrialPhase.STARTING, outcome=None, measurement=None, phase_since=T0 + 60)
    held = record(Phase.SEARCHING)
    found = samples(metrics_of((held, [trial(0, BASELINE), starting]))[0])
    assert value(found, "tunewright_tuning_spare_phase_seconds", phase="Starting") == 40
    found = samples(metrics_of((held.model_copy(update={"suspended_since": T0}), [starting]))[0])
    assert "tunewright_tuning_spare_phase_seconds" not in {name for name, _ in found}
    # Trials of 110 s every 120 s: 10 s between each two.
    found = samples(metrics_of((held, [trial(n, BASELINE) for n in range(4)]))[0])
    assert value(found, "tunewright_tuning_gpu_seconds", use="idle") == 30


def test_every_state_of_a_tuning_can_be_scraped():
    for phase in Phase:
        for trials in ([], search_trials(), [*search_trials(), *confirm_trials()], [failed_trial(0, BASELINE)]):
            assert samples(metrics_of((record(phase, baseline=BASELINE), trials))[0])


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_the_server_serves_metrics_and_health_and_gives_its_port_back():
    metrics, _ = metrics_of(promoted())
    reason = []
    with MetricsServer(metrics, unhealthy=lambda: reason[0] if reason else None) as server:
        status, kind, text = get(server.url)
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        assert 'tunewright_tuning_phase{namespace="",phase="Promoted",tuning="chat"} 1.0' in text
        base = server.url.removesuffix("/metrics")
        assert get(f"{base}/healthz")[::2] == (200, "ok\n")
        reason.append("the store can't be read")
        assert get(f"{base}/healthz?full")[::2] == (503, "the store can't be read\n")
        assert get(f"{base}/else")[0] == 404
        with ThreadPoolExecutor(4) as pool:
            assert {status for status, _, _ in pool.map(get, [server.url] * 12)} == {200}
        port = server.port
    server.close()
    with MetricsServer(metrics, port=port) as again:
        assert again.port == port
