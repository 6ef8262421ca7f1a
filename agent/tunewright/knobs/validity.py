"""Combinations that vLLM would refuse at start, told without starting it.

Only what vLLM refuses is a problem here: a mere waste is none, because production's own configuration is judged too.
"""

from collections.abc import Callable

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.knobs.catalogue import CATALOGUE, near
from tunewright.knobs.facts import ModelFacts, default_value

_DRAFT_ON_THE_HOST = ("ngram", "suffix", "medusa", "mlp_speculator")
"""Methods that need a step's tokens on the host before the next is scheduled."""

Rule = Callable[["_View"], str | None]


class _View:
    """A candidate's values as rules ask for them."""

    def __init__(self, candidate: Candidate, facts: ModelFacts) -> None:
        self.values, self.facts = candidate.values, facts

    def number(self, name: str) -> int | None:
        """The value that is set explicitly."""
        value = self.values.get(name)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def effective(self, name: str) -> KnobValue | None:
        """The value that is set, else the default as far as it is known."""
        value = self.values.get(name)
        if value is not None:
            return value
        nominal = CATALOGUE[name].nominal
        return nominal if nominal is not None else default_value(name, self.facts)

    def size(self, name: str) -> int:
        """A parallel size, 1 when it is not set."""
        return self.number(name) or 1

    @property
    def depth(self) -> int:
        """Tokens of speculation."""
        return self.number("num_speculative_tokens") or 0

    @property
    def method(self) -> str:
        """Method of speculation, empty when there is none."""
        return str(self.values.get("speculative_method") or "")

    @property
    def context(self) -> int | None:
        """The longest request."""
        length = self.number("max_model_len")
        return length if length is not None and length > 0 else self.facts.context_length


def problems(candidate: Candidate, facts: ModelFacts) -> list[str]:
    """Why vLLM would refuse this candidate, for people; empty when nothing is known against it."""
    found = [text for name, value in candidate.values.items() if (text := _value_problem(name, value, facts))]
    if found:
        return found
    view = _View(candidate, facts)
    return [text for rule in RULES if (text := rule(view))]


def _value_problem(name: str, value: KnobValue, facts: ModelFacts) -> str | None:
    knob = CATALOGUE.get(name)
    if knob is None:
        likely = near(name)
        return f"{name} is no knob" + (f"; did you mean {' or '.join(likely)}?" if likely else "")
    if (knob.kind == "bool") != isinstance(value, bool):
        return f"{name} is {value!r}, which is not {'true or false' if knob.kind == 'bool' else 'a value of it'}"
    if knob.kind in ("int", "float") and isinstance(value, str):
        return f"{name} is {value!r}, which is not a number"
    if not knob.available(facts.vllm_version):
        return f"{name} ({knob.where}) is not in vLLM {facts.vllm_version}"
    if facts.flags is not None and not facts.flags.takes(knob, value):
        return f"{name} ({knob.where}) {value} is not taken by this vLLM, as its own --help=all says"
    try:
        knob.parse(knob.format(value))
    except ValueError as error:
        return str(error)
    return None


def _batch_below_seqs(view: _View) -> str | None:
    batch, seqs = view.number("max_num_batched_tokens"), view.number("max_num_seqs")
    if batch is not None and seqs is not None and batch < seqs:
        return f"max_num_batched_tokens ({batch}) must be at least max_num_seqs ({seqs})"
    return None


def _batch_below_length(view: _View) -> str | None:
    batch, length = view.number("max_num_batched_tokens"), view.context
    if view.values.get("enable_chunked_prefill") is not False or batch is None or length is None or batch >= length:
        return None
    return f"without chunked prefill max_num_batched_tokens ({batch}) must be at least max_model_len ({length})"


def _tensor_parallel(view: _View) -> str | None:
    size, heads = view.size("tensor_parallel_size"), view.facts.attention_heads
    if heads and heads % size:
        return f"tensor_parallel_size {size} does not divide the model's {heads} attention heads"
    return None


def _pipeline_parallel(view: _View) -> str | None:
    size, layers = view.size("pipeline_parallel_size"), view.facts.layers
    if layers and size > layers:
        return f"pipeline_parallel_size {size} is more than the model's {layers} layers"
    return None


def _gpus(view: _View) -> str | None:
    sizes = [view.size(f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data")]
    wanted, there = sizes[0] * sizes[1] * sizes[2], view.facts.gpu_count
    if there and wanted > there:
        return f"tp × pp × dp = {' × '.join(map(str, sizes))} needs {wanted} GPUs, and there are {there}"
    return None


def _expert_parallel(view: _View) -> str | None:
    if view.values.get("enable_expert_parallel") is True and view.facts.experts == 0:
        return "enable_expert_parallel needs a model with experts"
    return None


def _speculation_method(view: _View) -> str | None:
    if view.depth and not view.method:
        return f"num_speculative_tokens {view.depth} needs a speculative_method"
    return None


def _mtp(view: _View) -> str | None:
    layers, depth = view.facts.mtp_layers, view.depth
    if not (view.method == "mtp" or view.method.endswith("_mtp")) or view.values.get("num_speculative_tokens") == 0:
        return None
    if layers == 0:
        return "speculative_method mtp needs a model with multi-token-prediction layers, and this one has none"
    if layers and depth > layers and depth % layers:
        return f"num_speculative_tokens ({depth}) must be divisible by the model's {layers} MTP layers"
    return None


def _speculation_slots(view: _View) -> str | None:
    batch, depth = view.number("max_num_batched_tokens"), view.depth
    if batch is None or not depth:
        return None
    if batch < 1 + depth:
        return f"max_num_batched_tokens ({batch}) has no slots for one token and {depth} drafted ones"
    seqs = view.effective("max_num_seqs")
    # A draft model takes one slot of the batch per request; the other methods draft outside of it.
    if view.method == "draft_model" and isinstance(seqs, int) and batch <= min(seqs, batch):
        return f"max_num_batched_tokens ({batch}) leaves no slots beside those of {seqs} requests' drafts"
    return None


def _speculation_async(view: _View) -> str | None:
    if view.depth and view.method in _DRAFT_ON_THE_HOST and view.values.get("async_scheduling") is True:
        return f"async_scheduling does not go with speculative_method {view.method}; leave it out, and vLLM decides"
    return None


def _rounding_dtype(view: _View) -> str | None:
    if view.values.get("enable_mamba_cache_stochastic_rounding") is True:
        dtype = view.effective("mamba_ssm_cache_dtype")
        if dtype != "float16":
            return f"enable_mamba_cache_stochastic_rounding needs mamba_ssm_cache_dtype float16, not {dtype}"
    return None


def _rounding_backend(view: _View) -> str | None:
    if view.values.get("enable_mamba_cache_stochastic_rounding") is not True:
        return None
    capability = view.facts.compute_capability
    if view.facts.gpu_count == 0:
        return "enable_mamba_cache_stochastic_rounding needs an NVIDIA GPU"
    triton = view.effective("mamba_backend") == "triton"
    if triton and capability is not None and int(capability) != 10:
        return (
            f"enable_mamba_cache_stochastic_rounding with mamba_backend triton needs compute capability 10.0, and this "
            f"GPU has {capability:.1f}; mamba_backend flashinfer works"
        )
    return None


RULES: tuple[Rule, ...] = (
    _batch_below_seqs,
    _batch_below_length,
    _tensor_parallel,
    _pipeline_parallel,
    _gpus,
    _expert_parallel,
    _speculation_method,
    _mtp,
    _speculation_slots,
    _speculation_async,
    _rounding_dtype,
    _rounding_backend,
)
