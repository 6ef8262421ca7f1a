"""A pod template as raw JSON: the container that runs vLLM, its knobs, and the same template for another candidate."""

import copy
import re
import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

from tunewright.domain.candidate import Candidate, KnobValue, content_hash
from tunewright.domain.redact import HIDDEN, redact
from tunewright.knobs import commandline
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.kube.client import Json
from tunewright.platform.kubernetes.shellwords import Script, read_script
from tunewright.ports import Refused

_SHELLS = frozenset({"sh", "bash", "dash", "ash"})
_KNOB_VARIABLES = {knob.environment: knob.name for knob in CATALOGUE.values() if knob.environment}
_API_KEY = "VLLM_API_KEY"
_DEFAULT_PORT = 8000
_UNREACHABLE = {
    "--uds": "it listens on a Unix socket, which the load test can't reach",
    "--ssl-keyfile": "it speaks TLS, and its certificate does not name the pod; end TLS before the pods",
    "--ssl-certfile": "it speaks TLS, and its certificate does not name the pod; end TLS before the pods",
}
_MULTI_NODE = ("--nnodes", "--node-rank", "--headless", "--data-parallel-address")


@dataclass(frozen=True)
class SecretKey:
    """One key of a Secret, by reference."""

    secret: str
    key: str


class PodTemplate:
    """Read-only. `container` names the container; left out, the one that runs vLLM is found.

    Raises `Refused` with the reason for a template that can't be tuned.
    """

    def __init__(self, template: Json, container: str | None = None) -> None:
        self._template = template
        containers: list[Json] = template.get("spec", {}).get("containers") or []
        self.index = _find(containers, container)
        self.container = containers[self.index]
        self.name = str(self.container["name"])
        self._command = [str(word) for word in self.container.get("command") or []]
        self._args = [str(word) for word in self.container.get("args") or []]
        self._script = _script(self._command, self._args, self.name)
        self._words = self._script.values if self._script else [*self._command, *self._args]
        for flag in _MULTI_NODE:
            if _option(self._words, flag) is not None:
                raise Refused(f"container {self.name}: {flag} means several nodes for one server; that is not tuned")
        for flag, reason in _UNREACHABLE.items():
            if _option(self._words, flag) is not None:
                raise Refused(f"container {self.name}: {flag}: {reason}")
        if _option(self._words, "--host") in ("127.0.0.1", "localhost", "::1"):
            raise Refused(f"container {self.name}: --host allows only the pod itself to reach it; use 0.0.0.0")
        _check_devices(template.get("spec", {}), self.container)
        self._split = commandline.split(self._words, self._environment())
        if self._command and self._args and self._script is None:
            fixed = commandline.split(self._command, {}).pieces
            if fixed:
                raise Refused(
                    f"container {self.name}: {fixed[0].words[0]} stands in `command` and the rest in `args`; move the "
                    "flags into `args`, so that one field holds them all"
                )

    @property
    def candidate(self) -> Candidate:
        """The knobs that the template itself sets."""
        return self._split.candidate

    @property
    def base(self) -> str:
        """Names all of the pod that is not a knob: equal hash, same server but for its knobs."""
        split, pod = self._split, copy.deepcopy(self._template.get("spec", {}))
        container = pod["containers"][self.index]
        for field in ("args", "command"):
            container.pop(field, None)
        container["env"] = [e for e in container.get("env") or [] if e.get("name") not in _KNOB_VARIABLES]
        return content_hash([pod, list(split.rest), {k: dict(v) for k, v in split.templates.items()}])

    @property
    def port(self) -> int:
        """The port that vLLM listens on in the pod."""
        text = _option(self._words, "--port")
        if text is None:
            return _DEFAULT_PORT
        if not text.isdigit():
            raise Refused(f"container {self.name}: --port {text} is no number; write a plain one")
        return int(text)

    @property
    def model(self) -> str | None:
        """The name under which the model is served, where the command line says it."""
        return _option(self._words, "--served-model-name")

    @property
    def words(self) -> list[str]:
        """The words that run vLLM, as far as the template has them: the image's own entry point is not among them."""
        return list(self._words)

    @property
    def model_path(self) -> str | None:
        """The folder or hub id of the model, as `--model` or the word after `serve` names it."""
        named = _option(self._words, "--model")
        after = [word for before, word in pairwise(["serve", *self._words]) if before == "serve"]
        positional = next((word for word in after if not word.startswith("-") and word != "serve"), None)
        return named or (positional if positional and not positional.startswith("vllm.") else None)

    @property
    def pod_spec(self) -> Json:
        """The pod's spec as it is: not to be changed."""
        spec: Json = self._template.get("spec", {})
        return spec

    def option(self, flag: str) -> str | None:
        """The value of a flag on the command line; None where it is not given."""
        return _option(self._words, flag)

    @property
    def api_key(self) -> str | SecretKey | None:
        """The server's API key: as plain text, or where it lies."""
        plain = _option(self._words, "--api-key")
        if plain:
            return plain
        for entry in self.container.get("env") or []:
            if entry.get("name") == _API_KEY:
                source = (entry.get("valueFrom") or {}).get("secretKeyRef")
                return SecretKey(source["name"], source["key"]) if source else (entry.get("value") or None)
        return None

    def leaves(self, candidate: Candidate, ours: Container[str] = ()) -> Json:
        """Exactly the fields of the container that run `candidate`, as a server-side apply takes them.

        `ours` names the `env` entries that we own already: left out, they would be removed. Raises `Refused`.
        """
        words, environment = commandline.join(self._split, candidate)
        return {"name": self.name, **self._written(words), **self._env_leaf(environment, ours)}

    def render(self, candidate: Candidate) -> Json:
        """A copy of the template that runs `candidate`; all else is carried as it is. Raises `Refused`."""
        words, environment = commandline.join(self._split, candidate)
        rendered = copy.deepcopy(self._template)
        container = rendered["spec"]["containers"][self.index]
        container.update(self._written(words))
        entries = _with_knobs(container.get("env") or [], environment)
        if entries or "env" in container:
            container["env"] = entries
        return rendered

    def render_env(self, candidate: Candidate) -> list[Json]:
        """The `env` entries of knobs that run `candidate`."""
        _, environment = commandline.join(self._split, candidate)
        return _with_knobs([], environment)

    def show(self, candidate: Candidate) -> str:
        """The command for a person, without secrets."""
        words, environment = commandline.join(self._split, candidate)
        knobs = [f"{name}={shlex.quote(environment[name])}" for name in sorted(_KNOB_VARIABLES) if name in environment]
        plain = _option(self._words, "--api-key")
        return redact(" ".join([*knobs, *(HIDDEN if plain and word == plain else shlex.quote(word) for word in words)]))

    def change(self, baseline: Candidate, candidate: Candidate) -> str:
        """What a person would change by hand."""
        differences = baseline.differences(candidate).items()
        changes = [f"  {knob}: {_value(old)} → {_value(new)}" for knob, (old, new) in differences]
        return "\n".join(["Change:", *(changes or ["  nothing"]), "Command:", f"  {self.show(candidate)}"])

    def as_written(self) -> Json:
        """What the container has now in the fields that `leaves` may write."""
        kept: Json = {field: self.container[field] for field in ("command", "args") if field in self.container}
        environment = [{"name": name, "value": text} for name, text in self._environment().items()]
        return {"name": self.name, **kept, **({"env": environment} if environment else {})}

    def gpus(self) -> tuple[str, int] | None:
        """The extended resource that is the container's GPU, and how many it asks for; None when it asks for none."""
        resources = self.container.get("resources") or {}
        asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        for name, quantity in asked.items():
            if ("gpu" in name.lower() or "/mig-" in name.lower()) and "/" in name:
                return name, int(str(quantity))
        return None

    # --- reading and writing the words ---

    def _environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for entry in self.container.get("env") or []:
            name = str(entry.get("name"))
            if name not in _KNOB_VARIABLES:
                continue
            if "valueFrom" in entry:
                raise Refused(
                    f"container {self.name}: the knob {_KNOB_VARIABLES[name]} comes from elsewhere ({name}, "
                    "valueFrom), so it can't be changed; write a plain value into the Deployment"
                )
            found[name] = str(entry.get("value") or "")
        return found

    def _written(self, words: Sequence[str]) -> Json:
        """`command` or `args`: the one field that holds the flags, whole."""
        if self._script is not None:
            script = self._script.with_words(words)
            if len(self._command) > 2:
                return {"command": [*self._command[:2], script, *self._command[3:]]}
            return {"args": [script, *self._args[1:]]}
        if self._command and not self._args:
            return {"command": list(words)}
        return {"args": list(words[len(self._command) :])}

    def _env_leaf(self, environment: Mapping[str, str], ours: Container[str]) -> Json:
        before = self._environment()
        gone = sorted(name for name in before if name not in environment and name not in ours)
        if gone:
            raise Refused(
                f"container {self.name}: the candidate leaves {gone[0]} to its default, but the Deployment sets it, "
                f"and somebody else's entry can't be taken out; name {_KNOB_VARIABLES[gone[0]]} in search.exclude"
            )
        knobs = {name: text for name, text in environment.items() if name in _KNOB_VARIABLES}
        written = [{"name": n, "value": text} for n, text in knobs.items() if before.get(n) != text or n in ours]
        return {"env": written} if written else {}


