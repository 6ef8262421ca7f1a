"""Production as a Deployment: watched by its pods, changed by server-side apply of the leaves that are tuned alone."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tunewright.domain.candidate import Candidate
from tunewright.domain.recipe import Recipe
from tunewright.domain.state import Failure
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import Invalid, KubeConflict
from tunewright.kube.resources import DEPLOYMENTS
from tunewright.platform.kubernetes import pods
from tunewright.platform.kubernetes.canary import Canary, Stays
from tunewright.platform.kubernetes.fields import (
    HOLD_SECONDS,
    Note,
    body,
    last_writer,
    leaves_for,
    own_variables,
    owners,
    strategy_back,
)
from tunewright.platform.kubernetes.names import Owner
from tunewright.platform.kubernetes.podtemplate import PodTemplate, SecretKey
from tunewright.platform.kubernetes.preflight import Preflight
from tunewright.platform.kubernetes.prober import Prober
from tunewright.platform.kubernetes.recipes import recipe, recommendation
from tunewright.platform.kubernetes.routeback import Weighed
from tunewright.platform.kubernetes.routeshare import RouteShare
from tunewright.platform.kubernetes.servers import Server, Servers
from tunewright.platform.kubernetes.steps import Action, Do, Extra, View, decide, settled
from tunewright.platform.kubernetes.workload import DeploymentRef, Overrides
from tunewright.ports import Clock, Refused, TargetPlan, TargetStatus

_LEAVING = (Do.RETIRE, Do.DELETE)


@dataclass(frozen=True)
class _Seen:
    deployment: Json
    template: PodTemplate
    note: Note | None
    servers: Sequence[Server]
    canary: Json | None
    canary_pods: Sequence[Json]
    weighed: Weighed | None  # the route that gives the canary its share


class DeploymentTarget:
    """Implements `ports.Target`. Stateless but for what was proven: another process goes on where this one ended."""

    def __init__(
        self,
        kube: Kube,
        owner: Owner,
        target: DeploymentRef,
        clock: Clock,
        *,
        take_over: bool = False,
        start_timeout: float = 900.0,
        drain_timeout: float = 300.0,
        overrides: Overrides | None = None,
        prober: Prober | None = None,
        hold_seconds: int = HOLD_SECONDS,
        cold_start: Callable[[Candidate], float | None] = lambda _: None,
        longest_answer: Callable[[], float | None] = lambda: None,
        canary_labels: Mapping[str, str] | None = None,
        http_route: str | None = None,
    ) -> None:
        """`overrides` are those of the spare, where the canary runs. Times in seconds; `cold_start` tells how long a
        candidate took to start in its first trial, which probes and deadlines must leave room for; `longest_answer`
        how long answers take, which a replica's grace must leave room for."""
        self._kube, self._owner, self._target = kube, owner, target
        self._take_over, self._hold_seconds = take_over, hold_seconds
        self._prober, overrides = prober or Prober(), overrides or Overrides()
        self._canary = Canary(kube, owner, target, clock, self._prober, overrides, drain_timeout, canary_labels)
        self._servers = Servers(kube, target, self._canary, self._prober, clock, start_timeout)
        self._share = RouteShare(kube, owner, target.namespace, self._canary, http_route, take_over)
        self._preflight = Preflight(
            kube, owner, target, self._canary, self._share, overrides, take_over, cold_start, longest_answer
        )

    # --- the port ---

    def describe(self) -> str:
        """For people: what it is and where clients reach it."""
        deployment = self._target.read(self._kube)
        services = [each["metadata"]["name"] for each in self._canary.services(deployment)]
        where = f"behind Service {', '.join(services)}" if services else "behind no Service"
        shown = self._target.template(deployment).show(self.baseline())
        return f"Deployment {self._target.namespace}/{self._target.name}: {_desired(deployment)} × `{shown}` {where}"

    def baseline(self) -> Candidate:
        """What production is configured to run now. Raises `Refused` for a Deployment that can't be tuned."""
        template = self._target.template(self._target.read(self._kube))
        self._prober.headers(template)
        return template.candidate

    def beside_knobs(self) -> str:
        """Its image, and its command without the knobs."""
        template = self._target.template(self._target.read(self._kube))
        return f"{template.container.get('image')}: `{template.show(Candidate())}`"

    def observe(self) -> TargetStatus:
        """Production as it is; changes nothing."""
        seen = self._see()
        now = seen.template.candidate
        return self._status(seen, TargetPlan(now, now, updated=0))

    def preflight(self, candidate: Candidate) -> Sequence[str]:
        """Why this candidate could not be rolled out, before anything moves; empty when it could."""
        seen = self._see()
        silent = [
            f"{pods.name_of(server.pod)}: {server.trouble}"
            for server in seen.servers
            if server.trouble and not server.canary
        ]
        return [*silent, *self._preflight.obstacles(seen.deployment, seen.template, candidate)]

    def notes(self, candidate: Candidate) -> Sequence[str]:
        """What whoever approves should know: who loses which field, autoscalers, what is not known."""
        deployment = self._target.read(self._kube)
        return self._preflight.notes(deployment, self._target.template(deployment), candidate)

    def apply(self, plan: TargetPlan) -> TargetStatus:
        """Take one idempotent step towards `plan`. The canary gets requests only after a real completion, and is
        drained before it goes; a replica by its readiness probe, and the next one goes after its real completion."""
        if plan.updated < 0:
            raise Refused(f"the plan updates {plan.updated} replicas")
        seen = self._see()
        # The others scale it while we roll: what the plan wants of more replicas than there are, it wants of all.
        held, conflicts, changed = _unknown(seen), "", True
        try:
            if not held:
                try:
                    changed = self._step(seen, plan, fixed=False)
                except Stays as stays:
                    held = str(stays)
            if held:
                changed = self._step(seen, plan, fixed=True)
        except KubeConflict as conflict:
            if not conflict.causes:
                raise
            conflicts = f"fields of Deployment {self._target.name} are owned by others: {'; '.join(owners(conflict))}"
        return self._status(self._see() if changed else seen, plan, conflicts, held)

    def recipe(self, candidate: Candidate) -> Recipe:
        """What the container would be given, and by which tool it was made."""
        deployment = self._target.read(self._kube)
        return recipe(deployment, self._target.template(deployment), candidate)

    def recommend(self, candidate: Candidate) -> str:
        """What a person would change by hand to run `candidate`: the command, and a patch for kubectl or kustomize."""
        deployment = self._target.read(self._kube)
        return recommendation(deployment, self._target.template(deployment), candidate)

    def api_key(self) -> SecretKey | None:
        """Where the servers' API key lies, for the load test's pod to mount; None when they want none."""
        key = self._target.template(self._target.read(self._kube)).api_key
        return key if isinstance(key, SecretKey) else None

    def release(self) -> str | None:
        """For a tuning that ends or was deleted half-way: bring the target back as the note on it says.

        One apply, after which Kubernetes goes on alone. What was done; None when there was nothing to do.
        """
        try:
            seen = self._see()
        except Refused:
            self._share.release(self._canary.find())  # the target may be gone, and its route still there
            raise
        note, back = self._under_way(seen), ""
        if note is not None:  # whatever becomes of the canary
            foreign = self._foreign(seen, (seen.template.candidate.hash,))
            self._give_strategy_back(seen, note)
            self._write(note.ended(), self._as_is(seen, note) if foreign else note.leaves, paused=False, rolling=False)
            back = f"Deployment {self._target.name} goes back to {note.baseline}"
        routed = self._share.release(seen.canary)
        return "; ".join(each for each in (routed, back) if each) or None

    def let_go(self) -> bool:
        """Leave it as somebody else has it: without our strategy, pause and canary. The canary stays where nothing else
        serves, and where its route may send it requests; it goes by a later call, or with the Tuning."""
        seen = self._see()
        note = self._under_way(seen)
        if note is not None:
            leaves = self._as_is(seen, note)
            self._give_strategy_back(seen, note)
            try:
                self._write(note.ended(), leaves, paused=False, rolling=False, force=False)
            except KubeConflict as conflict:
                if not conflict.causes:
                    raise
                # The strategy is theirs too: what we wrote of it falls back when it is left out.
                self._write(note.ended().without_strategy(), leaves, paused=False, rolling=False, force=False)
        others = any(not server.trouble for server in seen.servers if not server.canary)
        serving = any(not server.trouble for server in seen.servers if server.canary)
        with suppress(Stays):
            self._share.give_back(seen.weighed)
            if seen.canary is not None and (others or not serving):
                self._canary.delete(seen.canary)
        return True

    def _under_way(self, seen: _Seen) -> Note | None:
        """The note of our own rollout that is not over."""
        note = seen.note
        return note if note is not None and note.active and note.uid == self._owner.uid else None

    def _as_is(self, seen: _Seen, note: Note) -> Json:
        """The very arguments that are there: an apply of them changes nothing, and conflicts with nobody."""
        return leaves_for(seen.template, seen.template.candidate, note.ended(), self._ours(seen))

    # --- seeing ---

    def _see(self) -> _Seen:
        deployment = self._target.read(self._kube)
        canary, canary_pods = self._canary.find(), self._canary.pods()
        servers = self._servers.see(deployment, canary_pods)
        template, weighed = self._target.template(deployment), self._share.see(canary)
        return _Seen(deployment, template, Note.read(deployment), servers, canary, canary_pods, weighed)

    def _view(self, seen: _Seen, plan: TargetPlan, *, fixed: bool) -> View:
        known = {plan.baseline.hash, plan.candidate.hash}
        ready: dict[str, int] = {}
        for server in seen.servers:
            if not server.canary and not server.trouble and server.candidate:
                ready[server.candidate] = ready.get(server.candidate, 0) + 1
        spec, status = seen.deployment["spec"], seen.deployment.get("status") or {}
        observed = int(status.get("observedGeneration") or 0) >= int(seen.deployment["metadata"]["generation"])
        return View(
            replicas=_desired(seen.deployment),
            template=None if self._foreign(seen, known) else seen.template.candidate.hash,
            observed=observed,
            paused=bool(spec.get("paused")),
            updated=int(status.get("updatedReplicas") or 0) if observed else 0,
            ready=ready,
            under_way=self._under_way(seen) is not None,
            extra=replace(extra, fixed=fixed) if (extra := self._extra(seen)) else None,
        )

    def _extra(self, seen: _Seen) -> Extra | None:
        return self._canary.view(seen.canary, seen.canary_pods)

    def _foreign(self, seen: _Seen, known: Sequence[str] | set[str]) -> str | None:
        """What somebody else changed in the pod template; None when nothing was."""
        now = seen.template.candidate
        if now.hash not in known:
            return (
                f"somebody else changed the arguments of Deployment {self._target.name} to {seen.template.show(now)} "
                f"({last_writer(seen.deployment)}); it is left as it is"
            )
        note = self._under_way(seen)
        if note is not None and note.base != seen.template.base:
            return (
                f"somebody else changed the pod template of Deployment {self._target.name} since the rollout began "
                f"({last_writer(seen.deployment)}); it is left as it is"
            )
        return None

    # --- doing ---

    def _step(self, seen: _Seen, plan: TargetPlan, *, fixed: bool) -> bool:
        """Whether anything was done. With `fixed` the canary and its route are left as they are.

        Raises `Stays` where the canary can't be taken away: then it is to be called again, `fixed`.
        """
        action = decide(self._view(seen, plan, fixed=fixed), plan)
        if fixed:
            return self._take(action, seen, plan)
        if self._route_first(action, seen, plan):
            return True
        acted = self._take(action, seen, plan)
        return (action.do not in _LEAVING and self._let_in(seen, plan)) or acted

    def _take(self, action: Action, seen: _Seen, plan: TargetPlan) -> bool:
        """Whether anything was done."""
        if action.do is Do.EXTRA and action.candidate is not None:
            route = self._share.name if _by_weight(plan, None) else None
            self._canary.create(seen.deployment, seen.template, action.candidate, route=route)
        elif action.do is Do.RETIRE and seen.canary is not None:
            self._canary.retire(seen.canary, seen.deployment, seen.canary_pods)
        elif action.do is Do.KEEP and seen.canary is not None:
            if not _by_weight(plan, seen.canary):  # first: one that serves nobody and is not wanted is deleted
                self._canary.let_in(seen.deployment, seen.canary_pods)
            self._canary.keep(seen.canary)
        elif action.do is Do.DELETE and seen.canary is not None:
            self._canary.delete(seen.canary)
        elif action.do in (Do.WRITE, Do.RESTORE) and action.candidate is not None:
            note = self._note(seen, plan)
            restoring = action.do is Do.RESTORE
            leaves = leaves_for(seen.template, action.candidate, note, self._ours(seen))
            if restoring:
                self._give_strategy_back(seen, note)
            self._write(note.ended() if restoring else note, leaves, paused=action.paused, rolling=not restoring)
        return action.do is not Do.WAIT

    def _route_first(self, action: Action, seen: _Seen, plan: TargetPlan) -> bool:
        """Whether the canary's route needs something before the step may be taken."""
        if seen.weighed is None:
            return False
        if seen.canary is None:  # somebody deleted it under the route
            return self._share.give_back(seen.weighed)
        alive = any(
            s.canary and pods.is_ready(s.pod) and (self._canary.serves(s.pod) or s.answers) for s in seen.servers
        )
        return self._share.before(
            seen.weighed,
            seen.canary,
            seen.deployment,
            seen.canary_pods,
            by_weight=_by_weight(plan, seen.canary),
            leaving=action.do in _LEAVING,
            alive=alive,
        )

    def _note(self, seen: _Seen, plan: TargetPlan) -> Note:
        note = seen.note
        if ours := self._under_way(seen):
            return ours
        if note is not None and note.baseline == plan.baseline.hash != seen.template.candidate.hash:
            return note.again(self._owner, seen.template)
        return Note.of(self._owner, seen.deployment, seen.template)

    def _give_strategy_back(self, seen: _Seen, note: Note) -> None:
        before = strategy_back(seen.deployment, note, self._as_is(seen, note))
        if before is not None:  # undoes what is ours alone: forced, as others may own the value it has again
            self._kube.apply(DEPLOYMENTS, before, self._target.namespace, force=True)

    def _write(self, note: Note, leaves: Json, *, paused: bool, rolling: bool, force: bool = True) -> None:
        whole = body(self._target.name, note, leaves, paused=paused, hold_seconds=self._hold_seconds, rolling=rolling)
        try:
            self._kube.apply(DEPLOYMENTS, whole, self._target.namespace, force=self._take_over and force)
        except Invalid as error:
            raise Refused(f"the API server refuses the change of Deployment {self._target.name}: {error}") from error

    def _let_in(self, seen: _Seen, plan: TargetPlan) -> bool:
        """Give the extra server requests once it has answered, while it is wanted. Whether one may have been given."""
        extra = self._extra(seen)
        if extra is None or extra.retiring or extra.ending:
            return False
        if extra.candidate not in (plan.baseline.hash, plan.candidate.hash):
            return False
        if seen.weighed is not None and seen.canary is not None and _by_weight(plan, seen.canary):
            self._share.let_in(seen.weighed, seen.canary, seen.deployment, seen.canary_pods, plan.canary_share)
        else:
            self._canary.let_in(seen.deployment, seen.canary_pods)
        return True

    def _ours(self, seen: _Seen) -> frozenset[str]:
        return own_variables(seen.deployment, seen.template.name)

    # --- telling ---

    def _status(self, seen: _Seen, plan: TargetPlan, conflict: str = "", held: str = "") -> TargetStatus:
        held = held or _unknown(seen)
        view = self._view(seen, plan, fixed=bool(held))
        known = (plan.baseline.hash, plan.candidate.hash)
        foreign = conflict or self._foreign(seen, known) or held
        if not foreign and seen.weighed is not None:
            by_weight = _by_weight(plan, seen.canary)
            foreign = self._share.foreign(seen.weighed, seen.canary_pods, by_weight=by_weight) or ""
        action = decide(view, plan)
        details = [action.reason] if action.reason else []
        details += [
            f"{pods.name_of(server.pod)}{' (canary)' if server.canary else ''}: {server.trouble}"
            for server in seen.servers
            if server.trouble
        ]
        versions = {
            pods.name_of(s.pod): self._prober.version(s.pod, s.template) for s in seen.servers if s.template is not None
        }
        return TargetStatus(
            replicas=[server.replica(versions.get(pods.name_of(server.pod))) for server in seen.servers],
            desired=view.replicas,
            settled=settled(view, plan) and not conflict,
            detail="; ".join(details),
            failure=self._failure(seen, plan),
            foreign=foreign or None,
        )

    def _failure(self, seen: _Seen, plan: TargetPlan) -> Failure | None:
        """Why a server of the candidate died or can't start, while one is wanted."""
        if (not plan.canary and not plan.updated) or plan.candidate.hash == plan.baseline.hash:
            return None
        for server in seen.servers:
            if server.candidate != plan.candidate.hash:
                continue
            if server.canary and not plan.canary:
                continue  # it goes anyway: how it ends says nothing any more
            failure = self._servers.failure(server)
            if failure is not None:
                return failure.model_copy(update={"cause": f"{pods.name_of(server.pod)}: {failure.cause}"})
        return None


def _desired(deployment: Json) -> int:
    found = deployment["spec"].get("replicas")
    return 1 if found is None else int(found)


def _unknown(seen: _Seen) -> str:
    """Why it is not known whether a route sends the canary requests; empty where it is known."""
    return seen.weighed.unknown if seen.weighed is not None and seen.canary is not None else ""


def _by_weight(plan: TargetPlan, canary: Json | None) -> bool:
    """Whether a route may give the canary its share: while it is judged. For the roll it joins the Service."""
    ending = canary is not None and bool(canary["metadata"].get("deletionTimestamp"))
    return plan.canary and not plan.updated and not ending
