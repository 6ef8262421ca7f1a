"""The CRDs, generated from the models: `python -m tunewright.kube.crds [--check] [--out deploy/crds]`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from tunewright.domain.phases import Phase
from tunewright.domain.state import FailureKind, TrialOutcome, TrialPhase, TrialPurpose
from tunewright.domain.tuning import Metadata, TuningSpec
from tunewright.kube.resources import GROUP, TRIALS, TUNINGS, Resource
from tunewright.kube.schema import Schema, structural

MAX_BYTES = 250 * 1024
"""`kubectl apply` keeps the whole object in an annotation, which may hold 256 KiB."""

_HEADER = "# Generated from the models by `make generate`: do not edit.\n"


def documents() -> dict[str, dict[str, Any]]:
    """Each CRD by its file's name."""
    return {
        f"{GROUP}_tunings.yaml": _crd(
            TUNINGS,
            short_names=["tune"],
            categories=["all"],
            description="A tuning: finds the vLLM configuration that serves this traffic best, and promotes it safely.",
            spec=structural(TuningSpec),
            status=_tuning_status(),
            columns=[
                _column("Phase", ".status.phase", "Where the tuning is."),
                _column("Best", ".status.best", "Best value of the objective that meets the SLO."),
                _column("Gain", ".status.gain", "Gain over the baseline, from fresh starts in turns alone."),
                _column("Trials", ".status.trials", "Trials of the search that are done, of those budgeted."),
                _column("Approval", ".status.approval", "Whether somebody has to decide, or has."),
                _column("Target", ".status.target", "What is tuned.", wide=True),
                _column("Reason", ".status.sentence", "Why it is where it is.", wide=True),
                _column("Age", ".metadata.creationTimestamp", "Time since it was created.", type="date"),
            ],
        ),
        f"{GROUP}_trials.yaml": _crd(
            TRIALS,
            short_names=[],
            categories=[],
            description="One trial of a tuning, written by the controller; it goes with its tuning.",
            spec=_trial_spec(),
            status=_trial_status(),
            columns=[
                _column("Purpose", ".spec.purpose", "Why it was run."),
                _column("Phase", ".status.phase", "Where the trial is."),
                _column("Outcome", ".status.outcome", "How it ended."),
                _column("Objective", ".status.objective", "The objective; larger is better."),
                _column("Failure", ".status.failure", "Why it failed."),
                _column("Cause", ".status.cause", "What the server's log says of it.", wide=True),
                _column("Age", ".metadata.creationTimestamp", "Time since it was created.", type="date"),
            ],
        ),
    }


def render() -> dict[str, str]:
    """The text of each file. Raises `ValueError` when one is too large to be applied."""
    files = {}
    for name, document in documents().items():
        text = _HEADER + yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)
        if len(text.encode()) > MAX_BYTES:
            raise ValueError(f"{name} has {len(text.encode())} bytes, above {MAX_BYTES}: kubectl can't apply it")
        files[name] = text
    return files


def main(arguments: list[str] | None = None) -> int:
    """Write the files; with `--check`, say which are not as the models have them (exit status 1)."""
    parser = argparse.ArgumentParser(prog="python -m tunewright.kube.crds", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a file is not as generated")
    parser.add_argument("--out", type=Path, default=Path("deploy/crds"), help="folder of the files")
    options = parser.parse_args(arguments)
    stale = []
    for name, text in render().items():
        path = options.out / name
        if options.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(str(path))
            continue
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if stale:
        print(f"not as the models have it: {', '.join(stale)}; run `make generate`", file=sys.stderr)
    return 1 if stale else 0


def _crd(
    resource: Resource,
    *,
    short_names: list[str],
    categories: list[str],
    description: str,
    spec: Schema,
    status: Schema,
    columns: list[dict[str, Any]],
) -> dict[str, Any]:
    names: dict[str, Any] = {
        "plural": resource.plural,
        "singular": resource.kind.lower(),
        "kind": resource.kind,
        "listKind": f"{resource.kind}List",
    }
    names |= {"shortNames": short_names} if short_names else {}
    names |= {"categories": categories} if categories else {}
    named = Metadata.model_json_schema()["properties"]["name"] if resource is TUNINGS else {}
    schema = {
        "description": description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # Only name and generateName may be restricted here; what pods and labels carry must fit in 63 characters.
            "metadata": {"type": "object"}
            | ({"properties": {"name": _text(pattern=named["pattern"])}} if named else {}),
            "spec": spec,
            "status": status,
        },
    }
    version = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{resource.plural}.{resource.group}",
            "labels": {"app.kubernetes.io/name": "tunewright", "app.kubernetes.io/part-of": "tunewright"},
        },
        "spec": {
            "group": resource.group,
            "names": names,
            "scope": "Namespaced",
            "preserveUnknownFields": False,
            "versions": [version],
        },
    }