def _with_knobs(entries: Sequence[Json], environment: Mapping[str, str]) -> list[Json]:
    """The `env` list with the knobs as wanted; every other entry, and its order, as it was."""
    result: list[Json] = []
    left = {name: text for name, text in environment.items() if name in _KNOB_VARIABLES}
    for entry in entries:
        name = entry.get("name")
        if name not in _KNOB_VARIABLES:
            result.append(entry)
        elif name in environment:
            result.append(
                entry if entry.get("value") == environment[name] else {"name": name, "value": environment[name]}
            )
            left.pop(name, None)
    return result + [{"name": name, "value": text} for name, text in left.items()]


def _check_devices(pod: Json, container: Json) -> None:
    """Of dynamic resource allocation: a claim by its own name is one set of devices for all pods that name it."""
    used = {each.get("name") for each in (container.get("resources") or {}).get("claims") or []}
    for claim in pod.get("resourceClaims") or []:
        if claim.get("name") in used and claim.get("resourceClaimName"):
            raise Refused(
                f"container {container['name']} has its devices by the ResourceClaim {claim['resourceClaimName']}: a "
                "trial would run on production's own; give each pod its claim by resourceClaimTemplateName"
            )


def _find(containers: Sequence[Json], name: str | None) -> int:
    names = [str(each.get("name")) for each in containers]
    if name:
        if name not in names:
            raise Refused(f"target.container: there is no container {name}; there are {', '.join(names) or 'none'}")
        return names.index(name)
    running = [index for index, each in enumerate(containers) if _runs_vllm(each)]
    if len(running) == 1:
        return running[0]
    if not running:
        told = f"none of the containers {', '.join(names)} is seen to run vLLM"
        raise Refused(f"{told}, by `vllm serve`, its module or its image; name it: target.container")
    raise Refused(f"{', '.join(names[i] for i in running)} all run vLLM; name the one to tune: target.container")


