"""Exit codes, as `tunewright --help` tells them."""

from enum import IntEnum

from tunewright.domain.phases import Phase
from tunewright.domain.state import TuningRecord


class Exit(IntEnum):
    """Exit codes, as `tunewright --help` tells them."""

    DONE = 0  # the command did what it says; a tuning is promoted or recommended
    USAGE = 2  # the command line or the file is wrong; nothing was touched
    NO_CHANGE = 3  # the tuning ended without a change: no improvement, infeasible, rejected, aborted
    WENT_WRONG = 4  # the tuning failed, or was rolled back
    REFUSED = 5  # the decision can't be taken now: stale, or nothing waits for it
    UNREACHABLE = 6  # something outside did not answer: Prometheus, a server, the store
    INTERRUPTED = 130  # stopped by Ctrl-C; the same command goes on


OF_PHASE = {
    Phase.PROMOTED: Exit.DONE,
    Phase.RECOMMENDED: Exit.DONE,
    Phase.NO_IMPROVEMENT: Exit.NO_CHANGE,
    Phase.INFEASIBLE: Exit.NO_CHANGE,
    Phase.REJECTED: Exit.NO_CHANGE,
    Phase.ROLLED_BACK: Exit.WENT_WRONG,
    Phase.FAILED: Exit.WENT_WRONG,
}


def exit_of(record: TuningRecord) -> Exit:
    """That of a tuning that has ended. What a person aborted or took back did not go wrong."""
    return Exit.NO_CHANGE if record.stopped_by else OF_PHASE[record.phase]
