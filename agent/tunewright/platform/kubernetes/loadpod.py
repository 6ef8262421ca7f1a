"""The load test as a pod of its own: never in the controller, and never beside the server under test by chance."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tunewright.domain.load import LoadFile
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import AlreadyExists, KubeError, NotFound
from tunewright.kube.resources import CONFIG_MAPS, PODS
from tunewright.kube.times import parse_time
from tunewright.loadtest.job import LoadJob
from tunewright.platform.kubernetes import deliver, pods
from tunewright.platform.kubernetes.loadfile import LoadFiles
from tunewright.platform.kubernetes.names import TRIAL_ANNOTATION, Owner, joined
from tunewright.platform.kubernetes.podtemplate import SecretKey
from tunewright.ports import Clock, LoadPhase, LoadRequest, LoadStatus, PortError, Refused

PENDING_LIMIT = 300.0
"""Seconds that a load test's pod may wait for its node and image."""
LOG_LIMIT = 300.0
"""Seconds that the log of one that has ended may be out of reach: with its node, the result is gone."""

_LOAD, _CONTAINER = "load", "load"
_REQUEST, _KEY = "/etc/tunewright/request", "/etc/tunewright/key"
_START_ALLOWANCE = 60
_GONE_LOOKS = 50
_KEPT = 50


@dataclass(frozen=True)
class LoadPodSettings:
    """How the pods of load tests are made. `image` is our own: it must have this very version in it."""

    image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    cpu: str = "1"
    memory: str = "512Mi"
    memory_limit: str = "2Gi"