def _runs_vllm(container: Json) -> bool:
    command = [str(word) for word in container.get("command") or []]
    words = [*command, *(str(word) for word in container.get("args") or [])]
    if any(word.startswith("vllm.entrypoints.") for word in words):
        return True
    for before, word in pairwise(words):
        if word == "serve" and (PurePosixPath(before).name == "vllm" or before == "simulate"):
            return True
    if _is_shell(command):
        return any(re.search(r"\bvllm\s+serve\b|vllm\.entrypoints\.|\bsimulate\s+serve\b", word) for word in words)
    image = str(container.get("image") or "").partition("@")[0]
    return not command and "vllm" in image.rpartition("/")[2].partition(":")[0].lower()


def _is_shell(command: Sequence[str]) -> bool:
    return bool(command) and PurePosixPath(command[0]).name in _SHELLS


def _script(command: Sequence[str], args: Sequence[str], name: str) -> Script | None:
    """The script of `sh -c`, which may stand in `command` or in `args`; None where no shell is used."""
    if not _is_shell(command):
        if command and not any(w == "serve" or w.startswith("vllm.entrypoints.") for w in [*command, *args]):
            told = f"container {name} runs `{redact(' '.join(command))}`, which is not seen to be vLLM"
            raise Refused(f"{told}; only `vllm serve`, vLLM's module, or `sh -c` of one simple command can be tuned")
        return None
    words = [*command, *args]
    flags = words[1:2]
    if not flags or not re.fullmatch(r"-[elx]*c", flags[0]) or len(words) < 3:
        raise Refused(f"container {name} starts a shell, but not as `sh -c COMMAND`; write `command: [vllm, serve, …]`")
    if len(command) == 1 or len(words) > 3:
        raise Refused(f"container {name}: write `command: [sh, -c]` with the one script behind it, or no shell at all")
    try:
        script = read_script(words[2])
    except Refused as refused:
        raise Refused(f"container {name}: {refused}") from None
    values = script.values
    if not any(word == "serve" or word.startswith("vllm.entrypoints.") for word in values):
        raise Refused(f"container {name}: the script of `sh -c` does not run vLLM itself; write the command out")
    return script


def _option(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag; the last one counts. Empty where it has none."""
    found = None
    for index, word in enumerate(words):
        name, equals, attached = word.partition("=")
        if name.replace("_", "-") == flag:
            found = attached if equals else (words[index + 1] if index + 1 < len(words) else "")
    return found


def _value(value: KnobValue | None) -> str:
    if value is None:
        return "default"
    return str(value).lower() if isinstance(value, bool) else str(value)
