"""Metrics held against two real servers' dumps: names, types, label names, bucket edges."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tunewright.simulate.config import resolve
from tunewright.simulate.effective import cache_config_labels
from tunewright.simulate.engine import Request, Stepper
from tunewright.simulate.flags import parse
from tunewright.simulate.metrics import EngineMetrics, HttpMetrics, length_edges, render
from tunewright.simulate.profile import load

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm"
CPU = (FIXTURES / "vllm-0.32-cpu.metrics.txt").read_text(encoding="utf-8")
H200 = (FIXTURES / "vllm-0.26-h200-under-load.metrics.txt").read_text(encoding="utf-8")
SINCE_026 = {"vllm:admission_rejections", "vllm:prompt_tokens_cached_by_source", "vllm:request_num_preemptions"}
MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}']


class Exposition:
    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.labels: dict[str, set[frozenset[str]]] = defaultdict(set)
        self.edges: dict[str, list[str]] = defaultdict(list)
        self.values: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for line in text.splitlines():
            if line.startswith("# TYPE"):
                _, _, name, kind = line.split()
                self.types[name] = kind
            elif not line.startswith("#"):
                match = re.match(r"([^{ ]+)(\{.*\})? \S+$", line)
                assert match, line
                pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")
                self.labels[match[1]].add(frozenset(k for k, _ in pairs))
                self.values[match[1]] |= set(pairs)
                for key, value in pairs:
                    if key == "le" and value not in self.edges[match[1]]:
                        self.edges[match[1]].append(value)


def simulated(profile: str, *arguments: str) -> Exposition:
    """The metrics after one request of each HTTP path that the dumps saw."""
    flags = parse(["m", *arguments])
    played = load(profile)
    config = resolve(played, flags.given)
    stepper = Stepper(played, config)
    metrics = EngineMetrics("m", stepper, cache_config_labels(flags, config, stepper.memory))
    stepper.add(Request(1, 40, 3, 0.0, seed=7))
    now = 0.0
    while batch := stepper.schedule(now):
        now += batch.seconds
        outputs = stepper.finish(batch, now)
        metrics.step(batch, outputs, now)
        for output in outputs:
            if output.request.finish_reason:
                metrics.finished(output.request, now, 3)
    http = HttpMetrics()
    http.observe("/v1/completions", "POST", 200, 10, 0, 0.1)
    return Exposition(render(metrics, http, 0.0).decode())


def _vllm(names: dict[str, str]) -> dict[str, str]:
    return {n: t for n, t in names.items() if n.startswith(("vllm:", "http_", "python_", "process_"))}


def _family(name: str) -> str:
    return re.sub(r"(_total|_created)+$", "", name)


def test_names_and_types_are_those_of_032() -> None:
    assert _vllm(simulated("small-cpu", "--max-model-len", "2048").types) == Exposition(CPU).types


def test_names_and_types_are_those_of_026_with_speculation() -> None:
    real = Exposition(H200).types
    ours = _vllm(simulated("hybrid-30b-h200", "--max-model-len", "4096", *MTP).types)
    assert {n: t for n, t in ours.items() if _family(n) not in SINCE_026} == real


@pytest.mark.parametrize(("real", "profile", "flags"), [(CPU, "small-cpu", []), (H200, "hybrid-30b-h200", MTP)])
def test_labels_and_edges_are_the_same(real: str, profile: str, flags: list[str]) -> None:
    longest = "2048" if real is CPU else "4096"
    expected, ours = Exposition(real), simulated(profile, "--max-model-len", longest, *flags)
    for name, labels in expected.labels.items():
        if name == "vllm:cache_config_info" and real is H200:
            continue  # 0.32 has other labels here; the CPU dump has them
        assert ours.labels[name] == labels, name
        assert ours.edges[name] == expected.edges[name], name


def test_label_values_are_the_same() -> None:
    expected, ours = Exposition(CPU), simulated("small-cpu", "--max-model-len", "2048")
    for name in ("vllm:request_success_total", "vllm:prompt_tokens_by_source_total", "vllm:engine_sleep_state"):
        drop = {("model_name", "m"), ("model_name", "tiny")}
        assert ours.values[name] - drop == expected.values[name] - drop


def test_speculation_metrics_only_with_speculation() -> None:
    assert not any("spec_decode" in n for n in simulated("demo").types)
    three = simulated("demo", "--max-num-seqs", "16", *MTP[:1], '{"method":"mtp","num_speculative_tokens":3}')
    positions = {v for k, v in three.values["vllm:spec_decode_num_accepted_tokens_per_pos_total"] if k == "position"}
    assert positions == {"0", "1", "2"}


def test_the_configuration_can_be_read_back() -> None:
    info = dict(
        simulated(
            "demo", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.8", "--kv-cache-dtype", "fp8"
        ).values["vllm:cache_config_info"]
    )
    assert info["enable_prefix_caching"] == "False"
    assert info["gpu_memory_utilization"] == "0.8"
    assert info["cache_dtype"] == "fp8"
    assert int(info["num_gpu_blocks"]) > 0


def test_edges_follow_the_longest_request() -> None:
    assert length_edges(2048)[-1] == 2000.0
    assert length_edges(262144)[-1] == 200000.0
