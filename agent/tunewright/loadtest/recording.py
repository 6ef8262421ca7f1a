"""What is written down while streams run: raw receive times and counts; nothing is parsed before they end."""

import copy
import struct
from collections import deque

from tunewright.loadtest.prompts import Planned

_TIMESPEC = struct.Struct("=qq")
NANO = 1_000_000_000


def pack_stamp(nanoseconds: int) -> bytes:
    """Nanoseconds since the epoch as the kernel's `struct timespec`."""
    return _TIMESPEC.pack(*divmod(nanoseconds, NANO))


def unpack_stamp(stamp: bytes | bytearray) -> int:
    """Nanoseconds since the epoch of a `struct timespec`."""
    seconds, nanoseconds = _TIMESPEC.unpack(stamp)
    return int(seconds * NANO + nanoseconds)


class Record:
    """One request. Times are nanoseconds since the epoch, as the kernel stamps what it receives."""

    __slots__ = (
        "body", "ending", "error", "finished_ns", "intended_ns", "merged", "number", "output_tokens", "prompt_tokens",
        "ramp", "reads", "sent_ns", "stamps", "whole",
    )  # fmt: skip

    def __init__(self, planned: Planned, intended_ns: int, ramp: bool) -> None:
        self.number = planned.number
        self.prompt_tokens = planned.prompt_tokens
        self.output_tokens = planned.output_tokens
        self.ramp = ramp
        """Sent to start a closed loop, with a shortened output: its length is not the workload's."""
        self.intended_ns = intended_ns
        self.sent_ns = 0
        self.reads = 0
        """Reads that ended at least one event."""
        self.stamps = bytearray()
        """The receive time of each such read, as `struct timespec`."""
        self.merged: list[tuple[int, int]] = []
        """(number of the read, its events) of the reads that ended more than one."""
        self.whole = planned.whole
        """Whether all of the answer is wanted, for the next turn of a conversation."""
        self.body = b""
        self.ending = b""
        """The last bytes of the answer, which hold the usage; the body of an answer that is an error."""
        self.error: str | None = None
        self.finished_ns = 0
        """0 while it runs."""

    def snapshot(self) -> "Record":
        """As it is now: the record itself once it has ended, for then nothing changes it any more."""
        if self.finished_ns:
            return self
        found = copy.copy(self)
        found.stamps, found.merged = bytearray(self.stamps), list(self.merged)
        return found


class Recorder:
    """All requests of one run, and the few counts that are needed while it runs."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.in_flight = 0
        self.events = 0
        """Events received so far, for the warm-up's test."""
        self.unstamped_reads = 0
        """Reads that the kernel did not stamp (all of them over TLS): their time is when we saw them."""
        self.pauses: list[tuple[int, int]] = []
        """(from, to) of the pauses between the turns of conversations, in nanoseconds since the epoch."""
        self.completed = 0
        self.ramp_pending = 0
        self.lives: deque[float] = deque(maxlen=256)
        """Seconds from send to end of the latest requests that completed at their full length."""
        self.first_tokens: deque[tuple[int, float]] = deque(maxlen=10_000)
        """(receive time, seconds since it was to be sent) of first events."""
        self.refused_in_a_row = 0
        self.failed_in_a_row = 0
        self.last_error = ""
        """With the beginning of the server's answer, if it gave one."""

    def begin(self, record: Record) -> None:
        """A request is about to be sent."""
        self.records.append(record)
        self.in_flight += 1
        self.ramp_pending += record.ramp

    def end(self, record: Record, now_ns: int, error: str | None) -> None:
        """A request ended, with an answer or an error."""
        record.finished_ns = now_ns
        record.error = error
        self.in_flight -= 1
        self.ramp_pending -= record.ramp
        if error is None:
            self.completed += 1
            self.failed_in_a_row = 0
            if not record.ramp:
                self.lives.append((now_ns - record.sent_ns) / NANO)
        else:
            self.failed_in_a_row += 1
            self.last_error = f"{error} {record.ending[:300].decode(errors='replace')}".strip()
