"""Which engine steps run without a CUDA graph, by the shape of the traffic.

vLLM captures graphs for batches of up to `max_cudagraph_capture_size` tokens, 512 unless told otherwise. A step decodes
the running requests, with what is drafted for each, and the prompts of those that have just come ride along in it. On
one H200 with a hybrid model of 30B parameters, a decode step of 256 requests took 18 to 25 ms, and one with prompts of
512 tokens beside them 80 to 145 ms: past the graphs, thousands of small kernels are launched one by one from the CPU.
"""

import numpy as np
from scipy.special import pdtrc

from tunewright.domain.profile import TrafficProfile
from tunewright.knobs.facts import ModelFacts
from tunewright.knobs.knob import Family
from tunewright.propose.encoding import Array

CAPTURED = 512
"""Tokens of the largest graph when the flag is not set (vLLM: twice max_num_seqs, but at most this)."""

_ACCEPTED = 0.6  # of the drafted tokens, before any is seen
_SELDOM = 0.05  # of the steps may be larger than what is captured for

SLOWER = {Family.HYBRID: 1.0, Family.MOE: 0.2, Family.DENSE: 0.1}
"""How much longer a step takes without a graph; 1 is twice as long. Seen of a hybrid model alone, whose kernels are
many and small; guessed of the others."""


def launched_singly(
    profile: TrafficProfile, running: Array, depth: Array, captured: Array, mixed_captured: Array, batch: Array
) -> Array:
    """The share of steps that no graph covers, with `running` requests and `depth` drafted tokens for each.

    `captured`: tokens of the largest graph. `mixed_captured`: whether there are graphs for steps with prompts in them
    (none in the mode FULL_DECODE_ONLY). `batch`: max_num_batched_tokens, which cuts prompts into pieces.
    """
    prompt = np.maximum(np.minimum(profile.prompt_tokens_mean, batch), 1.0)
    room = np.floor((captured - running * (1 + depth)) / prompt)
    arriving = _prompts_per_step(profile, running, depth)
    fits = np.where(mixed_captured > 0, np.maximum(room, 0), 0)
    return np.where(room < 0, 1.0, pdtrc(fits, arriving))


def tokens_to_capture(profile: TrafficProfile, running: float, depth: int) -> float | None:
    """Tokens that hardly any step exceeds; None where the traffic's lengths are not known."""
    if profile.prompt_tokens_mean <= 0 or profile.output_tokens_mean <= 0:
        return None
    arriving = float(_prompts_per_step(profile, np.array(running), np.array(depth)))
    prompts = 0
    while prompts < running and pdtrc(prompts, arriving) > _SELDOM:
        prompts += 1
    return running * (1 + depth) + prompts * profile.prompt_tokens_mean


def slower(facts: ModelFacts) -> float:
    """How much longer a step is believed to take without a graph; 0 where nothing is known, or there is no GPU."""
    if facts.gpu_count == 0 or facts.family is None:
        return 0.0
    return SLOWER[facts.family]


def _prompts_per_step(profile: TrafficProfile, running: Array, depth: Array) -> Array:
    """As many come as end, and each runs for as many steps as its output takes."""
    return np.asarray(running * (1 + _ACCEPTED * depth) / max(profile.output_tokens_mean, 1.0))
