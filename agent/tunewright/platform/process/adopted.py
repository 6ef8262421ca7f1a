"""Production that somebody else runs: looked at, never touched."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.recipe import Recipe
from tunewright.domain.tuning import Spare, Target
from tunewright.knobs import readback
from tunewright.platform.process import probe
from tunewright.platform.process.command import Command
from tunewright.platform.process.probe import Health
from tunewright.ports import Clock, PortError, Refused, Replica, TargetPlan, TargetStatus

_ONLY = "these servers are run by somebody else (target.urls): the winner can only be recommended"


class AdoptedTarget:
    """Implements `ports.Target` for `target.urls`. The baseline is what `spare.command` says of them."""

    def __init__(self, target: Target, spare: Spare, clock: Clock) -> None:
        if not target.urls:
            raise Refused("target.urls names no servers")
        self._urls = tuple(url.rstrip("/") for url in target.urls)
        self._clock = clock
        self._command = Command(spare.command, {**target.environment, **spare.environment}, target.api_key_file)
        self._since: dict[str, tuple[bool, float]] = {}

    def describe(self) -> str:
        """For people: what it is and where clients reach it."""
        return f"{len(self._urls)} servers that somebody else runs: {', '.join(self._urls)}"

    def baseline(self) -> Candidate:
        """The knobs of `spare.command`. Raises `Refused` when a server reports to be run otherwise."""
        candidate = self._command.baseline
        for url in self._urls:
            differences = self._differences(url, candidate)
            if differences:
                raise Refused(
                    f"{url} does not run what spare.command says: {'; '.join(differences)}. "
                    "Write production's own flags into spare.command: it is the baseline"
                )
        return candidate

    def beside_knobs(self) -> str:
        """Empty: running servers don't tell it."""
        return ""

    def observe(self) -> TargetStatus:
        """Production as it is; changes nothing."""
        replicas = [self._replica(url) for url in self._urls]
        down = [replica.name for replica in replicas if not replica.ready]
        return TargetStatus(
            replicas=replicas,
            desired=len(replicas),
            settled=not down,
            detail=f"not healthy: {', '.join(down)}" if down else f"{len(replicas)} servers healthy",
        )

    def preflight(self, candidate: Candidate) -> Sequence[str]:
        """Always one reason: nothing here is ours to change."""
        return [_ONLY, *self._command.problems(candidate)]

    def notes(self, candidate: Candidate) -> Sequence[str]:  # noqa: ARG002
        """Nothing: the recommendation is all that there is to know."""
        return ()

    def apply(self, plan: TargetPlan) -> TargetStatus:
        """Raises `Refused`."""
        raise Refused(f"{_ONLY}; {len(self._urls)} servers stay at {plan.baseline.hash}")

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
        """`host:port` of every server to its labels."""
        return {urlsplit(url).netloc: {"role": "stable", "server": url} for url in self._urls}

    def _replica(self, url: str) -> Replica:
        ready = probe.health(url) is Health.OK
        try:
            version = probe.version(url) if ready else None
        except PortError:
            version = None
        was, since = self._since.get(url, (None, 0.0))
        if was is not ready:
            since = self._clock.now()
            self._since[url] = (ready, since)
        return Replica(
            name=url,
            candidate_hash=None,  # it can be compared in part only
            ready=ready,
            canary=False,
            labels={"instance": urlsplit(url).netloc},
            since=since,
            version=version,
        )

    def _differences(self, url: str, candidate: Candidate) -> list[str]:
        """What the metrics contradict; their few labels are all that a running server tells from outside."""
        reported: Mapping[str, KnobValue] = readback.effective("", probe.cache_config(url))
        return list(readback.compare(candidate, reported)[0])
