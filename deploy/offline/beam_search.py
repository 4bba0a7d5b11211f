"""Beam search over an engine that only samples: each step asks for the likeliest next tokens of every beam.

Beams share their blocks through the prefix cache, so that a step computes the last block of each at most.
Semantics and names are those of vLLM's ``LLM.beam_search``: a beam that ends is kept, and its place goes to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deploy.offline.outputs import BeamSearchSequence
from workers.engine.errors import InvalidRequest

Expand = Callable[[Sequence[list[int]], int], list[dict[int, float]]]
"""For each token sequence, its likeliest next tokens with their log-probabilities: at least so many."""

MAX_BEAM_WIDTH = 50
"""Twice as many candidates are asked for of each beam, and 100 log-probabilities are the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search.

    Raises:
        InvalidRequest: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    """Sequences are ranked by log-probability / length ** penalty."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequest(
                f"beam_width is {self.beam_width}, it must be from 1 to {MAX_BEAM_WIDTH}", "beam_width"
            )
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}, it must be at least 1", "max_tokens")


@dataclass(slots=True)
class Beams:
    """The search of one prompt."""

    prompt_token_ids: list[int]
    running: list[BeamSearchSequence] = field(default_factory=list)
    ended: list[BeamSearchSequence] = field(default_factory=list)


def search(
    prompts: Sequence[list[int]], params: BeamSearchParams, eos_token_ids: frozenset[int], expand: Expand
) -> list[list[BeamSearchSequence]]:
    """The ``beam_width`` best sequences of each prompt, best first.

    Args:
        expand: runs one step of all beams of all prompts together.
    """
    ending = frozenset() if params.ignore_eos else eos_token_ids
    searches = [Beams(prompt, [BeamSearchSequence(list(prompt), 0.0)]) for prompt in prompts]
    for _ in range(params.max_tokens):
        running = [beam for one in searches for beam in one.running]
        if not running:
            break
        candidates = iter(expand([beam.tokens for beam in running], 2 * params.beam_width))
        for one in searches:
            grown = [
                BeamSearchSequence([*beam.tokens, token_id], beam.cum_logprob + logprob)
                for beam in one.running
                for token_id, logprob in next(candidates).items()
            ]
            for beam in grown:
                if beam.tokens[-1] in ending:
                    beam.finish_reason = "stop"
                    one.ended.append(beam)
            going_on = [beam for beam in grown if beam.finish_reason is None]
            one.running = sorted(going_on, key=lambda beam: -beam.cum_logprob)[: params.beam_width]
    results = []
    for one in searches:
        for beam in one.running:
            beam.finish_reason = "length"
        found = sorted([*one.ended, *one.running], key=lambda beam: -_score(beam, params.length_penalty))
        results.append(found[: params.beam_width])
    return results


def _score(beam: BeamSearchSequence, length_penalty: float) -> float:
    """Log-probability by length, the end-of-sequence token not counted."""
    length = len(beam.tokens) - (beam.finish_reason == "stop")
    return beam.cum_logprob / max(1, length) ** length_penalty
