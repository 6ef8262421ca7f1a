"""Tuning files for tests."""

from typing import Any

from tunewright.domain.tuning import Tuning


def tuning(**spec: Any) -> Tuning:
    """A small tuning with short times; keyword arguments replace whole blocks of the spec."""
    blocks: dict[str, Any] = {
        "target": {"command": ["vllm", "serve", "m", "--max-num-seqs", "4", "--port", "{port}"], "replicas": 2},
        "metrics": {"window": "60s", "interval": "1s", "minRequests": 20},
        "objective": {"maximize": "outputTokensPerSecond"},
        "slo": {"ttftP95": "2s"},
        "load": {"mode": "closedLoop", "concurrency": 16, "duration": "10s", "maxWarmup": "10s"},
        "budget": {"trials": 4},
        "confirm": {"finalists": 2, "minRounds": 3, "maxRounds": 5, "minGain": "5%"},
        "promotion": {
            "mode": "approve",
            "approvalExpiry": "1h",
            "canary": {"share": "30%", "warmup": "10s", "trafficTimeout": "60s"},
            "analysis": {
                "interval": "10s",
                "minDuration": "40s",
                "maxDuration": "5m",
                "minRequests": 30,
                "tolerance": "20%",
            },
            "watch": "60s",
        },
    }
    return Tuning.model_validate(
        {
            "apiVersion": "tunewright.dev/v1alpha1",
            "kind": "Tuning",
            "metadata": {"name": "demo"},
            "spec": blocks | spec,
        }
    )