def _column(name: str, path: str, description: str, *, type: str = "string", wide: bool = False) -> dict[str, Any]:
    column = {"name": name, "type": type, "jsonPath": path, "description": description}
    return column | ({"priority": 1} if wide else {})


def _text(description: str = "", **more: Any) -> Schema:
    return {"type": "string"} | ({"description": description} if description else {}) | more


def _number(description: str, kind: str = "number") -> Schema:
    return {"type": kind, "description": description} | ({"format": "int64"} if kind == "integer" else {})


def _object(properties: Schema, description: str = "", required: list[str] | None = None) -> Schema:
    found: Schema = {"type": "object"} | ({"description": description} if description else {})
    return found | {"properties": properties} | ({"required": required} if required else {})


_RECORD = "The whole record: JSON, gzip, base64 (`base64 -d | gunzip`). The other fields are made from it."


def _tuning_status() -> Schema:
    condition = _object(
        {
            "type": _text("The condition's name."),
            "status": _text("Whether it holds.", enum=["True", "False", "Unknown"]),
            "observedGeneration": _number("The generation of the spec that this is about.", "integer"),
            "lastTransitionTime": _text("When `status` changed.", format="date-time"),
            "reason": _text("Why, in one word for programs.", pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"),
            "message": _text("Why, in a sentence for people."),
        },
        required=["type", "status", "lastTransitionTime", "reason", "message"],
    )
    decision = _object(
        {
            "id": _text("Names the decision, so that it is kept once."),
            "action": _text("What was decided."),
            "at": _number("When, in seconds since the epoch."),
            "by": _text("Who decided."),
            "reason": _text("Why."),
            "candidate": _text("Hash of the candidate that was decided on."),
            "spec": _text("Hash of the spec at that moment."),
            "baseline": _text("Hash of the baseline at that moment."),
            "values": {
                "type": "object",
                "description": "Of a candidate that was asked for: its knobs.",
                "additionalProperties": {"type": "string"},
            },
        },
        required=["action", "at", "by"],
    )
    return _object(
        {
            "observedGeneration": _number("The generation of the spec that the status is about.", "integer"),
            "phase": _text("Where the tuning is.", enum=[phase.value for phase in Phase]),
            "sentence": _text("Why it is there, and what comes next."),
            "target": _text("What is tuned."),
            "best": _text("Best value of the objective that meets the SLO."),
            "gain": _text("Gain over the baseline, from fresh starts in turns alone."),
            "trials": _text("Trials of the search that are done, of those budgeted."),
            "approval": _text("Whether somebody has to decide, or has, and who."),
            "candidate": _text("Hash of the winner: a decision names it."),
            "baseline": _text("Hash of the baseline: a decision names it."),
            "specHash": _text("Hash of what results depend on: a decision names it."),
            "conditions": {
                "type": "array",
                "description": "What holds of the tuning now.",
                "items": condition,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
            "decisions": {
                "type": "array",
                "description": "Every decision ever taken on this tuning, oldest first.",
                "items": decision,
                "x-kubernetes-list-type": "atomic",
            },
            "version": _number("Counts writes of the record.", "integer"),
            "told": _number("Phase changes that have their Event.", "integer"),
            "record": _text(_RECORD),
        },
        "Written by the controller alone.",
    )


def _trial_spec() -> Schema:
    return _object(
        {
            "id": _text("The trial's id within its tuning."),
            "number": _number("Counts the tuning's trials.", "integer"),
            "purpose": _text("Why it was run.", enum=[purpose.value for purpose in TrialPurpose]),
            "round": _number("Confirming round, from 1; 0 elsewhere.", "integer"),
            "reason": _text("Why this candidate was proposed."),
            "candidate": {
                "type": "object",
                "description": "The knobs that it sets.",
                # A knob's value may be text, a number or a boolean, which no single type says.
                "additionalProperties": {"x-kubernetes-preserve-unknown-fields": True},
            },
        },
        "What is tried.",
        required=["id", "number", "purpose"],
    )


def _trial_status() -> Schema:
    return _object(
        {
            "phase": _text("Where the trial is.", enum=[phase.value for phase in TrialPhase]),
            "outcome": _text("How it ended.", enum=[outcome.value for outcome in TrialOutcome]),
            "objective": _text("The objective; larger is better."),
            "failure": _text("Why it failed.", enum=[kind.value for kind in FailureKind]),
            "cause": _text("What the server's log says of it."),
            "record": _text(_RECORD),
        },
        "Written by the controller alone.",
    )


if __name__ == "__main__":
    sys.exit(main())
