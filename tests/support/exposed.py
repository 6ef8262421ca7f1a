"""A server's metrics that a test moves by hand: as /metrics text, and as the samples a source would have fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunewright.ports import Series, SeriesWindow

LENGTHS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
STEPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
REASONS = ("stop", "length", "abort", "error", "repetition")
HISTOGRAMS = {
    "vllm:request_prompt_tokens": LENGTHS,
    "vllm:request_generation_tokens": LENGTHS,
    "vllm:time_to_first_token_seconds": SECONDS,
    "vllm:inter_token_latency_seconds": STEPS,
    "vllm:request_time_per_output_token_seconds": STEPS,
    "vllm:e2e_request_latency_seconds": WHOLE,
}
COUNTERS = ("generation_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")

Key = tuple[str, tuple[tuple[str, str], ...]]


class Exposed:
    """The metrics of one vLLM server; `edges` replaces bucket edges, as another max_model_len would."""

    def __init__(
        self,
        instance: str = "a:8000",
        edges: Mapping[str, Sequence[float]] | None = None,
        engine: str = "0",
        **labels: str,
    ) -> None:
        self.added = {"instance": instance, **labels}
        self.edges = HISTOGRAMS | dict(edges or {})
        self.own = {"engine": engine, "model_name": "m"}
        self.values: dict[Key, float] = {}
        self.samples: dict[Key, list[tuple[float, float]]] = {}
        self.restart()

    def restart(self) -> None:
        """A new process: everything at 0."""
        self.values = {}
        for gauge in ("num_requests_running", "num_requests_waiting"):
            self.set(f"vllm:{gauge}", 0)
        for name in COUNTERS:
            self.set(f"vllm:{name}_total", 0)
        for reason in REASONS:
            self.set("vllm:request_success_total", 0, finished_reason=reason)
        for name, edges in self.edges.items():
            for edge in (*edges, float("inf")):
                self.set(f"{name}_bucket", 0, le=_le(edge))
            self.set(f"{name}_sum", 0)
            self.set(f"{name}_count", 0)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Give a series a value."""
        self.values[self._key(name, labels)] = float(value)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Raise a series."""
        key = self._key(name, labels)
        self.values[key] = self.values.get(key, 0.0) + value

    def observe(self, name: str, value: float, times: float = 1.0) -> None:
        """Observations of a histogram."""
        for edge in (*self.edges[name], float("inf")):
            if value <= edge:
                self.add(f"{name}_bucket", times, le=_le(edge))
        self.add(f"{name}_sum", value * times)
        self.add(f"{name}_count", times)

    def finish(
        self,
        times: float = 1.0,
        prompt: int = 200,
        output: int = 60,
        ttft: float = 0.3,
        tpot: float = 0.02,
        reason: str = "length",
        cached: int = 0,
    ) -> None:
        """Requests that ended, counted everywhere that vLLM counts them."""
        self.add("vllm:request_success_total", times, finished_reason=reason)
        if reason in ("abort", "error"):
            return
        self.add("vllm:prompt_tokens_total", prompt * times)
        self.add("vllm:generation_tokens_total", output * times)
        self.add("vllm:prefix_cache_queries_total", prompt * times)
        self.add("vllm:prefix_cache_hits_total", cached * times)
        self.observe("vllm:request_prompt_tokens", prompt, times)
        self.observe("vllm:request_generation_tokens", output, times)
        self.observe("vllm:time_to_first_token_seconds", ttft, times)
        self.observe("vllm:inter_token_latency_seconds", tpot, (output - 1) * times)
        self.observe("vllm:request_time_per_output_token_seconds", tpot, times)
        self.observe("vllm:e2e_request_latency_seconds", ttft + tpot * (output - 1), times)

    def scrape(self, at: float) -> None:
        """Take a sample of everything."""
        for key, value in self.values.items():
            self.samples.setdefault(key, []).append((at, value))

    def text(self) -> str:
        """As /metrics would show it."""
        lines = []
        for (name, labels), value in self.values.items():
            inside = ",".join(f'{key}="{text}"' for key, text in labels)
            lines.append(f"{name}{{{inside}}} {value}")
        return "# HELP something a comment\n" + "\n".join(lines) + "\n"

    def series(self) -> list[Series]:
        """All series that were scraped."""
        return [
            Series({"__name__": name, **dict(labels), **self.added}, list(samples))
            for (name, labels), samples in self.samples.items()
        ]

    def _key(self, name: str, labels: Mapping[str, str]) -> Key:
        return name, tuple(sorted({**self.own, **labels}.items()))


def window_of(*servers: Exposed, start: float = 0.0, end: float = 600.0) -> SeriesWindow:
    """What a source would answer."""
    return SeriesWindow(start, end, [s for server in servers for s in server.series()], ["all of it"])


def _le(edge: float) -> str:
    return "+Inf" if edge == float("inf") else str(edge)
