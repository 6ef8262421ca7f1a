"""What the controller is given to work with for one tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunewright.domain.answers import QualityPrompt
from tunewright.domain.load import LoadFile
from tunewright.ports import Clock, LoadTest, MetricsSource, Proposer, Spare, Store, Target


@dataclass(frozen=True)
class Context:
    """The adapters of one tuning's surroundings. The controller knows them by their ports alone."""

    clock: Clock
    store: Store
    metrics: MetricsSource
    spare: Spare
    load: LoadTest
    target: Target
    proposer: Proposer
    prompts: Callable[[], Sequence[QualityPrompt]] = tuple
    """The user's own prompts of the quality gate, none by default. Raises `Refused` when they are of no use."""
    load_file: Callable[[], LoadFile | None] = lambda: None
    """Checks what of a ConfigMap the load tests are to read, and keeps a copy of it for them; None where they read
    none. Raises `Refused` when it is of no use, `PortError` when it is not there (yet)."""
    others: Store | None = None
    """Where other tunings' trials are found, beside those that `store` holds."""
