"""What the target's image and model tell of themselves, asked by a short pod of that image that takes no GPU.

Once per image, command and model: the answer is kept in a ConfigMap that goes with the target's Deployment. Whatever
stands in the way only leaves facts unknown: the search then goes by the catalogue's versions, and its records say why.
"""

import copy
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunewright.domain.candidate import content_hash
from tunewright.knobs import asking, binary
from tunewright.knobs.facts import ModelFacts, from_config
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import AlreadyExists, Forbidden, NotFound
from tunewright.kube.resources import CONFIG_MAPS, DEPLOYMENTS, MANAGED_BY, NODES, PODS
from tunewright.kube.times import parse_time
from tunewright.platform.kubernetes import pods
from tunewright.platform.kubernetes.names import ROLE_LABEL, Owner, joined
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.platform.kubernetes.workload import (
    HOSTNAME,
    DeploymentRef,
    Overrides,
    own_pods,
    tie_to_node,
    tied_node,
)
from tunewright.ports import Clock, PortError, Refused

_log = logging.getLogger(__name__)

LIMIT = 900
"""Seconds for the pod, from its node's image pull to its answer."""
EVERY, SELDOM = 2.0, 60.0
"""Seconds between two looks at it, and at most after errors."""

_FACTS, _ANSWER = "facts", "answer.txt"
_MODULE = ("python3", "-m", "vllm.entrypoints.cli.main", "serve", "--help=all")
_SERVE = ("vllm", "serve", "--help=all")
_LABELS = "nvidia.com/gpu"  # by NVIDIA's GPU feature discovery


