"""Records to samples to one measurement. Runs after the load has ended."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tunewright.domain.tuning import Slo
from tunewright.loadtest.job import Endpoint
from tunewright.loadtest.recording import NANO, Record

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_COMPLETION = re.compile(rb'"completion_tokens": *(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens": *(\d+)')
_BAD_FINISH = re.compile(rb'"finish_reason": *"(abort|error)"')
_TRAILING = 2  # the usage event and [DONE]


@dataclass
class Answer:
    """One request after parsing. Times in seconds since the epoch of the run; `base` is where latency counts from."""

    base: float
    sent: float
    finished: float | None
    error: str | None
    ramp: bool
    prompt_tokens: int
    output_tokens: int | None
    """By the server's usage; None when it gave none."""
    times: Floats = field(default_factory=lambda: np.empty(0))
    """Receive times of the reads that ended token events."""
    events: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Token events in each."""

    @property
    def first(self) -> float | None:
        """When the first token came."""
        return float(self.times[0]) if len(self.times) else None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return float(self.times[0]) - self.base if len(self.times) else None

    @property
    def e2e(self) -> float:
        """Seconds to the last token, of a request that completed."""
        return float(self.times[-1]) - self.base

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one token."""
        if self.output_tokens is None or self.output_tokens < 2:
            return None
        return float(self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> Floats:
        """Seconds between reads with token events: per engine step where a step sends one event.

        A read with several tokens has one gap, which bounds each of theirs from above: none is reported too short.
        """
        return np.diff(self.times)


def answers(records: Sequence[Record], endpoint: Endpoint, epoch_ns: int, from_intended: bool) -> list[Answer]:
    """Parse what was received. Latency counts from the intended send time in an open loop, else from the real one."""
    leading = 1 if endpoint == "chat" else 0  # the event that names the role carries no token
    return [_answer(record, leading, epoch_ns, from_intended) for record in records]


def _answer(record: Record, leading: int, epoch_ns: int, from_intended: bool) -> Answer:
    def seconds(nanoseconds: int) -> float:
        return (nanoseconds - epoch_ns) / NANO

    sent = seconds(record.sent_ns or record.intended_ns)
    answer = Answer(
        base=seconds(record.intended_ns) if from_intended else sent,
        sent=sent,
        finished=seconds(record.finished_ns) if record.finished_ns else None,
        error=record.error,
        ramp=record.ramp,
        prompt_tokens=record.prompt_tokens,
        output_tokens=None,
    )
    completed = record.finished_ns > 0 and record.error is None
    if completed:
        _read_ending(answer, record.ending)
    trailing = _TRAILING if completed else 0
    _read_events(answer, record, leading, trailing, epoch_ns)
    if completed and answer.error is None and not len(answer.times):
        answer.error = "no tokens in the answer"
    return answer


def usage(ending: bytes) -> tuple[int | None, int | None]:
    """Prompt and output tokens by the server's usage, from the last bytes of an answer."""
    prompt, output = _PROMPT.findall(ending), _COMPLETION.findall(ending)
    return (int(prompt[-1]) if prompt else None, int(output[-1]) if output else None)


def _read_ending(answer: Answer, ending: bytes) -> None:
    prompt, output = usage(ending)
    if bad := _BAD_FINISH.search(ending):
        answer.error = f"finished by {bad[1].decode()}"
    elif b'"error"' in ending and output is None:
        answer.error = "error in the stream"
    elif output is None:
        answer.error = "no usage in the answer"
    else:
        answer.output_tokens = output
        answer.prompt_tokens = prompt if prompt is not None else answer.prompt_tokens


def _read_events(answer: Answer, record: Record, leading: int, trailing: int, epoch_ns: int) -> None:
    if not record.reads:
        return
    stamps = np.frombuffer(bytes(record.stamps), dtype=np.int64).reshape(-1, 2)
    times = ((stamps[:, 0] - epoch_ns // NANO) * NANO + stamps[:, 1] - epoch_ns % NANO) / NANO
    events = np.ones(record.reads, dtype=np.int64)
    for number, count in record.merged:
        events[number] = count
    last = np.cumsum(events)
    end = int(last[-1]) - trailing
    if answer.output_tokens is not None:  # more events than tokens: the last carry none, as a separate finish event
        end = min(end, leading + answer.output_tokens)
    tokens = np.clip(last, leading, max(end, leading)) - np.clip(last - events, leading, max(end, leading))
    holds = tokens > 0
    answer.times, answer.events = times[holds], tokens[holds]


@dataclass(frozen=True)
class Samples:
    """What fell into the window [start, end)."""

    completed: int
    failed: int
    errors: dict[str, int]
    ttft: Floats
    tpot: Floats
    itl: Floats
    e2e: Floats
    good: int
    prompt_tokens: int
    merged: float
    """Share of the reads with tokens that held more than one event."""


def samples(found: Sequence[Answer], slo: Slo, start: float, end: float) -> Samples:
    """TTFT of the first tokens, ITL of the tokens, TPOT and E2E of the requests whose end fell into the window."""
    errors: dict[str, int] = {}
    ttft: list[float] = []
    tpot: list[float] = []
    e2e: list[float] = []
    itl: list[Floats] = []
    completed = good = prompt_tokens = reads = merged = 0
    for answer in found:
        if answer.error is not None:
            if answer.finished is not None and start <= answer.finished < end:
                errors[answer.error] = errors.get(answer.error, 0) + 1
            continue
        if answer.first is not None and start <= answer.first < end:
            ttft.append(answer.first - answer.base)
            prompt_tokens += answer.prompt_tokens
        inside = (answer.times >= start) & (answer.times < end)
        reads += int(inside.sum())
        merged += int((answer.events[inside] > 1).sum())
        itl.append(answer.gaps[inside[1:]])
        if answer.ramp or answer.finished is None or not start <= answer.finished < end:
            continue
        completed += 1
        e2e.append(answer.e2e)
        if (per_token := answer.tpot) is not None:
            tpot.append(per_token)
        good += meets(slo, answer)
    return Samples(
        completed=completed,
        failed=sum(errors.values()),
        errors=errors,
        ttft=np.array(ttft),
        tpot=np.array(tpot),
        itl=np.concatenate(itl) if itl else np.empty(0),
        e2e=np.array(e2e),
        good=good,
        prompt_tokens=prompt_tokens,
        merged=merged / reads if reads else 0.0,
    )


def meets(slo: Slo, answer: Answer) -> bool:
    """Whether one request is as the SLO wants the slowest of those it binds: each latency under its loosest bound."""
    # In rising order of the percentiles, and so of the bounds: the last is kept.
    loosest = {name: (percentile, bound) for name, percentile, bound in slo.bounds()}
    for name, (percentile, bound) in loosest.items():
        if name == "itl":
            value = float(np.percentile(answer.gaps, int(percentile[1:]))) if len(answer.gaps) else None
        else:
            value = {"ttft": answer.ttft, "tpot": answer.tpot, "e2e": answer.e2e}[name]
        if value is not None and value > bound:
            return False
    return True


def token_flow(found: Sequence[Answer]) -> tuple[Floats, Floats]:
    """When tokens came, and how many: events carry several under speculation, by the usage of each request.

    A request that was cut off, or whose usage is unknown, is taken to have had as many tokens an event as the others.
    """
    known = [(answer.output_tokens or 0, int(answer.events.sum())) for answer in found if answer.output_tokens]
    overall = sum(tokens for tokens, _ in known) / max(1, sum(events for _, events in known)) if known else 1.0
    times: list[Floats] = [np.empty(0)]
    weights: list[Floats] = [np.empty(0)]
    for answer in found:
        if len(answer.times):
            total = int(answer.events.sum())
            each = answer.output_tokens / total if answer.output_tokens else overall
            times.append(answer.times)
            weights.append(np.multiply(answer.events, each, dtype=np.float64))
    return np.concatenate(times), np.concatenate(weights)


def mean_concurrency(
    found: Sequence[Answer], start: float, end: float, pauses: Sequence[tuple[float, float]] = ()
) -> float:
    """Requests in flight, and conversations in a pause, on average over the window."""
    spans = [(answer.sent, answer.finished if answer.finished is not None else end) for answer in found]
    begun, ended = np.array([*spans, *pauses], dtype=np.float64).reshape(-1, 2).T
    return float(np.clip(np.minimum(ended, end) - np.maximum(begun, start), 0.0, None).sum()) / (end - start)


def in_flight_at(found: Sequence[Answer], moment: float) -> int:
    """Requests that were intended by then and had not ended."""
    return sum(1 for answer in found if answer.base <= moment and (answer.finished is None or answer.finished > moment))
