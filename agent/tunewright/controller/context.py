"""What the controller is given to work with for one tuning."""

from dataclasses import dataclass

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
