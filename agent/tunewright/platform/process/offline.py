"""No production at all: a command is tuned on the spare alone, and the winner is told to whoever will run it."""

from collections.abc import Sequence

from tunewright.domain.candidate import Candidate
from tunewright.domain.recipe import Recipe
from tunewright.domain.tuning import Spare, Target
from tunewright.platform.process.command import Command
from tunewright.ports import Refused, TargetPlan, TargetStatus

_ONLY = "there is no production (target.replicas is 0): the winner can only be recommended"


class OfflineTarget:
    """Implements `ports.Target` for `target.replicas: 0`. The baseline is what `target.command` says."""

    def __init__(self, target: Target, spare: Spare) -> None:
        self._command = Command(target.command, {**target.environment, **spare.environment}, target.api_key_file)

    def describe(self) -> str:
        """For people: that there is none."""
        return "none; the command is tuned on the spare alone"

    def baseline(self) -> Candidate:
        """The knobs of `target.command`."""
        return self._command.baseline

    def beside_knobs(self) -> str:
        """Empty: there is no production."""
        return ""

    def observe(self) -> TargetStatus:
        """Nothing, which is whole."""
        return TargetStatus(replicas=[], desired=0, settled=True, detail="no server is wanted")

    def preflight(self, candidate: Candidate) -> Sequence[str]:
        """Always one reason: there is nothing to change."""
        return [_ONLY, *self._command.problems(candidate)]

    def notes(self, candidate: Candidate) -> Sequence[str]:  # noqa: ARG002
        """Nothing: there is no production."""
        return ()

    def apply(self, plan: TargetPlan) -> TargetStatus:
        """Raises `Refused`."""
        raise Refused(f"{_ONLY}; {plan.candidate.hash} is not rolled out")

    def let_go(self) -> bool:
        """No: nothing was ever touched."""
        return False

    def recipe(self, candidate: Candidate) -> Recipe:
        """The command of one server that runs `candidate`."""
        return self._command.recipe(candidate)

    def recommend(self, candidate: Candidate) -> str:
        """What a person would change by hand to run `candidate`, as text."""
        return self._command.change(self._command.baseline, candidate)

    def scrape_targets(self) -> dict[str, dict[str, str]]:
        """No servers."""
        return {}
