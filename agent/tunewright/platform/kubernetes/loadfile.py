"""What load tests read of a user's ConfigMap: checked once, and copied, so that every trial reads the same.

The copy is immutable and the tuning's own. So an edit of the user's ConfigMap in mid-tuning makes no two trials
measure different things, and no load test's pod waits for a ConfigMap that somebody deleted.
"""

import base64
import hashlib
import threading
from contextlib import suppress

from tunewright.domain.load import Load, LoadFile, LoadSource
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import AlreadyExists, NotFound
from tunewright.kube.resources import CONFIG_MAPS
from tunewright.loadtest.job import LoadFailure
from tunewright.loadtest.trace import parse_trace
from tunewright.platform.kubernetes.names import Owner, joined
from tunewright.ports import PortError, Refused
from tunewright.promptsfile import LOAD, decode_prompts

PROMPTS_KEYS = ("prompts.jsonl", "prompts.jsonl.gz")
TRACE_KEYS = ("trace.jsonl", "trace.csv", "trace.jsonl.gz", "trace.csv.gz")
UNPACKED = 16 << 20
"""Bytes that gzip may hold: all of it is read into the controller's memory once."""

_FILE = "load-file"
_FOLDER = "/etc/tunewright/configmaps"
_PROMPTS = LOAD._replace(size=UNPACKED)
_one_at_a_time = threading.Lock()
"""A large trace takes a hundred megabytes while it is read; tunings that begin together take turns."""


class LoadFiles:
    """Of one tuning. Needs of the API: get, list, create and delete ConfigMaps of its namespace."""

    def __init__(self, kube: Kube, owner: Owner, namespace: str) -> None:
        self._kube, self._owner, self._namespace = kube, owner, namespace

    def keep(self, load: Load) -> LoadFile | None:
        """Check what `load` names, and copy it; None where that is no ConfigMap. Safe to repeat.

        Raises `PortError` while there is no such ConfigMap, which may yet come: applied together, it may come second.
        Raises `Refused` for what is wrong with it.
        """
        source = load.source
        if source is None or source.config_map is None:
            return None
        name, field = source.config_map, f"load.{source.field}"
        keys = PROMPTS_KEYS if source.recording is None else TRACE_KEYS
        try:
            held = _contents(self._kube.get(CONFIG_MAPS, name, self._namespace))
        except NotFound:
            raise PortError(
                f"{field}: there is no ConfigMap {name} in namespace {self._namespace}; it is waited for: "
                f"`kubectl create configmap {name} -n {self._namespace} --from-file={keys[0]}`"
            ) from None
        found = [key for key in keys if key in held]
        if len(found) != 1:
            has = f"has {' and '.join(found)}: leave one of them" if found else f"has no key {' or '.join(keys)}"
            raise Refused(f"{field}: ConfigMap {name} {has}")
        (key,) = found
        with _one_at_a_time:
            summary = _summary(source, f"{name}/{key}", held[key], field)
        digest = hashlib.sha256(held[key]).hexdigest()
        kept = LoadFile(
            config_map=name,
            key=key,
            digest=digest,
            path=f"{_FOLDER}/{name}/{key}",
            told=f"{key} of ConfigMap {name}: {summary}, sha256 {digest[:12]}",
        )
        self._copy(kept, held[key])
        self._drop_others(kept)
        return kept

    def ensure(self, file: LoadFile) -> str:
        """The name of the ConfigMap to mount; made again where somebody deleted it. Raises `PortError` or `Refused`."""
        name = self._name(file)
        try:
            found = self._kube.get(CONFIG_MAPS, name, self._namespace)
        except NotFound:
            self._copy_again(file, name)
            return name
        self._check_owner(found)
        if hashlib.sha256(_contents(found).get(file.key, b"")).hexdigest() != file.digest:
            raise Refused(f"ConfigMap {name} does not hold what was copied into it, {file.told}: somebody replaced it")
        return name

    def _copy_again(self, file: LoadFile, name: str) -> None:
        held = b""
        with suppress(NotFound):
            original = self._kube.get(CONFIG_MAPS, file.config_map, self._namespace)
            held = _contents(original).get(file.key, b"")
        if hashlib.sha256(held).hexdigest() != file.digest:
            raise Refused(
                f"somebody deleted ConfigMap {name}, which held what the load tests read ({file.told}), and that is no "
                f"longer in ConfigMap {file.config_map}: further trials would not compare with those before"
            )
        self._copy(file, held)

    def _copy(self, file: LoadFile, content: bytes) -> None:
        name = self._name(file)
        data = {file.key: base64.b64encode(content).decode()}
        body = {"metadata": self._owner.metadata(name, _FILE), "binaryData": data, "immutable": True}
        try:
            self._kube.create(CONFIG_MAPS, body, self._namespace)
        except AlreadyExists:
            self._check_owner(self._kube.get(CONFIG_MAPS, name, self._namespace))

    def _check_owner(self, found: Json) -> None:
        if not self._owner.owns(found):
            name = found["metadata"]["name"]
            raise PortError(f"ConfigMap {name} is of an earlier tuning and about to go; it is waited for")

    def _drop_others(self, file: LoadFile) -> None:
        """Those of contents before: nothing reads them any more."""
        mine = self._owner.selector(_FILE)
        for each in self._kube.list(CONFIG_MAPS, self._namespace, labels=mine, metadata_only=True).items:
            if each["metadata"]["name"] != self._name(file) and self._owner.owns(each):
                self._kube.delete(CONFIG_MAPS, each["metadata"]["name"], self._namespace)

    def _name(self, file: LoadFile) -> str:
        return joined(self._owner.name, _FILE, file.digest[:10])


def _contents(config_map: Json) -> dict[str, bytes]:
    """What it holds by key; where text and bytes have the same key, Kubernetes refuses them."""
    found = {key: str(text).encode() for key, text in (config_map.get("data") or {}).items()}
    return found | {key: base64.b64decode(packed) for key, packed in (config_map.get("binaryData") or {}).items()}


def _summary(source: LoadSource, where: str, content: bytes, field: str) -> str:
    """How much it is. Raises `Refused` with the lines that are wrong."""
    if source.recording is None:
        return f"{len(decode_prompts(content, f'{field}: {where}', _PROMPTS))} prompts"
    try:
        return parse_trace(content, where, source.recording.format, most=UNPACKED).summary
    except LoadFailure as failure:
        raise Refused(f"{field}: {failure}") from failure
