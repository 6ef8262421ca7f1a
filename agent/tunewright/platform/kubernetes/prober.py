"""Whether a pod's server really answers: asked of the pod itself, once per container start."""

from collections.abc import Mapping
from pathlib import Path

from tunewright.bounded import read_key
from tunewright.kube.client import Json
from tunewright.platform.kubernetes import pods
from tunewright.platform.kubernetes.podtemplate import PodTemplate
from tunewright.platform.process import probe
from tunewright.ports import PortError, Refused

_REMEMBERED = 500


class Prober:
    """Remembers which containers have completed a token, and what version they are. `api_key_file` is ours to read."""

    def __init__(self, model: str | None = None, api_key_file: str | None = None) -> None:
        self._model = model
        self._api_key_file = api_key_file
        self._proven: dict[str, str | None] = {}

    def headers(self, template: PodTemplate) -> Mapping[str, str]:
        """What a request needs. Raises `Refused` where the key lies in a Secret: those are not ours to read."""
        key = template.api_key
        if isinstance(key, str):
            raise Refused(
                "the servers' API key stands in the Deployment as plain text, and would have to be copied for a load "
                "test: let VLLM_API_KEY come from a Secret (secretKeyRef)"
            )
        if self._api_key_file:
            try:
                return {"Authorization": f"Bearer {read_key(Path(self._api_key_file))}"}
            except OSError as error:
                raise PortError(
                    f"can't read target.apiKeyFile {self._api_key_file}: {error.strerror or error}"
                ) from error
        if key is not None:
            raise Refused(
                f"the servers want an API key that lies in Secret {key.secret}, key {key.key}: mount that Secret into "
                "the controller and name the file in target.apiKeyFile"
            )
        return {}

    def model(self, template: PodTemplate) -> str | None:
        """The served model's name, where it is known without asking."""
        return self._model or template.model

    def unproven(self, pod: Json, template: PodTemplate) -> str | None:
        """Ask it for one token unless it has given one. None once it has; else why not. Raises `Refused`."""
        key, host = _incarnation(pod, template.name), pods.address(pod)
        if key in self._proven:
            return None
        if host is None:
            return "it has no address yet"
        url = f"http://{host}:{template.port}"
        try:
            probe.complete_one_token(url, self.model(template), self.headers(template))
            version = probe.version(url)
        except PortError as error:
            return str(error)
        if len(self._proven) >= _REMEMBERED:
            self._proven.pop(next(iter(self._proven)))
        self._proven[key] = version
        return None

    def version(self, pod: Json, template: PodTemplate) -> str | None:
        """The version of vLLM in a proven pod."""
        return self._proven.get(_incarnation(pod, template.name))


def _incarnation(pod: Json, container: str) -> str:
    return f"{pod['metadata']['uid']}/{pods.restarts(pod, container)}"
