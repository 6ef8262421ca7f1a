"""What the server says about itself: its version, its model, and its counters over the same time as the client's."""

import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tunewright.domain.measurement import ServerCounters
from tunewright.loadtest.job import LoadFailure, LoadJob

TIMEOUT = 10.0
_LINE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? ([-+.0-9eE]+|NaN|[+-]Inf)$", re.MULTILINE)
_BLOCK_SIZE = re.compile(r'\bblock_size="(\d+)"')
_TOKENS = "vllm:generation_tokens_total"
_FINISHED = "vllm:request_success_total"

TOLERANCE = 0.02
"""Share by which client and server may disagree."""


@dataclass(frozen=True)
class ServerFacts:
    """What is asked of a server before it is loaded."""

    version: str
    model: str
    max_model_len: int | None
    block_size: int


@dataclass(frozen=True)
class Scrape:
    """One answer of /metrics, as it came; times in nanoseconds since the epoch, around the request."""

    asked_ns: int
    got_ns: int
    text: str

    def sums(self) -> Mapping[str, float]:
        """Each of vLLM's series by name, summed over its labels (as over the engines of a data-parallel server)."""
        found: dict[str, float] = {}
        for name, _, value in _LINE.findall(self.text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def greatest(self, name: str) -> float | None:
        """The greatest value among the series of one gauge."""
        return max((float(value) for found, _, value in _LINE.findall(self.text) if found == name), default=None)


class Observer:
    """Asks the server, outside the hot path. Every call ends within `TIMEOUT` seconds."""

    def __init__(self, job: LoadJob, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = job.url.rstrip("/")
        self._job = job
        self.http = httpx.Client(
            headers=headers, timeout=TIMEOUT, trust_env=False, verify=trust(job) or False, follow_redirects=False
        )

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def facts(self) -> ServerFacts:
        """Raises `LoadFailure` when the server does not answer, or does not serve the model."""
        models = self._json("/v1/models", required=True).get("data") or []
        served = {str(entry.get("id")): entry for entry in models if isinstance(entry, dict)}
        if not served:
            raise LoadFailure(f"{self._url}/v1/models names no model: is it an OpenAI-compatible server?")
        model = self._job.model or next(iter(served))
        if model not in served:
            raise LoadFailure(f"{self._url} does not serve {model!r}, but {', '.join(sorted(served))}")
        limit = served[model].get("max_model_len")
        version = self._json("/version", required=False).get("version")
        scrape = self.scrape()
        block = _BLOCK_SIZE.search(scrape.text) if scrape else None
        return ServerFacts(
            version=str(version) if version else "unknown",
            model=model,
            max_model_len=limit if isinstance(limit, int) else None,
            block_size=int(block[1]) if block else 16,
        )

    def scrape(self) -> Scrape | None:
        """The metrics now; None where there are none to read."""
        asked = time.time_ns()
        try:
            answer = self.http.get(f"{self._url}/metrics")
        except httpx.HTTPError:
            return None
        return Scrape(asked, time.time_ns(), answer.text) if answer.status_code == 200 else None

    def chat_prompt_tokens(self, model: str, text: str) -> int:
        """How many prompt tokens the server counts for a conversation of one message. Raises `LoadFailure`."""
        url = f"{self._url}/v1/chat/completions"
        messages = [{"role": "user", "content": text}]
        try:
            answer = self.http.post(url, json={"model": model, "messages": messages, "max_completion_tokens": 1})
            if answer.status_code == 200:
                return int(answer.json()["usage"]["prompt_tokens"])
            reason = f"answers {answer.status_code}: {answer.text[:200]}"
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            reason = f"gives no readable answer: {error!r}"
        raise LoadFailure(f"{url} {reason}; sessions need a model with a chat template")

    def _json(self, path: str, required: bool) -> dict[str, Any]:
        try:
            answer = self.http.get(self._url + path)
            if answer.status_code == 200 and isinstance(found := answer.json(), dict):
                return found
            reason = f"answers {answer.status_code}: {answer.text[:200]}"
        except (httpx.HTTPError, ValueError) as error:
            reason = f"can't be read: {error}"
        if required:
            raise LoadFailure(f"{self._url}{path} {reason}; is the server up, and the URL and API key right?")
        return {}


def trust(job: LoadJob) -> ssl.SSLContext | None:
    """What an https server is checked against; None for http. Raises `LoadFailure` when the file can't be read."""
    if not job.url.startswith("https:"):
        return None
    try:
        return ssl.create_default_context(cafile=job.ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise LoadFailure(f"the authorities in {job.ca_file} can't be read: {error}; a PEM file is wanted") from error


def window_counters(first: Scrape, last: Scrape, between: Sequence[Scrape]) -> ServerCounters | None:
    """The server's counters from `first` to `last`; None where it lacks those that every vLLM exports."""
    before, after = first.sums(), last.sums()

    def moved(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    def share(part: str, whole: str) -> float | None:
        some, all_ = moved(part), moved(whole)
        return some / all_ if some is not None and all_ else None

    prompt, generated = moved("vllm:prompt_tokens_total"), moved(_TOKENS)
    finished, preempted = moved(_FINISHED), moved("vllm:num_preemptions_total")
    if prompt is None or generated is None or finished is None or preempted is None:
        return None
    usage = [scrape.greatest("vllm:kv_cache_usage_perc") for scrape in (first, *between, last)]
    return ServerCounters(
        prompt_tokens=prompt,
        generation_tokens=generated,
        finished_requests=finished,
        preemptions=preempted,
        prefix_hit_rate=share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        acceptance_rate=share("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
        kv_cache_usage_max=max((value for value in usage if value is not None), default=None),
    )


@dataclass(frozen=True)
class Counted:
    """What the client counted between two scrapes, and by how much it can be off for requests that were in flight."""

    tokens: float
    tokens_allowance: float
    requests: float
    requests_allowance: float


def disagreements(first: Scrape, last: Scrape, counted: Counted, over: str) -> list[str]:
    """Why the server's counters over the time named `over` are not of the load that the client sent; mostly empty."""
    before, after = first.sums(), last.sums()
    reasons = []
    for name, what, mine, allowance in (
        (_TOKENS, "output tokens", counted.tokens, counted.tokens_allowance),
        (_FINISHED, "finished requests", counted.requests, counted.requests_allowance),
    ):
        if name not in after:
            continue
        theirs = after[name] - before.get(name, 0.0)
        if theirs < 0:
            reasons.append(f"the server's {name} went backwards: it was started anew during the load test")
        elif abs(theirs - mine) > TOLERANCE * max(theirs, mine) + allowance:
            hint = "somebody else uses the server" if theirs > mine else "its metrics are of another server"
            reasons.append(
                f"over {over} the server counts {theirs:.0f} {what} and the client {mine:.0f}, more than "
                f"{TOLERANCE:.0%} apart: {hint}?"
            )
    return reasons
