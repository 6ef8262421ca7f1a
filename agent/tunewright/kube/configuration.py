"""Where the API server is and who we are there: a kubeconfig, or the ServiceAccount of the pod we run in."""

import os
from pathlib import Path

from kubernetes.client.configuration import Configuration
from kubernetes.config import ConfigException, kube_config, load_incluster_config

from tunewright.ports import Refused

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def load_configuration(kubeconfig: Path | None = None, context: str | None = None) -> tuple[Configuration, str]:
    """The configuration and the namespace we are in.

    Looked for as kubectl does: the file given, `$KUBECONFIG`, the pod's ServiceAccount, `~/.kube/config`.
    Raises `Refused` saying what is wrong with it.
    """
    configuration = Configuration()
    named = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if not named and (_SERVICE_ACCOUNT / "token").is_file():
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            return configuration, (_SERVICE_ACCOUNT / "namespace").read_text(encoding="ascii").strip() or "default"
        file = str(named) if named else None
        kube_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=file, context=context, client_configuration=configuration, persist_config=False
        )
        contexts, current = kube_config.list_kube_config_contexts(config_file=file)  # type: ignore[no-untyped-call]
        used = next((each for each in contexts if each["name"] == context), current) if context else current
    except (ConfigException, OSError, ValueError) as error:
        where = named or "~/.kube/config (no $KUBECONFIG, no ServiceAccount)"
        raise Refused(
            f"the cluster can't be reached with {where}: {error}; name a working kubeconfig, "
            "which `kubectl --kubeconfig FILE get ns` can check"
        ) from error
    return configuration, used["context"].get("namespace") or "default"
