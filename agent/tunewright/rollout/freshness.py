"""Whether what was found still holds for production as it is now: looked at before anything moves. Pure."""

from collections.abc import Sequence

from tunewright.domain.candidate import Candidate
from tunewright.domain.profile import TrafficProfile
from tunewright.domain.promotion import Analysis, FurtherMetric
from tunewright.domain.state import TrialRecord
from tunewright.domain.step import update
from tunewright.observe import names
from tunewright.observe.drift import drift
from tunewright.ports import SeriesWindow, TargetStatus
from tunewright.rollout.beside import needed


def other_version(status: TargetStatus, winner: Candidate, trials: Sequence[TrialRecord]) -> str:
    """How production's vLLM differs from the one that the winner was measured on; empty when it does not."""
    measured = {t.measurement.vllm_version for t in trials if t.measurement and t.candidate.hash == winner.hash}
    running = {r.version for r in status.replicas if r.version is not None and not r.canary}
    if not measured or running <= measured:
        return ""
    return (
        f"the winner was measured on vLLM {', '.join(sorted(measured))}, but production runs "
        f"{', '.join(sorted(running))}: tune again with the version that serves"
    )


def other_program(measured: str, now: str) -> str:
    """How image, model or another argument differ from what was measured; empty when none does, or it isn't known."""
    if not measured or not now or measured == now:
        return ""
    return f"the winner was measured beside {measured}, but production runs {now}: tune again with what serves"


def blind_spots(server: str, window: SeriesWindow, analysis: Analysis) -> list[str]:
    """What the analysis needs and one stable server does not show: a guard over no series guards nothing."""
    shown = {s.name for s in window.series if s.samples}
    missing = [name for name in needed(analysis) if name not in shown]
    if names.FINISHED in shown:
        reasons = {s.labels.get("finished_reason") for s in window.series if s.name == names.FINISHED and s.samples}
        wanted = ("error", "abort") if FurtherMetric.ABORTED in analysis.required else ("error",)
        missing += [f"{names.FINISHED} with finished_reason {reason}" for reason in wanted if reason not in reasons]
    found = [f"{server} shows no {', '.join(missing)}"] if missing else []
    instances = {s.labels["instance"] for s in window.series if "instance" in s.labels}
    if len(instances) > 1:
        found.append(
            f"the series of {server} are those of {', '.join(sorted(instances))}: metrics.selector is too wide"
        )
    return found


def other_traffic(learned: TrafficProfile, now: TrafficProfile, limit: float) -> str:
    """How the traffic differs from what the winner was measured with; empty when it does not.

    Less or more of the same traffic is no difference: day and night would never meet, and the canary is judged under
    the load that there is.
    """
    alike = update(now, demand=learned.demand, concurrency=learned.concurrency, saturated=learned.saturated)
    found = drift(learned, alike)
    return f"the traffic is not what the winner was measured with: {found.reason}" if found.value > limit else ""
