"""The REST API over a small set of records, called in-process as a client would call it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from tunings import tuning

from tunewright.api.app import LOCAL_HOSTS, create_app
from tunewright.api.auth import OwnerMayAll, TokenFile, ensure_token
from tunewright.controller.context import Context
from tunewright.domain.answers import Answer
from tunewright.domain.candidate import Candidate
from tunewright.domain.measurement import Estimate, GeneratorHealth, Latency, Measurement
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Histogram, Source, TrafficProfile
from tunewright.domain.recipe import Recipe
from tunewright.domain.state import (
    ConfirmStatus,
    Finalist,
    Gain,
    PhaseChange,
    TrialOutcome,
    TrialPhase,
    TrialPurpose,
    TrialRecord,
    TuningRecord,
)
from tunewright.ports import Store, Stores
from tunewright.store.memory import MemoryStore
from tunewright.store.one import OneStore

BASELINE = Candidate(values={"max_num_seqs": 4})
WINNER = Candidate(values={"max_num_seqs": 64, "enable_prefix_caching": False})
START = 1_000_000.0
SECRET = "sk-do-not-show-me"
API = "/api/v1alpha1"


class Clock:
    """Stands still unless it is set."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def measured(tokens: float, ttft: float) -> Measurement:
    def latency(value: float) -> Latency:
        return Latency(count=100, mean=value, p50=value, p90=value, p95=value, p99=value)

    return Measurement(
        started_at=START,
        duration=10.0,
        source=Source.SIMULATED,
        vllm_version="0.32.0+simulated.demo",
        seed=1,
        warmup=1.0,
        warmup_settled=True,
        completed=100,
        failed=0,
        output_tokens_per_second=Estimate(value=tokens, low=tokens * 0.97, high=tokens * 1.03),
        input_tokens_per_second=tokens * 3,
        requests_per_second=tokens / 60,
        ttft=latency(ttft),
        tpot=latency(0.02),
        itl=latency(0.02),
        e2e=latency(ttft + 1.2),
        generator=GeneratorHealth(asked=16, achieved=16, schedule_lag_p99=0.0, cpu_share=0.1, merged_reads=0.0),
    )


def profile() -> TrafficProfile:
    lengths = Histogram(edges=(100.0, 1000.0), counts=(10.0, 5.0))
    return TrafficProfile(
        start=START - 60,
        end=START,
        replicas=2,
        via=f"Prometheus at http://user:{SECRET}@prometheus:9090",
        source=Source.SIMULATED,
        finished_requests=120,
        saturated=False,
        demand=1.0,
        concurrency=4,
        concurrency_p95=8,
        running=4,
        waiting=0,
        prompt_tokens=lengths,
        output_tokens=lengths,
        prompt_tokens_mean=300,
        output_tokens_mean=200,
        error_rate=0.0,
        output_tokens_per_second=200,
    )


def trials() -> list[TrialRecord]:
    """The baseline, then three rounds of baseline and winner in turns."""
    plan = [(TrialPurpose.BASELINE, BASELINE, 0)]
    plan += [(TrialPurpose.CONFIRM, who, round_) for round_ in (1, 2, 3) for who in (BASELINE, WINNER)]
    made = []
    for number, (purpose, candidate, round_) in enumerate(plan):
        old = candidate is BASELINE
        tokens, ttft = (400.0 + round_, 0.8 + round_ / 10) if old else (800.0 + round_, 0.3 + round_ / 10)
        made.append(
            TrialRecord(
                id=f"{number:03d}-{candidate.hash}",
                number=number,
                purpose=purpose,
                candidate=candidate,
                round=round_,
                phase=TrialPhase.DONE,
                phase_since=START,
                created_at=START - 30,
                finished_at=START,
                outcome=TrialOutcome.COMPLETE,
                measurement=measured(tokens, ttft),
                answers=(Answer(prompt="p", text="an answer"),),
                objective=tokens,
                slo_margin=0.5,
            )
        )
    return made


def waiting(**changes: Any) -> TuningRecord:
    """A tuning that waits for a person; its spec holds secrets in the usual places."""
    asked = tuning(
        target={
            "command": ["vllm", "serve", "m", "--api-key", SECRET, "--port", "{port}"],
            "environment": {"HF_TOKEN": SECRET},
            "replicas": 2,
        }
    )
    gain = Gain(
        estimate=Estimate(value=0.98, low=0.9, high=1.1),
        rounds=3,
        status=ConfirmStatus.BETTER,
        reason="+98 % (3 rounds)",
    )
    fields: dict[str, Any] = {
        "tuning": asked,
        "spec_hash": asked.spec.spec_hash,
        "phase": Phase.AWAITING_APPROVAL,
        "phase_since": START,
        "sentence": "Waiting for approval.",
        "source": Source.SIMULATED,
        "profile": profile(),
        "baseline": BASELINE,
        "winner": WINNER,
        "recipe": Recipe(args=("vllm", "serve", "m", "--max-num-seqs", "64")),
        "finalists": (Finalist(candidate=WINNER, gain=gain), Finalist(candidate=Candidate(values={"max_num_seqs": 8}))),
        "approval_since": START,
        "history": (PhaseChange(at=START, phase=Phase.AWAITING_APPROVAL, sentence="Waiting for approval."),),
    }
    return TuningRecord(**(fields | changes))


class Rest:
    """An app over a store, its token, and a client."""

    def __init__(
        self, folder: Path, store: Store | None = None, stores: Stores | None = None, **options: Any
    ) -> None:  # fmt: skip
        """`store` is the one of its own namespace; with `stores` it is one of several."""
        self.store: Store = store if store is not None else MemoryStore()
        self.clock = Clock()
        self.token_file = folder / "private" / "token"
        self.token = ensure_token(self.token_file)
        defaults: dict[str, Any] = {
            "authenticator": TokenFile(self.token_file),
            "authorizer": OwnerMayAll(),
            "allowed_hosts": LOCAL_HOSTS,
            "ready": lambda: None,
            "metrics": lambda: b"tunewright_up 1\n",
            "report": lambda _store, record: f"<p>{record.name}</p>",
        }
        self.app: FastAPI = create_app(stores or OneStore(self.store), self.clock, **(defaults | options))
        if store is None:
            self.store.save(waiting())
            for trial in trials():
                self.store.save_trial("demo", trial)

    def context(self) -> Context:
        """What taking up decisions needs of the loop's surroundings: clock and store."""
        unused: Any = None
        return Context(
            clock=self.clock,
            store=self.store,
            metrics=unused,
            spare=unused,
            load=unused,
            target=unused,
            proposer=unused,
        )

    def binding(self) -> dict[str, str]:
        """What an approval must name."""
        bind: dict[str, str] = self.get("/tunings/demo/promotion").json()["bind"]
        return bind

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET under the API's prefix, with the token."""
        return self.call("GET", API + path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST JSON under the API's prefix, with the token."""
        return self.call("POST", API + path, json=body, **options)

    def call(self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        """Any request; `headers` replace the usual ones, and an empty value leaves one out."""
        wanted = {"Authorization": f"Bearer {self.token}", "Host": "127.0.0.1:8321"} | (headers or {})
        return call(self.app, method, path, headers={k: v for k, v in wanted.items() if v}, **options)


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to an app, in-process."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8321") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def problem(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The problem details of a response, which must be of this status and kind."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = json.loads(response.content)
    assert found["type"] == f"https://tunewright.dev/problems/{kind}"
    assert found["status"] == status
    assert found["title"]
    assert found["detail"]
    return found
