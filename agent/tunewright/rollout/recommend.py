"""A recommendation as files for the tool that owns production: kustomize, Helm values, or plain arguments. Pure."""

import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import yaml

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.domain.model import Model
from tunewright.domain.recipe import Recipe
from tunewright.domain.state import TuningRecord
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.knobs.commandline import flag_words, join, split
from tunewright.ports import Refused


class Form(StrEnum):
    """What the recommendation is written for."""

    KUSTOMIZE = "kustomize"
    HELM = "helm"
    ARGS = "args"


class RecommendedFile(Model):
    """One file to write: its name, what is in it, and where it belongs."""

    name: str
    text: str
    where: str


class Recommendation(Model):
    """The winner in the form that was asked for."""

    tuning: str
    candidate: str
    baseline: str
    form: Form
    changes: tuple[str, ...]
    files: tuple[RecommendedFile, ...]


STACK_VALUES = {
    "enable_chunked_prefill": "enableChunkedPrefill",
    "enable_prefix_caching": "enablePrefixCaching",
    "max_model_len": "maxModelLen",
    "dtype": "dtype",
    "tensor_parallel_size": "tensorParallelSize",
    "max_num_seqs": "maxNumSeqs",
    "gpu_memory_utilization": "gpuMemoryUtilization",
}
"""Knobs that have a value of their own in `vllmConfig` of the production-stack chart (0.1); others are `extraArgs`."""


def recommendation(record: TuningRecord, form: Form) -> Recommendation:
    """The winner of a tuning as files. Raises `Refused` where there is none, or where the form does not fit."""
    winner, baseline, recipe = record.winner, record.baseline, record.recipe
    if winner is None or baseline is None or recipe is None:
        raise Refused(f"{record.name} has nothing to recommend: it is {record.phase}, and no winner is known")
    match form:
        case Form.KUSTOMIZE:
            files = _kustomize(record.name, recipe, baseline)
        case Form.HELM:
            files = _helm(record.name, recipe, baseline, winner)
        case Form.ARGS:
            files = [_args(recipe)]
    return Recommendation(
        tuning=record.name,
        candidate=winner.hash,
        baseline=baseline.hash,
        form=form,
        changes=tuple(
            f"{knob}: {_shown(old)} -> {_shown(new)}" for knob, (old, new) in baseline.differences(winner).items()
        ),
        files=tuple(files),
    )


def _kustomize(name: str, recipe: Recipe, baseline: Candidate) -> list[RecommendedFile]:
    if not recipe.deployment:
        raise Refused(f"{name} tunes processes of one machine: there is no Deployment to patch; use --as args")
    patch = f"tunewright-{recipe.deployment}.yaml"
    container: dict[str, Any] = {"name": recipe.container}
    container |= _words(recipe)
    knobs = [CATALOGUE[knob] for knob in baseline.values if knob in CATALOGUE]
    gone = [knob.environment for knob in knobs if knob.environment and knob.environment not in recipe.environment]
    env = _env(recipe.environment)
    env += [{"name": variable, "$patch": "delete"} for variable in gone]
    if env:
        container["env"] = env
    document = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": recipe.deployment, "namespace": recipe.namespace},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    return [
        RecommendedFile(
            name=patch,
            text=_yaml(document),
            where="beside the kustomization.yaml of the overlay that makes this Deployment",
        ),
        RecommendedFile(
            name="kustomization.yaml",
            text=_yaml({"patches": [{"path": patch}]}),
            where="the lines to add to that kustomization.yaml, not a file of its own",
        ),
    ]


def _helm(name: str, recipe: Recipe, baseline: Candidate, winner: Candidate) -> list[RecommendedFile]:
    if not recipe.deployment:
        raise Refused(f"{name} tunes processes of one machine: there is no Helm release; use --as args")
    if recipe.stack_model:
        return [_stack_values(recipe, baseline, winner)]
    release = f"release {recipe.helm_release}" if recipe.helm_release else "your release"
    values = _words(recipe)
    if recipe.environment:
        values["env"] = _env(recipe.environment)
    return [
        RecommendedFile(
            name="values-tunewright.yaml",
            text=_yaml(values),
            where=f"the values of {release}, under the key by which its chart gives container {recipe.container} "
            "its arguments: charts differ, and this one is not known",
        )
    ]


def _stack_values(recipe: Recipe, baseline: Candidate, winner: Candidate) -> RecommendedFile:
    """For vLLM's production-stack chart: its own value where it has one, else a flag in `extraArgs`."""
    typed = {STACK_VALUES[knob]: value for knob, value in winner.values.items() if knob in STACK_VALUES}
    others = Candidate(values={k: v for k, v in winner.values.items() if k not in STACK_VALUES})
    flags, environment = join(split([], {}), others)
    config: dict[str, Any] = dict(typed)
    if flags:
        config["extraArgs"] = flags
    entry: dict[str, Any] = {"name": recipe.stack_model, "vllmConfig": config}
    if environment:
        entry["env"] = _env(environment)
    gone = [knob for knob in baseline.values if knob not in winner.values]
    out = [STACK_VALUES.get(knob) or _flag(knob) for knob in gone]
    return RecommendedFile(
        name="values-tunewright.yaml",
        text=_yaml({"servingEngineSpec": {"modelSpec": [entry]}}),
        where=f"merge it by hand into the entry {recipe.stack_model} of servingEngineSpec.modelSpec in the values of "
        f"release {recipe.helm_release}: Helm replaces lists whole, so as a file of its own it would drop all else; "
        "keep the other extraArgs of that entry" + (f", and take out {', '.join(out)}" if out else ""),
    )


def _args(recipe: Recipe) -> RecommendedFile:
    if recipe.deployment:
        values = _words(recipe)
        if recipe.environment:
            values["env"] = dict(recipe.environment)
        where = f"container {recipe.container} of Deployment {recipe.namespace}/{recipe.deployment}"
        return RecommendedFile(name="args.yaml", text=_yaml(values), where=where)
    pairs = [f"{variable}={shlex.quote(text)}" for variable, text in recipe.environment.items()]
    text = " ".join([*pairs, *map(shlex.quote, recipe.args)]) + "\n"
    return RecommendedFile(name="command.sh", text=text, where="what starts each server of production")


def _words(recipe: Recipe) -> dict[str, Any]:
    """The container's fields that are set."""
    return {field: list(words) for field in ("command", "args") if (words := getattr(recipe, field))}


def _env(environment: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": variable, "value": text} for variable, text in environment.items()]


def _flag(name: str) -> str:
    knob = CATALOGUE[name]
    return knob.environment or knob.json_flag or flag_words(knob, knob.nominal or 0)[0]


def _shown(value: KnobValue | None) -> str:
    if value is None:
        return "default"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _yaml(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)