class KubernetesLoadTest:
    """Implements `ports.LoadTest` for one tuning. `api_key` is mounted from where it lies, never copied."""

    def __init__(
        self,
        kube: Kube,
        owner: Owner,
        namespace: str,
        settings: LoadPodSettings,
        clock: Clock,
        *,
        api_key: Callable[[], SecretKey | None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._kube, self._owner, self._namespace, self._settings = kube, owner, namespace, settings
        self._clock, self._api_key, self._sleep = clock, api_key, sleep
        self._files = LoadFiles(kube, owner, namespace)
        self._ended: dict[str, LoadStatus] = {}
        self._running: dict[str, tuple[float, LoadStatus]] = {}
        self._launched: set[str] = set()
        self._unread: dict[str, float] = {}

    def start(self, run_id: str, request: LoadRequest) -> None:
        """Start it unless it runs or has ended under this id. Raises `PortError` or `Refused`."""
        if run_id in self._ended:
            return
        job, key = LoadJob.of(request), self._api_key()
        if request.api_key_file and key is None:
            raise Refused(
                "the load test needs the servers' API key: let the Deployment take it from a Secret (VLLM_API_KEY by "
                "secretKeyRef), so that the load test's pod can mount it"
            )
        job = job.model_copy(update={"api_key_file": f"{_KEY}/key" if key else None})
        name = self._name(run_id)
        metadata = self._owner.metadata(name, _LOAD, **{TRIAL_ANNOTATION: run_id})
        volumes = _volumes(name, key)
        if request.file is not None:
            volumes.append(_file_volume(self._files.ensure(request.file), request.file))
        data = {"request.json": job.model_dump_json()}
        with suppress(AlreadyExists):
            self._kube.create(CONFIG_MAPS, {"metadata": metadata, "data": data, "immutable": True}, self._namespace)
        with suppress(AlreadyExists):
            self._kube.create(PODS, self._pod(metadata, job, volumes), self._namespace)
        self._launched.add(run_id)

    def poll(self, run_id: str) -> LoadStatus:
        """How it is. What went wrong, in it or to its pod, is `FAILED` with the reason, never a number."""
        if run_id in self._ended:
            return self._ended[run_id]
        pod = self._get(run_id)
        if pod is None:
            if run_id in self._launched:
                return self._end(run_id, _failed("its pod was deleted by somebody else"))
            return LoadStatus(LoadPhase.ABSENT)
        if pods.phase(pod) in ("Succeeded", "Failed"):
            return self._end(run_id, self._result(run_id, pod))
        outside = pods.taken_away(pod)
        if outside or pods.ending(pod):
            return self._end(run_id, _failed(outside or "its pod is being deleted by somebody else"))
        waited = max(0.0, self._clock.now() - parse_time(pod["metadata"]["creationTimestamp"]))
        waiting = pods.waiting_for(pod, _CONTAINER)
        if waiting is not None:
            if waited > PENDING_LIMIT:
                told = "".join(f"; ConfigMap {name}, which it mounts, is gone" for name in self._missing(pod))
                return self._end(run_id, _failed(f"given up after {waited:.0f} s: {waiting}{told}"))
            return LoadStatus(LoadPhase.RUNNING, waiting)
        limit = pod["spec"]["activeDeadlineSeconds"] + PENDING_LIMIT
        if waited > limit:
            return self._end(run_id, _failed(f"not ended after {waited:.0f} s: its node does not end it"))
        return self._progress(run_id, pod)

    def cancel(self, run_id: str) -> None:
        """End it and forget its result; returns once its pod is gone. Raises `PortError` if that takes too long."""
        self._ended.pop(run_id, None)
        self._running.pop(run_id, None)
        self._unread.pop(run_id, None)
        self._launched.discard(run_id)
        name = self._name(run_id)
        self._kube.delete(CONFIG_MAPS, name, self._namespace)
        for _ in range(_GONE_LOOKS):
            pod = self._get(run_id)
            if pod is None:
                return
            if not pods.ending(pod):
                # One second of grace: the load has nothing to tidy up, and must not go on beside the next test.
                self._kube.delete(PODS, name, self._namespace, grace_seconds=1)
            self._sleep(0.2)
        raise PortError(f"pod {name} of a load test does not end; look at its node")

    # --- making ---

    def _name(self, run_id: str) -> str:
        if not run_id:
            raise Refused("an empty id can't name a load test")
        return joined(self._owner.name, run_id, _LOAD)

    def _pod(self, metadata: Json, job: LoadJob, volumes: list[tuple[Json, str]]) -> Json:
        settings = self._settings
        container: Json = {
            "name": _CONTAINER,
            "image": settings.image,
            "imagePullPolicy": settings.image_pull_policy,
            "command": ["python3", "-m", "tunewright.platform.kubernetes.deliver"],
            "args": [f"{_REQUEST}/request.json"],
            "resources": {
                "requests": {"cpu": settings.cpu, "memory": settings.memory},
                "limits": {"memory": settings.memory_limit},  # no CPU limit: throttling would look like a slow server
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": volume["name"], "mountPath": folder, "readOnly": True} for volume, folder in volumes
            ],
        }
        spec: Json = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            # Also without a controller it comes to its end.
            "activeDeadlineSeconds": int(job.hard_limit) + _START_ALLOWANCE,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [volume for volume, _ in volumes],
        }
        if settings.node_selector:
            spec["nodeSelector"] = dict(settings.node_selector)
        if settings.image_pull_secrets:
            spec["imagePullSecrets"] = [{"name": each} for each in settings.image_pull_secrets]
        return {"metadata": metadata, "spec": spec}

    # --- reading ---

    def _get(self, run_id: str) -> Json | None:
        try:
            pod = self._kube.get(PODS, self._name(run_id), self._namespace)
        except NotFound:
            return None
        if not self._owner.owns(pod):
            raise PortError(f"pod {pods.name_of(pod)} is of an earlier tuning and about to go; it is waited for")
        return pod

    def _missing(self, pod: Json) -> list[str]:
        """The ConfigMaps that it mounts and that are not there: a pod waits for them without a word in its status."""
        found = []
        for volume in pod["spec"]["volumes"]:
            name = (volume.get("configMap") or {}).get("name")
            try:
                if name:
                    self._kube.get(CONFIG_MAPS, name, self._namespace)
            except NotFound:
                found.append(str(name))
        return found

    def _end(self, run_id: str, status: LoadStatus) -> LoadStatus:
        """An end is an end: what was read once is told again, also when the pod is gone by then."""
        self._running.pop(run_id, None)
        self._unread.pop(run_id, None)
        self._ended[run_id] = status
        while len(self._ended) > _KEPT:
            self._ended.pop(next(iter(self._ended)))
        return status

    def _progress(self, run_id: str, pod: Json) -> LoadStatus:
        now = self._clock.monotonic()
        read_at, status = self._running.get(run_id, (-1e9, LoadStatus(LoadPhase.RUNNING, "starting")))
        if now - read_at >= 2.0:
            news = deliver.last_progress(pods.log_of(self._kube, pod, _CONTAINER, lines=5))
            if news is not None:
                status = LoadStatus(LoadPhase.RUNNING, news.detail, progress=news.share, interim=news.interim)
            self._running[run_id] = (now, status)
        return status

    def _result(self, run_id: str, pod: Json) -> LoadStatus:
        end = pods.ended(pod, _CONTAINER)
        how = pods.taken_away(pod) or (
            f"it ended with status {end.code}{f' ({end.reason})' if end.reason else ''}" if end else "it ended"
        )
        try:
            log = self._kube_log(pod)
        except KubeError as error:
            now = self._clock.monotonic()
            if now - self._unread.setdefault(run_id, now) < LOG_LIMIT:
                raise  # that is no end of the test: it is read again
            return _failed(f"{how}, and its log can't be read: {error}")
        try:
            result = deliver.unpack(log)
        except ValueError as error:
            return _failed(f"{how}, and {error}; it wrote: {log[-2000:].strip() or '(nothing)'}")
        if result.measurement is None:
            return LoadStatus(LoadPhase.FAILED, result.failure or "", progress=1.0)
        return LoadStatus(
            LoadPhase.DONE,
            "; ".join(result.notes),
            progress=1.0,
            measurement=result.measurement,
            answers=result.answers,
        )

    def _kube_log(self, pod: Json) -> str:
        """Its whole log; empty when it is gone with its pod."""
        try:
            return self._kube.logs(
                pods.name_of(pod), self._namespace, container=_CONTAINER, tail_lines=20_000, limit_bytes=48 * 2**20
            )
        except NotFound:
            return ""


def _volumes(request: str, key: SecretKey | None) -> list[tuple[Json, str]]:
    """What every load test's pod mounts, each with the folder where."""
    found: list[tuple[Json, str]] = [({"name": "request", "configMap": {"name": request}}, _REQUEST)]
    if key is not None:
        items = [{"key": key.key, "path": "key"}]
        found.append(({"name": "key", "secret": {"secretName": key.secret, "items": items}}, _KEY))
    return found


def _file_volume(config_map: str, file: LoadFile) -> tuple[Json, str]:
    path = PurePosixPath(file.path)
    items = [{"key": file.key, "path": path.name}]
    return {"name": "file", "configMap": {"name": config_map, "items": items}}, str(path.parent)


def _failed(reason: str) -> LoadStatus:
    return LoadStatus(LoadPhase.FAILED, reason)
