"""What a load generator saw of its requests, as a file between processes, and held against the truth."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from benchmarks.truth_server import Truth

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


ON_TIME = 0.001
"""Seconds that the server may send a token late and count as on time."""


class Seen(NamedTuple):
    """One completed request, in monotonic seconds."""

    base: float
    """Where its latencies count from."""
    reads: Floats
    """When tokens came."""
    events: Ints
    """How many came in each read."""


@dataclass(frozen=True)
class Run:
    """One run of one client. `window` is the time in which it measured; None where it measures all it sends."""

    seen: Mapping[str, Seen]
    window: tuple[float, float] | None
    notes: dict[str, Any] = field(default_factory=dict)


def write(path: Path, run: Run) -> None:
    """Write a run to `path` (.npz)."""
    each = list(run.seen.values())
    np.savez(
        path,
        names=np.array(list(run.seen), dtype=str),
        base=np.array([seen.base for seen in each]),
        counts=np.array([len(seen.reads) for seen in each], dtype=np.int64),
        reads=np.concatenate([seen.reads for seen in each] or [np.empty(0)]),
        events=np.concatenate([seen.events for seen in each] or [np.empty(0, dtype=np.int64)]),
        window=np.array(run.window if run.window is not None else []),
        notes=np.array(json.dumps(run.notes)),
    )


def read(path: Path) -> Run:
    """What `write` wrote."""
    with np.load(path) as file:
        ends = np.cumsum(file["counts"])
        starts = ends - file["counts"]
        reads, events = file["reads"], file["events"]
        seen = {
            str(name): Seen(float(base), reads[start:end], events[start:end])
            for name, base, start, end in zip(file["names"], file["base"], starts, ends, strict=True)
        }
        window = tuple(file["window"].tolist())
        return Run(seen, (window[0], window[1]) if window else None, json.loads(str(file["notes"])))


def compare(run: Run, truth: Mapping[str, Truth], streams: int | None, pace: float | None = None) -> dict[str, Any]:
    """Client against server, over the requests that ended in the window. Errors in milliseconds, client minus server.

    `own` errors are of the receive times alone. The others are of latencies as a client reports them: these hold,
    beside it, how long the server took to read the request, which no client can see and a user waits for. With `pace`
    (seconds between the tokens of a stream, out of step) the tokens that the server sent on time are judged for
    themselves too: after a stall it sends two of a stream at once, which no client can tell apart.
    """
    by_number = {name.rpartition("-")[2]: found for name, found in truth.items() if "-" in name}
    received = np.array([one.received for one in by_number.values()]) / 1e9
    window = run.window or (float(received.min()), float(received.max()))
    start, end = window
    pairs = [
        (seen, by_number[name])
        for name, seen in run.seen.items()
        if name in by_number and len(seen.reads) and (run.window is None or start <= seen.reads[-1] < end)
    ]
    found: dict[str, Any] = {"requests": len(pairs), "window_s": end - start}
    inside = np.concatenate([one.sent for one in by_number.values()]) / 1e9
    found["tokens_per_second"] = float(((inside >= start) & (inside < end)).sum()) / (end - start)
    if streams is not None:
        last = np.array([one.sent[-1] if len(one.sent) else one.received for one in by_number.values()]) / 1e9
        running = np.clip(np.minimum(last, end) - np.maximum(received, start), 0.0, None).sum() / (end - start)
        found |= {"concurrency": float(running), "delivered": float(running) / streams}
    if not pairs:
        return found
    whole = [(seen, one) for seen, one in pairs if int(seen.events.sum()) == len(one.sent)]
    sent = [one.sent / 1e9 for _, one in whole]
    receive = np.concatenate([np.repeat(seen.reads, seen.events) for seen, _ in whole]) - np.concatenate(sent)
    own_first = np.array([seen.reads[0] - one.sent[0] / 1e9 for seen, one in pairs])
    ttft = np.array([seen.reads[0] - seen.base for seen, _ in pairs])
    e2e = np.array([seen.reads[-1] - seen.base for seen, _ in pairs])
    itl = np.concatenate([np.diff(seen.reads) for seen, _ in pairs])
    true_ttft = np.array([(one.sent[0] - one.received) / 1e9 for _, one in pairs])
    true_e2e = np.array([(one.sent[-1] - one.received) / 1e9 for _, one in pairs])
    true_itl = np.concatenate([np.diff(one.sent) / 1e9 for _, one in pairs])
    if pace is not None:
        late = np.concatenate([_lateness(one.sent / 1e9, pace) for _, one in whole])
        on_time = np.abs(receive[late < ON_TIME])
        found |= {"on_time": len(on_time) / len(late), "server_late_max_ms": float(late.max()) * 1e3}
        found["on_time_error_p99_ms"] = float(np.percentile(on_time, 99)) * 1e3
    return found | {
        "miscounted": len(pairs) - len(whole),
        "receive_error_ms": _spread(receive),
        "receive_error_p99_ms": float(np.percentile(np.abs(receive), 99)) * 1e3,
        "ttft_own_error_p99_ms": float(np.percentile(np.abs(own_first), 99)) * 1e3,
        "ttft_error_ms": _spread(ttft - true_ttft),
        "e2e_error_ms": _spread(e2e - true_e2e),
        "ttft_p99_error_ms": _percentile_error(ttft, true_ttft),
        "itl_p99_error_ms": _percentile_error(itl, true_itl),
        "itl_mean_error_ms": float(itl.mean() - true_itl.mean()) * 1e3,
        "e2e_p99_error_ms": _percentile_error(e2e, true_e2e),
    }


def _lateness(sent: Floats, pace: float) -> Floats:
    """Seconds after its time that each token went; the stream's most punctual one tells when that was."""
    due = sent - pace * np.arange(len(sent))
    lateness: Floats = due - due.min()
    return lateness


def _spread(values: Floats) -> dict[str, float]:
    low, high = np.percentile(values, [1, 99])
    return {"mean": float(values.mean()) * 1e3, "p1": float(low) * 1e3, "p99": float(high) * 1e3}


def _percentile_error(seen: Floats, true: Floats) -> float:
    """The reported 99th percentile minus the true one, in milliseconds."""
    return float(np.percentile(seen, 99) - np.percentile(true, 99)) * 1e3
