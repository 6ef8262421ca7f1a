"""Dashboard *vLLM under tuning*: production and spare as the servers themselves export them."""

from tunewright.observe import names
from tunewright.telemetry.dashboards.grafana import Dashboard, Panel, Query, Row
from tunewright.telemetry.dashboards.shared import JOB, MODEL, NAMESPACE, RATE, TUNING, VLLM, quantile, ratio, slo

_BY = "role, instance"
_WHO = "{{role}} {{instance}}"
_QUEUE_TIME = "vllm:request_queue_time_seconds"
_NO_SPECULATION = "where no server speculates"


def _gauge(name: str) -> Query:
    return Query(f"sum by ({_BY}) ({name}{{{VLLM}}})", _WHO)


VLLM_DASHBOARD = Dashboard(
    uid="tunewright-vllm",
    title="Tunewright / vLLM under tuning",
    description="Queues, memory, speed and reuse of every vLLM server of production, and of the spare where it is "
    "scraped. The label `role` (stable, canary, spare) is set by the scrape: docs/dashboards.md.",
    variables=(NAMESPACE, TUNING, JOB, MODEL),
    since="now-1h",
    refresh="10s",
    rows=[
        Row("Load", [
            Panel("Running requests", "Requests in the engine's batch, per server.", [_gauge(names.RUNNING)], minimum=0,
                  width=8),
            Panel("Queue", "Requests that wait for a place in the batch, per server: it should empty now and then.",
                  [_gauge(names.WAITING)], minimum=0, width=8),
            Panel("Time in the queue, p95", "How long requests waited before they were scheduled.",
                  [Query(quantile(0.95, _QUEUE_TIME, VLLM, _BY), _WHO)], unit="s", minimum=0, width=8),
        ]),
        Row("Memory", [
            Panel("KV cache in use", "Share of the KV cache that requests hold; at 100 % the server preempts.",
                  [Query(f"max by ({_BY}) (vllm:kv_cache_usage_perc{{{VLLM}}})", _WHO)], unit="percentunit", minimum=0,
                  maximum=1, width=8, steps=((None, "green"), (0.9, "orange"))),
            Panel("Preemptions", "Requests thrown out of the batch for lack of memory, and computed again.",
                  [Query(f"sum by ({_BY}) (rate(vllm:num_preemptions_total{{{VLLM}}}{RATE}))", _WHO)], unit="cps",
                  minimum=0, width=8),
            Panel("Prefix cache hits", "Share of prompt tokens found in the prefix cache.",
                  [Query(ratio(f"{names.PREFIX_HITS}{{{VLLM}}}", f"{names.PREFIX_QUERIES}{{{VLLM}}}", _BY), _WHO,
                         empty="where the prefix cache is off")],
                  unit="percentunit", minimum=0, maximum=1, width=8),
        ]),
        Row("Speed", [
            Panel("Output tokens/s", "Tokens generated, per server.",
                  [Query(f"sum by ({_BY}) (rate({names.GENERATED}{{{VLLM}}}{RATE}))", _WHO)], minimum=0, width=8),
            Panel("Prompt tokens/s", "Tokens of prompts, per server; those found in the prefix cache are counted too.",
                  [Query(f"sum by ({_BY}) (rate({names.PROMPTED}{{{VLLM}}}{RATE}))", _WHO)], minimum=0, width=8),
            Panel("Acceptance of speculation", "Share of drafted tokens that were accepted.",
                  [Query(ratio(f"vllm:spec_decode_num_accepted_tokens_total{{{VLLM}}}",
                               f"vllm:spec_decode_num_draft_tokens_total{{{VLLM}}}", _BY), _WHO,
                         empty=_NO_SPECULATION)],
                  unit="percentunit", minimum=0, maximum=1, width=8, no_value="No server speculates"),
            Panel("TTFT, p95", "Time to first token, per server; the dashed line is the SLO's bound.",
                  [Query(quantile(0.95, names.TTFT, VLLM, _BY), _WHO), slo("ttft")], unit="s", minimum=0, width=8),
            Panel("ITL, p95", "Time between two steps that gave tokens: under speculation that is not per token. "
                  "The dashed line is the SLO's bound.",
                  [Query(quantile(0.95, names.ITL, VLLM, _BY), _WHO), slo("itl")], unit="s", minimum=0, width=8),
            Panel("E2E, p95", "Whole requests, per server; the dashed line is the SLO's bound.",
                  [Query(quantile(0.95, names.E2E, VLLM, _BY), _WHO), slo("e2e")], unit="s", minimum=0, width=8),
        ]),
        Row("Traffic", [
            Panel("Requests/s by how they ended", "`abort` is a client that went away, `error` a request that failed.",
                  [Query(f"sum by (finished_reason) (rate({names.FINISHED}{{{VLLM}}}{RATE}))", "{{finished_reason}}")],
                  unit="reqps", minimum=0, width=12),
            Panel("Mean length of requests", "Tokens of prompts and outputs, from the sums of the histograms.",
                  [
                      Query(ratio(f"{names.PROMPT_LENGTH}_sum{{{VLLM}}}", f"{names.PROMPT_LENGTH}_count{{{VLLM}}}",
                                  "role"), "prompt, {{role}}"),
                      Query(ratio(f"{names.OUTPUT_LENGTH}_sum{{{VLLM}}}", f"{names.OUTPUT_LENGTH}_count{{{VLLM}}}",
                                  "role"), "output, {{role}}"),
                  ],
                  minimum=0, width=12),
        ]),
    ],
)  # fmt: skip
