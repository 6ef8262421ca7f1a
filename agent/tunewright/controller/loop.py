"""The loop: reconcile, look, wait; until the tuning has ended or somebody says stop."""

from collections.abc import Callable

from tunewright.controller.context import Context
from tunewright.controller.reconcile import reconcile
from tunewright.domain.phases import TERMINAL
from tunewright.domain.state import TuningRecord
from tunewright.ports import Conflict, PortError, Stop

MAX_WAIT = 1.0
"""Seconds between two looks at the store: a person's decision, written by another process, is taken up within it."""


Observer = Callable[[float, BaseException | None], None]
"""Is told of each pass how many seconds it took, and the error it ended in."""


def run(
    name: str,
    context: Context,
    stop: Stop,
    on_step: Callable[[TuningRecord], None],
    *,
    keep_going: bool = False,
    observe: Observer = lambda _seconds, _error: None,
) -> TuningRecord | None:
    """Drive one tuning until it has ended (with `keep_going`: until `stop`); the last record, None if it is gone.

    Bounded by the deadlines of the phases. Killing it at any point loses nothing: the next run goes on.
    """
    while True:
        started, failed = context.clock.monotonic(), None
        try:
            again = reconcile(name, context)
        except Conflict as conflict:
            again, failed = 0.0, conflict  # somebody else wrote meanwhile: read afresh and decide again
        except Exception as fault:
            observe(context.clock.monotonic() - started, fault)
            raise
        took, record = context.clock.monotonic() - started, context.store.load(name)
        # What failed outside is kept in the record, which says when it is tried again.
        observe(took, failed or (PortError(record.sentence) if record is not None and record.errors else None))
        if record is None:
            return None
        on_step(record)
        if record.phase in TERMINAL and again is None and not keep_going:
            return record
        if stop.wait(min(again if again is not None else MAX_WAIT, MAX_WAIT)):
            return record