class ImageInquiry:
    """Asks for one tuning. `look` is short, and may be called as often as one likes."""

    def __init__(
        self, kube: Kube, owner: Owner, target: DeploymentRef, clock: Clock, overrides: Overrides | None = None
    ) -> None:
        self._kube, self._owner, self._target, self._clock = kube, owner, target, clock
        self._overrides = overrides or Overrides()
        self._facts = ModelFacts(flags_unknown="the image has not answered yet")
        self._next = float("-inf")
        self._errors = 0
        self._done = self._ended = False

    def known(self) -> ModelFacts:
        """What is known by now."""
        return self._facts

    def end(self) -> None:
        """Leave no pod behind once nobody needs the answer any more. Never raises; what fails is tried again."""
        if self._ended:
            return
        try:
            for pod in self._kube.list(PODS, self._target.namespace, labels=self._owner.selector(_FACTS)).items:
                if self._owner.owns(pod) and not pods.ending(pod):
                    self._drop(pod)
            self._ended = True
        except PortError as error:
            _log.warning("%s: the pod that asks its image can't be ended: %s", self._owner.name, error)

    def look(self) -> ModelFacts:
        """What is known by now; takes one step towards knowing more. Never raises."""
        self._ended = False
        now = self._clock.monotonic()
        if not self._done and now >= self._next:
            self._next = now + EVERY
            try:
                self._step()
                self._errors = 0
            except PortError as error:  # worth another try
                self._errors += 1
                self._next = now + min(SELDOM, EVERY * 2**self._errors)
                self._facts = replace(self._facts, flags_unknown=str(error))
            except (Refused, ValueError) as error:
                self._give_up(str(error))
        return self._facts

    def _step(self) -> None:
        deployment = self._target.read(self._kube)
        template = self._target.template(deployment)
        running = own_pods(self._kube, deployment)
        question = _question(template)
        key = content_hash([_digest(template, running), question])
        machine = self._machine(template, running)
        kept = self._kept(key)
        if kept is not None:
            self._read(asking.unpack(kept), machine)
            return
        name = joined(self._owner.name, _FACTS, key)
        try:
            pod = self._kube.get(PODS, name, self._target.namespace)
        except NotFound:
            self._facts = replace(machine, flags_unknown=self._facts.flags_unknown)
            with suppress(AlreadyExists):
                self._kube.create(PODS, self._pod(name, template, question, running), self._target.namespace)
            return
        if not self._owner.owns(pod):
            raise PortError(f"pod {name} is of an earlier tuning and about to go")
        self._follow(pod, template, deployment, key, machine)

    def _follow(self, pod: Json, template: PodTemplate, deployment: Json, key: str, machine: ModelFacts) -> None:
        waited = self._clock.now() - parse_time(pod["metadata"]["creationTimestamp"])
        ended = pods.ended(pod, template.name) is not None or pods.phase(pod) in ("Succeeded", "Failed")
        if not ended and waited <= LIMIT + 60:
            return
        self._facts = machine
        log = pods.log_of(self._kube, pod, template.name)
        try:
            answer = asking.unpack(log)
        except ValueError as error:
            why = pods.taken_away(pod) or pods.waiting_for(pod, template.name) or self._how(pod, template, log)
            self._drop(pod)
            raise ValueError(
                f"the image {template.container.get('image')} could not be asked: {error}; {why}"
            ) from None
        if "text" in (answer.get("help") or {}):  # what went wrong once may go well for the next tuning
            self._keep(key, deployment, answer)
        self._drop(pod)
        self._read(answer, machine)

    @staticmethod
    def _how(pod: Json, template: PodTemplate, log: str) -> str:
        end = pods.ended(pod, template.name)
        told = log.strip().splitlines()
        how = (
            f"it ended with status {end.code} {end.reason} {end.message}".strip() if end else f"not ended in {LIMIT} s"
        )
        return f"{how}: {told[-1]}" if told else how

    def _read(self, answer: Json, machine: ModelFacts) -> None:
        self._facts = facts_of(answer, machine)
        self._done = True
        if self._facts.flags is None:
            _log.warning("%s: the flags of its image are not known: %s", self._owner.name, self._facts.flags_unknown)

    def _give_up(self, why: str) -> None:
        """Not asked again by this controller: what is not known stays so, and the search goes on without."""
        self._facts = replace(self._facts, flags_unknown=why)
        self._done = True
        _log.warning("%s: %s", self._owner.name, why)

    # --- the answer that was given before ---

    def _kept(self, key: str) -> str | None:
        try:
            found = self._kube.get(CONFIG_MAPS, joined(self._target.name, _FACTS, key), self._target.namespace)
        except NotFound:
            return None
        return str((found.get("data") or {}).get(_ANSWER) or "")

    def _keep(self, key: str, deployment: Json, answer: Json) -> None:
        """It belongs to the Deployment: every tuning of it reads the same, and it goes when that goes."""
        metadata = deployment["metadata"]
        owner = {
            "apiVersion": DEPLOYMENTS.api_version,
            "kind": DEPLOYMENTS.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        body = {
            "metadata": {
                "name": joined(self._target.name, _FACTS, key),
                "labels": {**MANAGED_BY, ROLE_LABEL: _FACTS},
                "ownerReferences": [owner],
            },
            "data": {_ANSWER: asking.pack(answer)},
            "immutable": True,
        }
        with suppress(AlreadyExists):
            self._kube.create(CONFIG_MAPS, body, self._target.namespace)

    def _drop(self, pod: Json) -> None:
        self._kube.delete(PODS, pods.name_of(pod), self._target.namespace, uid=pod["metadata"]["uid"])

    # --- asking ---

    def _pod(self, name: str, template: PodTemplate, question: Json, running: Sequence[Json]) -> Json:
        """Production's own pod without its GPUs, sidecars, init containers and Secrets: it reads a help text."""
        spec = copy.deepcopy(template.pod_spec)
        self._overrides.put_on(spec, template.index)
        mine = spec["containers"][template.index]
        kept = ("name", "image", "imagePullPolicy", "securityContext", "workingDir")
        env = [each for each in mine.get("env") or [] if "valueFrom" not in each]
        hidden = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}, {"name": "CUDA_VISIBLE_DEVICES", "value": ""}]
        names = {each["name"] for each in hidden}
        container = {field: mine[field] for field in kept if field in mine} | {
            "command": ["python3", "-c", Path(asking.__file__).read_text(encoding="utf-8"), json.dumps(question)],
            "env": [*(each for each in env if each.get("name") not in names), *hidden],
            "volumeMounts": [{**each, "readOnly": True} for each in mine.get("volumeMounts") or []],
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "8Gi"}},
        }
        spec = {field: value for field, value in spec.items() if field not in ("initContainers", "resourceClaims")}
        spec |= {
            "containers": [container],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIMIT,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
        }
        tie_to_node(spec, tied_node(self._kube, self._target.namespace, spec, running))
        _prefer(spec, sorted({str(pod["spec"]["nodeName"]) for pod in running if pod["spec"].get("nodeName")}))
        return {"metadata": self._owner.metadata(name, _FACTS), "spec": spec}

    def _machine(self, template: PodTemplate, running: Sequence[Json]) -> ModelFacts:
        """GPUs of the spare: how many by its template, which by the labels of the nodes that it may run on."""
        spec = copy.deepcopy(template.pod_spec)
        self._overrides.put_on(spec, template.index)
        gpus = PodTemplate({"spec": spec}, template.name).gpus()
        selector = spec.get("nodeSelector") or {}
        hosts = {pod["spec"].get("nodeName") for pod in running}
        try:
            nodes = [
                each["metadata"].get("labels") or {}
                for each in self._kube.list(NODES).items
                if (each["metadata"].get("labels") or {}).items() >= selector.items()
                and (self._overrides.node_selector or each["metadata"]["name"] in hosts)
            ]
        except Forbidden:  # nodes are read only where an administrator has allowed it
            nodes = []
        count = gpus[1] if gpus is not None else None
        return replace(gpu_of(nodes), gpu_count=count) if gpus is not None and count else ModelFacts(gpu_count=count)


