"""Recorded traces: read whole and checked before anything is sent, then replayed at their own times."""

import csv
import errno
import hashlib
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tunewright.bounded import read_bounded, unpacked
from tunewright.domain.traffic import Trace, TraceFile
from tunewright.domain.units import format_duration
from tunewright.loadtest.client import Client
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.lengths import Ints
from tunewright.loadtest.pacing import Stock, Timer
from tunewright.loadtest.prompts import Planned, body_builder
from tunewright.loadtest.recording import NANO, Record

MAX_BYTES = 512 << 20
_SHOWN = 5
_BLOCKS = {"mooncake": 512, "timed": 16}
_UNITS = {"mooncake": 1e-3, "timed": 1.0}
_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")
_OWN_NUMBERS = 10_000_000


class Arrival(NamedTuple):
    """One request of a trace; `at` in seconds since the first one."""

    line: int
    at: float
    prompt: int
    output: int
    blocks: tuple[str, ...]
    """Names of the blocks of the prompt: equal ones are equal tokens. Empty: nothing is known to be shared."""


@dataclass(frozen=True)
class Recording:
    """A whole trace, in order."""

    arrivals: tuple[Arrival, ...]
    block: int
    """Tokens in a block."""
    digest: str

    @property
    def period(self) -> float:
        """Seconds after which it begins again: its length, and one gap more."""
        span = self.arrivals[-1].at
        return span + (span / (len(self.arrivals) - 1) if len(self.arrivals) > 1 and span > 0 else 1.0)

    @property
    def summary(self) -> str:
        """How much it is, for people."""
        return f"{len(self.arrivals)} requests over {format_duration(round(self.period))}"

    def arrivals_within(self, seconds: float) -> int:
        """How many come in the first `seconds` of it, which may be several times its length."""
        whole, rest = divmod(seconds, self.period)
        return int(whole) * len(self.arrivals) + sum(arrival.at < rest for arrival in self.arrivals)

    def told(self, trace: TraceFile) -> list[str]:
        """Which recording it is, and what was made of it."""
        found = [f"{trace.path}: {len(self.arrivals)} requests, sha256 {self.digest[:12]}"]
        if short := sum(arrival.output == 0 for arrival in self.arrivals):
            found.append(f"{short} requests of the trace have no output; they ask for one token")
        return found

    def remarks(self, trace: Trace, duration: float) -> tuple[str, ...]:
        """What a reader of its replay should know of it."""
        found = self.told(trace)
        if self.period / trace.speed < duration:
            found.append(
                f"the trace lasts {self.period / trace.speed:.0f} s at this speed: it was begun again within the window"
            )
        return tuple(found)


def read_trace(trace: TraceFile, limit: int | None = None) -> Recording:
    """Read and check it. Raises `LoadFailure` with the lines that are wrong, or don't fit `limit` tokens."""
    try:
        data = read_bounded(Path(trace.path), MAX_BYTES)
    except OSError as error:
        raise _unreadable(trace.path, error) from error
    return parse_trace(data, trace.path, trace.format, limit=limit)


def _unreadable(path: str, error: OSError) -> LoadFailure:
    hint = ": cut it, as with head -n" if error.errno == errno.EFBIG else ""
    return LoadFailure(f"the trace {path} can't be read: {error.strerror or error}{hint}")


def parse_trace(data: bytes, path: str, kind: str, *, limit: int | None = None, most: int = MAX_BYTES) -> Recording:
    """The trace in the bytes of a file, which may be gzip of at most `most` bytes; `path` names it in messages.

    Raises `LoadFailure`.
    """
    try:
        text = unpacked(data, most).decode()
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise LoadFailure(f"the trace {path} can't be read: {error}") from error
    if kind == "auto":
        kind = "azure" if text[:1000].split("\n", 1)[0].lower().startswith(_COLUMNS[0]) else _guess(path, text)
    wrong: list[str] = []
    arrivals: list[Arrival] = []
    for line, parse in _rows(kind, text, path):
        try:
            arrival = parse()
            if arrivals and arrival.at < arrivals[-1].at:
                raise ValueError(f"its time is before that of line {arrivals[-1].line}; sort the trace")
            if limit is not None and arrival.prompt + max(1, arrival.output) > limit:
                raise ValueError(
                    f"{arrival.prompt} prompt and {arrival.output} output tokens do not fit the server's max_model_len "
                    f"of {limit}"
                )
            arrivals.append(arrival)
        except (ValueError, OverflowError) as error:
            wrong.append(f"{path}:{line}: {error}")
    if wrong:
        more = f"\nand {len(wrong) - _SHOWN} more lines" if len(wrong) > _SHOWN else ""
        raise LoadFailure("\n".join(wrong[:_SHOWN]) + more)
    if not arrivals:
        raise LoadFailure(f"the trace {path} has no requests")
    first = arrivals[0].at
    ordered = tuple(arrival._replace(at=arrival.at - first) for arrival in arrivals)
    return Recording(ordered, _BLOCKS.get(kind, 1), hashlib.sha256(data).hexdigest())


def _rows(kind: str, text: str, path: str) -> Iterator[tuple[int, Callable[[], Arrival]]]:
    """Each line's number, and what reads it or raises `ValueError`."""
    if kind == "azure":
        rows = csv.reader(io.StringIO(text))
        try:
            head = [name.strip().lower() for name in next(rows, [])]
            missing = [name for name in _COLUMNS if name not in head]
            if missing:
                raise LoadFailure(
                    f"{path}:1: the header lacks {', '.join(missing)}: TIMESTAMP,ContextTokens,GeneratedTokens"
                )
            where = [head.index(name) for name in _COLUMNS]
            for row in rows:
                if row:
                    yield rows.line_num, lambda row=row, line=rows.line_num: _azure(line, row, where)  # type: ignore[misc]
        except csv.Error as error:  # as of a quote that nothing closes
            raise LoadFailure(f"{path}:{rows.line_num}: this is no CSV: {error}") from error
        return
    for line, content in enumerate(text.splitlines(), start=1):
        if content.strip():
            yield line, lambda line=line, content=content: _json(kind, line, content)  # type: ignore[misc]


