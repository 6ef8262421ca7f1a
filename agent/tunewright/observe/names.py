"""Names of the metrics that are read, as vLLM 0.26 to 0.33 exports them (counters with their `_total`)."""

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
FINISHED = "vllm:request_success_total"  # by finished_reason, also `abort` and `error` in spite of its name
GENERATED = "vllm:generation_tokens_total"
PROMPTED = "vllm:prompt_tokens_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"  # by position, from 0

PROMPT_LENGTH = "vllm:request_prompt_tokens"
OUTPUT_LENGTH = "vllm:request_generation_tokens"
TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"  # one observation per engine step: not per token under speculation
TPOT = "vllm:request_time_per_output_token_seconds"  # one observation per request: its mean
E2E = "vllm:e2e_request_latency_seconds"


def histogram(name: str) -> tuple[str, str, str]:
    """The names under which Prometheus keeps the histogram `name`."""
    return (f"{name}_bucket", f"{name}_sum", f"{name}_count")


PROFILE_METRICS: tuple[str, ...] = (
    RUNNING, WAITING, FINISHED, GENERATED, PROMPTED, PREFIX_QUERIES, PREFIX_HITS, DRAFTS, ACCEPTED,
    *histogram(PROMPT_LENGTH), *histogram(OUTPUT_LENGTH),
    *histogram(TTFT), *histogram(ITL), *histogram(E2E),
)  # fmt: skip
"""What a traffic profile is learned from."""

ANALYSIS_METRICS: tuple[str, ...] = (FINISHED, *histogram(TTFT), *histogram(TPOT), *histogram(E2E))
"""What a canary is judged by in any case."""

CANARY_METRICS: tuple[str, ...] = (*ANALYSIS_METRICS, PREEMPTIONS, GENERATED, WAITING)
"""All that a canary can be judged by."""

ALL_METRICS: tuple[str, ...] = tuple(dict.fromkeys((*PROFILE_METRICS, *CANARY_METRICS)))
"""What a direct scrape keeps."""