def facts_of(answer: Json, machine: ModelFacts) -> ModelFacts:
    """The facts in an answer, beside what is known of the machine."""
    config, told = answer.get("config"), answer.get("help") or {}
    known = from_config(config, machine) if isinstance(config, dict) else machine
    if "text" not in told:
        return replace(known, flags_unknown=str(told.get("error") or "the image gave no answer"))
    try:
        return replace(known, flags=binary.read_help(str(told["text"])), flags_unknown="")
    except ValueError as error:
        return replace(known, flags_unknown=str(error))


def gpu_of(nodes: Sequence[dict[str, Any]]) -> ModelFacts:
    """GPU facts by the labels of nodes; unknown where they have none, or differ."""
    fields = (f"{_LABELS}.product", f"{_LABELS}.memory", f"{_LABELS}.compute.major", f"{_LABELS}.compute.minor")
    kinds = {tuple(labels.get(field) for field in fields) for labels in nodes}
    if len(kinds) != 1:
        return ModelFacts()
    name, memory, major, minor = kinds.pop()
    if not str(memory).isdigit() or not str(major).isdigit():
        return ModelFacts(gpu_name=name)
    return ModelFacts(
        gpu_name=name,
        gpu_memory_gib=round(int(str(memory)) / 1024, 2),
        compute_capability=float(f"{major}.{minor or 0}"),
    )


def _question(template: PodTemplate) -> Json:
    own = binary.help_command(template.words) or ["serve"]
    # Where `args` begin with `serve`, the program is the image's own entry point: `vllm`.
    commands = [*([own] if own[0] != "serve" else []), _SERVE, _MODULE]
    unique = [list(each) for each in dict.fromkeys(tuple(each) for each in commands)]
    model, folder = template.model_path or "", template.option("--download-dir") or ""
    return {"commands": unique, "timeout": binary.TIMEOUT, "model": model, "download_dir": folder}


def _digest(template: PodTemplate, running: Sequence[Json]) -> str:
    """Names the image by its digest, as the nodes tell it; by its name and the pods' template while they do not."""
    image = str(template.container.get("image"))
    for pod in running:
        status = pods.container_status(pod, template.name) or {}
        same = any(each.get("image") == image for each in pod["spec"]["containers"])
        if same and status.get("imageID"):
            return str(status["imageID"]).rpartition("@")[2]
    return f"{image} {template.base}"


def _prefer(spec: Json, hosts: Sequence[str]) -> None:
    """Nodes that have the image already, where one of them has room."""
    if not hosts:
        return
    wanted = {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": list(hosts)}]}
    affinity = copy.deepcopy(spec.get("affinity") or {})
    node = affinity.setdefault("nodeAffinity", {})
    preferred = node.get("preferredDuringSchedulingIgnoredDuringExecution") or []
    node["preferredDuringSchedulingIgnoredDuringExecution"] = [*preferred, {"weight": 50, "preference": wanted}]
    spec["affinity"] = affinity
