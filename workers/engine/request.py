"""A request as the engine sees it: token ids in, token ids out. No text.

One request is one choice of one prompt: ``n`` choices are ``n`` requests, which share the prompt's blocks. A beam
search is one request, however many beams it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence or stop token was sampled
    LENGTH = "length"  # max_tokens or the context limit was reached
    ABORT = "abort"  # cancelled
    ERROR = "error"  # the engine could not go on with it
    RELEASED = "released"  # given back before anything of it was computed, to be served elsewhere


MAX_BEAM_WIDTH = 50
"""Twice as many candidates are looked at of each beam, and 100 log-probabilities are the limit."""


MAX_LENGTH_PENALTY = 40
"""Either way: no context is longer than 2 ** 24 tokens, and its power must be a float."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How the likeliest outputs are searched for.

    Outputs are ranked by score: log-probability / length ** ``length_penalty``, where length counts prompt and output
    but not the token that ended it (as vLLM has it). Candidates are ranked by the model's own probabilities.
    """

    width: int
    """Beams that go on, and outputs that are reported."""
    length_penalty: float = 1.0
    """Above 1 favours long outputs, below 1 short ones."""
    early_stopping: bool | None = None
    """When ``width`` outputs have ended, stop. True: at once. False: once no beam has a better score at its present
    length. None: once none can come to a better score at any length (transformers' "never")."""


@dataclass(frozen=True, slots=True)
class ChoiceParams:
    """How the tokens of one choice are sampled and when it ends.

    ``seed`` is always set: the edge draws one where the user gave none, so that a request moved to
    another replica goes on with the same random numbers. A token's random number depends on
    (seed, choice_index, position) alone.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, multiplicative (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Over output tokens, as OpenAI defines it."""
    frequency_penalty: float = 0.0
    """Over output tokens, as OpenAI defines it."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    choice_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """None: no logprobs; k: of the sampled token and of the k likeliest."""
    num_prompt_logprobs: int | None = None
    """None: no log-probabilities of the prompt's own tokens; k: of each, and of the k likeliest in its place."""
    grammar: str = ""
    """What the output must match, as ``workers.grammar`` compiles it; empty means anything. Not for ranks."""
    thinking_end: tuple[int, ...] = ()
    """Tokens that end the thinking which the output begins with; empty: it does not think."""
    thinking_budget: int | None = None
    """Tokens of thinking after which its end is forced."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty means all; else what else the vocabulary holds is never sampled."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not hold."""
    beams: BeamParams | None = None
    """Report, at the end and at once, the likeliest outputs that a beam search finds. None: sample one."""
    pooling: Literal["mean", "last"] | None = None
    """Report the prompt's last hidden states as one vector, their mean or the last one, with the first token;
    such a request has ``max_tokens`` 1. None: nothing is reported of them."""

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def restrictions(self) -> list[str]:
        """Names of the fields that may forbid tokens."""
        fields = {
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "logit_bias": self.logit_bias,
            "min_tokens": self.min_tokens,
            "structured_outputs": self.grammar,
        }
        return [name for name, value in fields.items() if value]

    @property
    def has_constraint(self) -> bool:
        """True if the brain has to look at its tokens to say which may come next."""
        return bool(self.grammar) or (self.thinking_budget is not None and bool(self.thinking_end))

    @property
    def num_rows(self) -> int:
        """Places in the batch that it takes."""
        return self.beams.width if self.beams is not None else 1

    @property
    def for_ranks(self) -> ChoiceParams:
        """The part that sampling needs: a grammar may be long, and ranks see only its masks.

        Of a beam search ranks know that it wants the likeliest tokens. Twice its width are looked at, so that enough
        go on even if every beam could end.
        """
        if self.beams is not None:
            return replace(self, beams=None, temperature=0.0, num_logprobs=2 * self.beams.width)
        return replace(self, grammar="") if self.grammar else self


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the edge submits.

    ``output_token_ids`` are tokens already generated elsewhere: they count as output for limits,
    penalties, positions and random numbers, but are not reported again.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: ChoiceParams
    output_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of prompt + output tokens, 16 bytes each. The edge has computed
    them for placement; an empty list makes the engine compute them."""
    hash_root: bytes = b""
    """Start of the hash chain (model, tenant salt, ...); empty means the engine's own root."""
    priority: int = 0
    """Lower is served first under the priority policy."""
    tenant: str = ""
    """Who shares with whom under the fair policy."""
    arrival_s: float = 0.0
    """When the edge received it, on the edge's clock; only for reports."""
