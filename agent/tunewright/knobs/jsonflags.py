"""The flags that carry JSON: `--speculative-config` and `--compilation-config`.

A few of their keys are knobs; the other keys are production's own and are kept as the template.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tunewright.domain.candidate import KnobValue
from tunewright.knobs.catalogue import CATALOGUE

SPECULATION = "--speculative-config"
COMPILATION = "--compilation-config"
ALIASES = {"-sc": SPECULATION, "-cc": COMPILATION, SPECULATION: SPECULATION, COMPILATION: COMPILATION}
SHORTHANDS = {"--spec-method": "method", "--spec-tokens": "num_speculative_tokens", "--spec-model": "model"}
"""Flags of newer versions that stand for one key of `--speculative-config`; both together are refused by vLLM."""

_OF_THE_DRAFTER = frozenset(
    {
        "model", "revision", "code_revision", "quantization", "max_model_len", "draft_tensor_parallel_size",
        "draft_load_config", "prompt_lookup_min", "prompt_lookup_max", "speculative_token_tree",
        "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    }
)  # fmt: skip


def knobs_of(flag: str) -> dict[str, str]:
    """JSON key to knob name, of one JSON flag."""
    return {knob.json_key: knob.name for knob in CATALOGUE.values() if knob.json_flag == flag and knob.json_key}


def contribution(path: str | None, text: str) -> dict[str, Any]:
    """What one argument adds to a flag's JSON: the whole of it, or with `path` (`a.b`) one key inside.

    Raises ValueError when it is no JSON object.
    """
    if path is None:
        value = json.loads(text)
        if isinstance(value, int) and not isinstance(value, bool):
            return {"mode": value}  # `-cc 3` is short for the mode
        if not isinstance(value, dict):
            raise ValueError("is not a JSON object")
        return value
    try:
        leaf: Any = json.loads(text)
    except ValueError:
        leaf = text
    for part in reversed(path.split(".")):
        leaf = {part.removesuffix("+"): [leaf] if part.endswith("+") else leaf}
    return {str(key): value for key, value in leaf.items()}


def merge(base: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `more` laid over it, objects merged and lists joined."""
    result = dict(base)
    for key, value in more.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = merge(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            result[key] = [*old, *value]
        else:
            result[key] = value
    return result


def take_knobs(flag: str, template: Mapping[str, Any]) -> dict[str, KnobValue]:
    """The knobs in a flag's JSON. Raises ValueError for a value that is none.

    A depth of speculation of 0 means none at all, which vLLM's own flag can't say: what stands beside it is kept for
    when a depth is tried.
    """
    values: dict[str, KnobValue] = {}
    for key, name in knobs_of(flag).items():
        if template.get(key) is not None:
            values[name] = CATALOGUE[name].parse(re.sub(r"^CUDAGraphMode\.", "", str(template[key])))
    if off(flag, template):
        return {}
    if flag == SPECULATION and template and "speculative_method" not in values:
        values["speculative_method"] = "auto"  # vLLM tells the method from the drafter's model
    return values


def off(flag: str, template: Mapping[str, Any]) -> bool:
    """Whether a flag stands in the command to be left out as it is, and only to be put in with other values."""
    return flag == SPECULATION and template.get("num_speculative_tokens") == 0


def render(flag: str, template: Mapping[str, Any], values: Mapping[str, KnobValue]) -> str | None:
    """The flag's JSON with these knobs; None when the flag is to be left out."""
    document = dict(template)
    if flag == SPECULATION:
        method, depth = values.get("speculative_method"), values.get("num_speculative_tokens")
        if not method or depth == 0:
            return None
        document = _for_method(document, str(method))
        document = _for_depth(document, int(depth) if depth is not None else None)
    for key, name in knobs_of(flag).items():
        if name in values and not (name == "speculative_method" and values[name] == "auto"):
            document[key] = values[name]
        else:
            document.pop(key, None)
    return json.dumps(document, separators=(",", ":")) if document else None


def _for_method(document: dict[str, Any], method: str) -> dict[str, Any]:
    """Without what belongs to another drafter than `method`."""
    if document.get("method", "auto") == method:
        return document
    foreign = _OF_THE_DRAFTER
    if document.get("rejection_sample_method") == "synthetic":  # made-up rates of one drafter say nothing of another
        foreign = foreign | {"rejection_sample_method", "synthetic_acceptance_rates"}
    return {key: value for key, value in document.items() if key not in foreign}


def _for_depth(document: dict[str, Any], depth: int | None) -> dict[str, Any]:
    """Synthetic acceptance has one rate per drafted token: cut it, or let it go on falling as it did."""
    rates = document.get("synthetic_acceptance_rates")
    if not isinstance(rates, list) or not rates or depth is None:
        return document
    longer = [float(rate) for rate in rates]
    ratio = longer[-1] / longer[-2] if len(longer) > 1 and longer[-2] else longer[-1]
    while len(longer) < depth:
        longer.append(round(longer[-1] * min(1.0, ratio), 6))
    kept: list[Any] = list(rates[:depth])
    return {**document, "synthetic_acceptance_rates": [*kept, *longer[len(kept) : depth]]}
