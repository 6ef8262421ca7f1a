"""vLLM 0.32's metrics in the text format, with its names, types, labels and bucket edges.

Tests hold them against the recorded metrics of real servers. The counters live here as plain numbers because
they are touched for every token.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from .engine import ABORT, ERROR, LENGTH, STOP, Batch, Output, Request, Stepper

FINISHED = (STOP, LENGTH, ABORT, ERROR, "repetition")
_TTFT: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
_TTFT += (80.0, 160.0, 640.0, 2560.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_REQUEST += (960.0, 1920.0, 7680.0)
_ITERATION = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_HTTP_FINE: tuple[float, ...] = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    5.0,
    7.5,
    10.0,
)
_HTTP_FINE += (30.0, 60.0)
# Paths that the HTTP metrics leave out, as vLLM does.
UNCOUNTED = {"/metrics", "/health", "/load", "/ping", "/version", "/server_info", "/sim/state"}

Labels = dict[str, str]


def length_edges(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to the longest request: the edges differ between servers."""
    edges: list[float] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > max_model_len:
                return tuple(edges)
            edges.append(float(mantissa * power))
        power *= 10


class Histogram:
    """Counts per bucket, not cumulative until rendered."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


class _Text:
    """Builds the exposition text, family by family."""

    def __init__(self, created: float) -> None:
        self.lines: list[str] = []
        self._created = created

    def family(self, name: str, kind: str, help_text: str) -> None:
        self.lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, labels: Labels, value: float) -> None:
        text = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
        self.lines.append(f"{name}{{{text}}} {float(value)!r}" if text else f"{name} {float(value)!r}")

    def gauge(self, name: str, help_text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self.family(name, "gauge", help_text)
        for labels, value in samples:
            self.sample(name, labels, value)

    def counter(self, name: str, help_text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        pairs = list(samples)
        self.family(f"{name}_total", "counter", help_text)
        for labels, value in pairs:
            self.sample(f"{name}_total", labels, value)
        self.gauge(f"{name}_created", help_text, [(labels, self._created) for labels, _ in pairs])

    def histogram(self, name: str, help_text: str, samples: Iterable[tuple[Labels, Histogram]]) -> None:
        pairs = list(samples)
        self.family(name, "histogram", help_text)
        for labels, histogram in pairs:
            total = 0
            for edge, count in zip([*map(repr, histogram.edges), "+Inf"], histogram.counts, strict=True):
                total += count
                self.sample(f"{name}_bucket", {**labels, "le": edge}, total)
            self.sample(f"{name}_count", labels, total)
            self.sample(f"{name}_sum", labels, histogram.sum)
        self.gauge(f"{name}_created", help_text, [(labels, self._created) for labels, _ in pairs])


class HttpMetrics:
    """What vLLM's HTTP instrumentation counts, by path."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = {}
        self.sizes: dict[str, list[float]] = {}  # count, request bytes, response bytes
        self.fine = Histogram(_HTTP_FINE)
        self.coarse: dict[tuple[str, str], Histogram] = {}

    def observe(self, path: str, method: str, status: int, received: int, sent: int, seconds: float) -> None:
        if path in UNCOUNTED:
            return
        key = (path, method, f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1
        size = self.sizes.setdefault(path, [0, 0, 0])
        size[0] += 1
        size[1] += received
        size[2] += sent
        self.fine.observe(seconds)
        self.coarse.setdefault((path, method), Histogram((0.1, 0.5, 1.0))).observe(seconds)

    def render(self, text: _Text) -> None:
        counts = sorted(self.requests.items())
        text.counter(
            "http_requests",
            "Requests by method, status and path.",
            [({"handler": p, "method": m, "status": s}, n) for (p, m, s), n in counts],
        )
        for name, column in (("http_request_size_bytes", 1), ("http_response_size_bytes", 2)):
            text.family(name, "summary", "Content lengths by path.")
            for path, size in self.sizes.items():
                text.sample(f"{name}_count", {"handler": path}, size[0])
                text.sample(f"{name}_sum", {"handler": path}, size[column])
            created = [({"handler": path}, text._created) for path in self.sizes]
            text.gauge(f"{name}_created", "Content lengths by path.", created)
        text.histogram("http_request_duration_highr_seconds", "Latency, many buckets.", [({}, self.fine)])
        text.histogram(
            "http_request_duration_seconds",
            "Latency by path, few buckets.",
            [({"handler": p, "method": m}, h) for (p, m), h in self.coarse.items()],
        )


class EngineMetrics:
    """Everything under `vllm:`."""

    def __init__(self, model_name: str, stepper: Stepper, cache_config: Labels) -> None:
        self.stepper = stepper
        self.labels: Labels = {"engine": "0", "model_name": model_name}
        self.cache_config = cache_config
        self.created = time.time()
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.success = dict.fromkeys(FINISHED, 0)
        lengths = length_edges(stepper.config.max_model_len)
        self.prompt, self.generation, self.most = Histogram(lengths), Histogram(lengths), Histogram(lengths)
        self.max_tokens, self.computed = Histogram(lengths), Histogram(lengths)
        self.iteration, self.params_n = Histogram(_ITERATION), Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.ttft, self.itl, self.tpot = Histogram(_TTFT), Histogram(_ITL), Histogram(_ITL)
        self.e2e, self.queue, self.inference = Histogram(_REQUEST), Histogram(_REQUEST), Histogram(_REQUEST)
        self.prefill, self.decode = Histogram(_REQUEST), Histogram(_REQUEST)
        self.preempted = Histogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))

    def step(self, batch: Batch, outputs: list[Output], now: float) -> None:
        """Counts one engine step. Inter-token latency is one observation per step and request, as in vLLM."""
        tokens = 0
        for output in outputs:
            tokens += output.tokens
            request = output.request
            if output.first:
                self.ttft.observe(now - request.arrival)
                self.prompt_tokens += request.prompt_tokens
                self.cached_tokens += request.cached
            else:
                self.itl.observe(now - request.last_token_at)
            request.last_token_at = now
        self.generation_tokens += tokens
        self.iteration.observe(tokens + batch.prompt_tokens)

    def finished(self, request: Request, now: float, max_tokens: int) -> None:
        """Counts one request that ended, for whatever reason ("success" includes abort and error)."""
        self.success[request.finish_reason] += 1
        self.prompt.observe(request.prompt_tokens)
        self.generation.observe(request.generated)
        self.most.observe(request.generated)
        self.params_n.observe(1)
        self.max_tokens.observe(max_tokens)
        self.preempted.observe(request.preemptions)
        self.e2e.observe(now - request.arrival)
        if request.first_token_at < 0:
            return
        self.computed.observe(request.prompt_tokens - request.cached)
        self.queue.observe(request.scheduled_at - request.arrival)
        self.inference.observe(now - request.scheduled_at)
        self.prefill.observe(request.first_token_at - request.scheduled_at)
        decode = request.last_token_at - request.first_token_at
        self.decode.observe(decode)
        if request.generated > 1:
            self.tpot.observe(decode / (request.generated - 1))

    def _plus(self, **extra: str) -> Labels:
        return {**self.labels, **extra}

    def render(self, text: _Text) -> None:
        stepper, one = self.stepper, self.labels
        if stepper.config.spec_tokens:
            self._speculation(text)
        for what in ("flops", "read_bytes", "write_bytes"):
            text.counter(f"vllm:estimated_{what}_per_gpu", f"Estimated {what} per GPU; not modelled.", [(one, 0)])
        text.gauge("vllm:num_requests_running", "Requests in the batch.", [(one, len(stepper.running))])
        waiting = len(stepper.waiting)
        text.gauge("vllm:num_requests_waiting", "Requests waiting.", [(one, waiting)])
        reasons = [(self._plus(reason="capacity"), waiting), (self._plus(reason="deferred"), 0)]
        text.gauge("vllm:num_requests_waiting_by_reason", "Requests waiting, by reason.", reasons)
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        sleep = [(self._plus(sleep_state=state), value) for state, value in states.items()]
        text.gauge("vllm:engine_sleep_state", "Engine sleep state.", sleep)
        text.gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", [(one, stepper.cache.usage)])
        self._counters(text)
        self._histograms(text)
        text.gauge("vllm:cache_config_info", "The cache configuration.", [({**self.cache_config, "engine": "0"}, 1)])

    def _speculation(self, text: _Text) -> None:
        spec, one = self.stepper.spec, self.labels
        k = self.stepper.config.spec_tokens
        per_position = list(enumerate(spec.accepted_per_position))
        text.counter("vllm:spec_decode_num_drafts", "Drafts.", [(one, spec.drafts)])
        text.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", [(one, spec.drafts * k)])
        accepted = sum(spec.accepted_per_position)
        text.counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", [(one, accepted)])
        text.counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            [(self._plus(position=str(i)), n) for i, n in per_position],
        )

    def _counters(self, text: _Text) -> None:
        stepper, one = self.stepper, self.labels
        text.counter("vllm:prefix_cache_queries", "Tokens looked up.", [(one, stepper.prefix_queries)])
        text.counter("vllm:prefix_cache_hits", "Tokens found.", [(one, stepper.prefix_hits)])
        for name in ("external_prefix_cache", "mm_cache"):
            text.counter(f"vllm:{name}_queries", "Not modelled.", [(one, 0)])
            text.counter(f"vllm:{name}_hits", "Not modelled.", [(one, 0)])
        text.counter("vllm:num_preemptions", "Preemptions.", [(one, stepper.preemptions)])
        text.counter("vllm:prompt_tokens", "Prompt tokens.", [(one, self.prompt_tokens)])
        computed = self.prompt_tokens - self.cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": self.cached_tokens, "external_kv_transfer": 0}
        by_source = [(self._plus(source=s), n) for s, n in sources.items()]
        text.counter("vllm:prompt_tokens_by_source", "Prompt tokens by source.", by_source)
        text.counter("vllm:prompt_tokens_cached", "Cached prompt tokens.", [(one, self.cached_tokens)])
        cached = {"device": self.cached_tokens, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        by_source = [(self._plus(source=s), n) for s, n in cached.items()]
        text.counter("vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by source.", by_source)
        text.counter("vllm:generation_tokens", "Output tokens.", [(one, self.generation_tokens)])
        ends = [(self._plus(finished_reason=r), n) for r, n in self.success.items()]
        text.counter("vllm:request_success", "Requests that ended, by reason.", ends)
        name = self.labels["model_name"]
        refused = [({"model_name": name, "reason": r}, 0) for r in ("max_num_queued_reqs", "max_num_queued_tokens")]
        text.counter("vllm:admission_rejections", "Requests refused at admission.", refused)

    def _histograms(self, text: _Text) -> None:
        for name, help_text, histogram in (
            ("request_prompt_tokens", "Prompt tokens of a request.", self.prompt),
            ("request_generation_tokens", "Output tokens of a request.", self.generation),
            ("iteration_tokens_total", "Tokens of an engine step.", self.iteration),
            ("request_max_num_generation_tokens", "Longest output of a request.", self.most),
            ("request_params_n", "Parameter n.", self.params_n),
            ("request_params_max_tokens", "Parameter max_tokens.", self.max_tokens),
            ("time_to_first_token_seconds", "Time to first token.", self.ttft),
            ("inter_token_latency_seconds", "Time between outputs, per engine step.", self.itl),
            ("request_time_per_output_token_seconds", "Mean time per output token.", self.tpot),
            ("e2e_request_latency_seconds", "Latency of a request.", self.e2e),
            ("request_queue_time_seconds", "Time waiting.", self.queue),
            ("request_inference_time_seconds", "Time running.", self.inference),
            ("request_prefill_time_seconds", "Time in prefill.", self.prefill),
            ("request_decode_time_seconds", "Time in decode.", self.decode),
            ("request_num_preemptions", "Preemptions of a request.", self.preempted),
            ("request_prefill_kv_computed_tokens", "Prompt tokens computed.", self.computed),
        ):
            text.histogram(f"vllm:{name}", help_text, [(self.labels, histogram)])


def _process(text: _Text) -> None:
    generations = list(enumerate(gc.get_stats()))
    for name, key in (
        ("python_gc_objects_collected", "collected"),
        ("python_gc_objects_uncollectable", "uncollectable"),
        ("python_gc_collections", "collections"),
    ):
        text.family(f"{name}_total", "counter", "Garbage collection.")
        for generation, stats in generations:
            text.sample(f"{name}_total", {"generation": str(generation)}, stats[key])
    major, minor, patch = platform.python_version_tuple()
    version = {"implementation": platform.python_implementation(), "major": major, "minor": minor}
    info = {**version, "patchlevel": patch, "version": platform.python_version()}
    text.gauge("python_info", "Python.", [(info, 1)])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = [int(field) * resource.getpagesize() for field in _read("/proc/self/statm").split()[:2]]
    text.gauge("process_virtual_memory_bytes", "Virtual memory.", [({}, pages[0] if pages else 0)])
    text.gauge("process_resident_memory_bytes", "Resident memory.", [({}, pages[1] if pages else 0)])
    text.gauge("process_start_time_seconds", "Start of the process.", [({}, _STARTED)])
    text.family("process_cpu_seconds_total", "counter", "CPU time.")
    text.sample("process_cpu_seconds_total", {}, usage.ru_utime + usage.ru_stime)
    text.gauge("process_open_fds", "Open files.", [({}, len(os.listdir("/proc/self/fd")) if pages else 0)])  # noqa: PTH208
    text.gauge("process_max_fds", "Most open files.", [({}, resource.getrlimit(resource.RLIMIT_NOFILE)[0])])


_STARTED = time.time()


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""


def render(engine: EngineMetrics | None, http: HttpMetrics, late_ratio: float) -> bytes:
    """The whole of `/metrics`. `engine` is None with --disable-log-stats. The last gauge is the simulator's own."""
    text = _Text(engine.created if engine else _STARTED)
    _process(text)
    if engine is not None:
        engine.render(text)
    http.render(text)
    text.gauge(
        "tunewright_simulate_late_ratio", "Share by which requests took longer than modelled.", [({}, late_ratio)]
    )
    return ("\n".join(text.lines) + "\n").encode()
