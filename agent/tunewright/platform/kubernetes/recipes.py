"""What a person, or another tool, would change of a Deployment to run a candidate."""

import yaml

from tunewright.domain.candidate import Candidate
from tunewright.domain.recipe import Recipe
from tunewright.kube.client import Json
from tunewright.kube.resources import DEPLOYMENTS
from tunewright.platform.kubernetes.podtemplate import PodTemplate


def recipe(deployment: Json, template: PodTemplate, candidate: Candidate) -> Recipe:
    """What its container would be given, and by which tool it was made. Raises `Refused`."""
    leaves, metadata = template.leaves(candidate), deployment["metadata"]
    labels = metadata.get("labels") or {}
    # The chart names its Deployments RELEASE-MODEL-deployment-vllm and labels them so.
    release, model = str(labels.get("helm-release-name") or ""), str(labels.get("model") or "")
    stack = model if release and metadata["name"] == f"{release}-{model}-deployment-vllm" else ""
    annotations = metadata.get("annotations") or {}
    return Recipe(
        command=tuple(leaves.get("command") or ()),
        args=tuple(leaves.get("args") or ()),
        environment={entry["name"]: entry["value"] for entry in template.render_env(candidate)},
        namespace=metadata["namespace"],
        deployment=metadata["name"],
        container=template.name,
        helm_release=str(annotations.get("meta.helm.sh/release-name") or release),
        stack_model=stack,
    )


def recommendation(deployment: Json, template: PodTemplate, candidate: Candidate) -> str:
    """The command, and a patch for kubectl or kustomize. Raises `Refused`."""
    leaves, metadata = template.leaves(candidate), deployment["metadata"]
    patch = {
        "apiVersion": DEPLOYMENTS.api_version,
        "kind": DEPLOYMENTS.kind,
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "spec": {"template": {"spec": {"containers": [leaves]}}},
    }
    text = yaml.safe_dump(patch, sort_keys=False, width=120, allow_unicode=True)
    return f"{template.change(template.candidate, candidate)}\nPatch (kustomize, or `kubectl patch -p`):\n{text}"