def _azure(line: int, row: list[str], where: list[int]) -> Arrival:
    if len(row) <= max(where):
        raise ValueError(f"{len(row)} columns, where the header has more")
    moment, prompt, output = (row[column].strip() for column in where)
    try:
        at = datetime.fromisoformat(moment)
    except ValueError as error:
        raise ValueError(f"{moment!r} is no time") from error
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    if not (prompt.isdecimal() and output.isdecimal()) or not int(prompt):
        raise ValueError(f"{prompt!r} and {output!r} are no token counts")
    return Arrival(line, at.timestamp(), int(prompt), int(output), ())


def _json(kind: str, line: int, content: str) -> Arrival:
    row = _object(content)
    at = row.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at) or at < 0:
        raise ValueError(f"timestamp is {at!r}, not a number of 0 or more")
    prompt, output = _count(row, "input_length", 1), _count(row, "output_length", 0)
    blocks, block = row.get("hash_ids") or [], _BLOCKS[kind]
    if not isinstance(blocks, list) or not all(isinstance(name, int | str) for name in blocks):
        raise ValueError("hash_ids is no list of whole numbers or texts")
    if blocks and len(blocks) != -(-prompt // block):
        raise ValueError(f"{len(blocks)} hash_ids for {prompt} tokens, where one names {block} tokens ({kind})")
    return Arrival(line, at * _UNITS[kind], prompt, output, tuple(map(str, blocks)))


def _count(row: dict[str, object], name: str, least: int) -> int:
    count = row.get(name)
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name} is {count!r}, not a whole number of {least} or more")
    return count


def _object(content: str) -> dict[str, object]:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("this is no JSON object")
    return row


def _guess(path: str, text: str) -> str:
    """Mooncake's and vLLM's lines look alike, in other units: how many tokens a hash names tells them apart."""
    fits = set(_BLOCKS)
    seen = False
    for content in itertools.islice(filter(str.strip, text.splitlines()), 1000):
        try:
            row = _object(content)
        except ValueError:
            continue  # told with its line when it is read
        blocks, prompt = row.get("hash_ids"), row.get("input_length")
        if isinstance(blocks, list) and blocks and isinstance(prompt, int):
            seen = True
            fits = {kind for kind in fits if len(blocks) == -(-prompt // _BLOCKS[kind])}
    if not seen or len(fits) != 1:
        why = "no hash_ids" if not seen else "hash_ids of " + ("either" if fits else "neither")
        raise LoadFailure(
            f"the trace {path} has {why}, so its format can't be told: name it (mooncake: milliseconds; timed: seconds)"
        )
    return fits.pop()


class TraceSource:
    """The requests of a trace, in order and round after round; each round's prompts are new."""

    def __init__(self, job: LoadJob, model: str, seed: list[int], recording: Recording, part: int) -> None:
        self._build, self._low, self._high = body_builder(job, model)
        self._seed, self._recording = seed, recording
        self._first = part * _OWN_NUMBERS
        self._index = 0

    def next(self) -> Planned:
        """The next request."""
        round_, place = divmod(self._index, len(self._recording.arrivals))
        arrival = self._recording.arrivals[place]
        output = max(1, arrival.output)
        body = self._build(self._tokens(arrival, round_), output)
        self._index += 1
        return Planned(self._first + self._index - 1, arrival.prompt, output, body)

    def _tokens(self, arrival: Arrival, round_: int) -> Ints:
        if not arrival.blocks:
            return self._drawn(f"line {arrival.line}", round_, arrival.prompt)
        parts = [self._drawn(name, round_, self._recording.block) for name in arrival.blocks]
        return np.concatenate(parts)[: arrival.prompt]

    def _drawn(self, name: str, round_: int, count: int) -> Ints:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        rng = np.random.default_rng([*self._seed, round_, int.from_bytes(digest, "little")])
        return rng.integers(self._low, self._high, count)


class TraceLoop:
    """Sends a trace by the clock. The window begins it again, so that every server is measured on the same part."""

    def __init__(self, client: Client, warmup: Stock, window: Stock, recording: Recording, speed: float) -> None:
        self._client, self._recording, self._speed = client, recording, speed
        self._warmup, self._window = warmup, window
        self._stock = warmup
        self._timer = Timer(self._due)
        self._began_ns = self._next_ns = self._index = 0

    @property
    def built_late(self) -> int:
        return self._warmup.empty + self._window.empty

    def prepare(self) -> None:
        self._warmup.fill()
        self._window.fill()

    def start(self) -> None:
        self._begin(self._warmup)

    def window(self) -> None:
        self._begin(self._window)

    def stop(self) -> None:
        self._timer.close()

    def close(self) -> None:
        self._warmup.close()
        self._window.close()

    def ended(self, record: Record) -> None:
        pass

    def _begin(self, stock: Stock) -> None:
        self._stock, self._index = stock, 0
        self._began_ns = self._next_ns = time.time_ns()
        self._timer.set(self._next_ns)

    def _due(self) -> None:
        now = time.time_ns()
        while self._next_ns <= now:
            self._client.submit(self._stock.take(), self._next_ns)
            self._index += 1
            round_, place = divmod(self._index, len(self._recording.arrivals))
            seconds = (round_ * self._recording.period + self._recording.arrivals[place].at) / self._speed
            self._next_ns = self._began_ns + round(seconds * NANO)
        self._timer.set(self._next_ns)
