"""A profile: the hardware and the model that the simulator plays, as one YAML file.

All times are seconds, all sizes GiB or bytes as the name says. Unknown or missing keys are refused with
the file and the key named. docs/simulate.md explains each field and states how each shipped profile fits
what was measured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

PROFILES = Path(__file__).with_name("profiles")


class ProfileError(ValueError):
    """The profile file cannot be used; the message names the file and the key."""


@dataclass(frozen=True)
class Model:
    architecture: str
    max_position_embeddings: int
    attention_heads: int
    weights_gib: float
    attention_layers: int
    kv_bytes_per_token_layer: int  # one attention layer, K and V, in the model's own data type
    block_size: int = 16  # tokens in a block; hybrid models derive theirs from the state's size
    hash_block_size: int = 16  # granularity of prefix caching
    mamba_layers: int = 0
    ssm_bytes: int = 0  # float32 state of one sequence in one Mamba layer
    conv_bytes: int = 0
    prefix_caching: bool = True  # vLLM's default for this model
    mean_answer_tokens: float = 0.0  # 0: never ends by itself, as random weights do


@dataclass(frozen=True)
class Hardware:
    device: str  # cuda or cpu
    memory_gib: float
    devices: int = 1
    compute_capability: float = 9.0
    overhead_gib: float = 0.0  # what the runtime itself takes
    activation_gib: float = 0.0
    activation_gib_per_token: float = 0.0  # per token of max_num_batched_tokens
    sequence_gib: float = 0.0  # sampler and metadata, per max_num_seqs * (1 + speculative tokens)
    graphs_gib: float = 0.0  # all graphs up to capture size 512
    unprofiled_gib: float = 0.0  # taken only under load: utilisation that leaves less dies of it


@dataclass(frozen=True)
class Defaults:
    """What vLLM resolves to on this hardware when the flag is left out."""

    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool = True
    max_cudagraph_capture_size: int = 512


@dataclass(frozen=True)
class Cost:
    """Times of one engine step; see cost.py for how they combine."""

    weights_s: float  # reading all weights once: the floor of a step
    token_s: float  # computing one token
    sequence_s: float  # sampling one sequence
    context_s: float  # reading one token of context for one decoding sequence
    host_s: float  # scheduling, and handling the output, of a step
    host_sequence_s: float  # the same, per sequence
    prefill_pair_s: float = 0.0  # attention of one prompt token to one token of context
    expert_share: float = 0.0  # share of the weights that is routed experts
    expert_use: float = 0.0  # share of the experts one token uses
    launch_graph_s: float = 0.0  # CPU time to launch a captured decode step
    launch_piecewise_s: float = 0.0
    launch_eager_s: float = 0.0
    async_s: float = 0.0  # what asynchronous scheduling itself costs per step
    state_s: float = 0.0  # float32 Mamba state of one sequence, read and written
    state_draft_s: float = 0.0  # the same per draft token
    rounding_s: float = 0.0  # stochastic rounding, per sequence and token
    prefix_hash_s: float = 0.0  # host time to hash one prompt token
    mamba_backend: dict[str, float] = field(default_factory=lambda: {"triton": 1.0})
    ssm_dtype: dict[str, float] = field(default_factory=lambda: {"float32": 1.0})
    kv_dtype: dict[str, float] = field(default_factory=lambda: {"auto": 1.0})
    omp_threads: dict[int, float] = field(default_factory=dict)  # OMP_NUM_THREADS -> factor on host times


@dataclass(frozen=True)
class Speculation:
    """One method. `acceptance[i]`: chance that draft i is accepted once the ones before it were."""

    acceptance: list[float]
    draft_s: float = 0.0  # per draft token
    draft_sequence_s: float = 0.0  # per draft token and sequence
    weights_gib: float = 0.0
    attention_layers: int = 0
    n_predict: int = 0  # layers of a multi-token-prediction head; k must be a multiple
    async_scheduling: bool = True


@dataclass(frozen=True)
class Start:
    import_s: float
    load_s: float
    compile_s: float = 0.0  # not with --enforce-eager
    capture_s: float = 0.0  # graphs up to capture size 512
    warmup_requests: int = 0  # requests during which kernels still compile
    warmup_slowdown: float = 0.0  # extra step time at the first of them


@dataclass(frozen=True)
class Noise:
    between: float = 0.0  # standard deviation of a start's own speed
    within: float = 0.0  # of the slow drift within one run
    drift_s: float = 5.0  # time over which the drift forgets
    step: float = 0.0  # of single steps


@dataclass(frozen=True)
class Profile:
    name: str
    description: str
    model: Model
    hardware: Hardware
    defaults: Defaults
    cost: Cost
    start: Start
    noise: Noise
    speculation: dict[str, Speculation]
    lossy_flip: dict[str, float]  # "fp8", "float16", ... -> share of output tokens that change


def _build(kind: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ProfileError(f"{where}: expected a mapping, found {type(data).__name__}")
    hints = get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ProfileError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        if name not in data:
            if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise ProfileError(f"{where}: key {name!r} is missing")
            continue
        values[name] = _value(hints[name], data[name], f"{where}.{name}")
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)  # type: ignore[arg-type]
    if hint == dict[str, Speculation]:
        return {key: _build(Speculation, item, f"{where}.{key}") for key, item in dict(value).items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, bool) and type(value) is not hint:
        raise ProfileError(f"{where}: expected {hint.__name__}, found {value!r}")
    if hint is float:
        raise ProfileError(f"{where}: expected a number, found {value!r}")
    return value


def load(name_or_path: str) -> Profile:
    """Loads a shipped profile by name, or any file by path. Raises ProfileError."""
    import yaml

    path = PROFILES / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        shipped = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise ProfileError(f"profile {name_or_path!r} is neither a file nor one of: {shipped}")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ProfileError(f"{path}: not YAML: {error}") from error
    profile: Profile = _build(Profile, data, path.name)
    return profile
