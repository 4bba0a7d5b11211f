"""What offline generation returns; names are those of vLLM's outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one candidate token at one position."""

    logprob: float
    rank: int
    """1 is the likeliest."""
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` outputs of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """"stop", "length" or "error"."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the end-of-sequence token."""
    error: str | None = None
    """With "error": why it could not go on, such as a grammar that could not be followed further."""

    def finished(self) -> bool:
        """True once it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    """Of the output that gave way most often."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Of each token of the prompt, where they were asked for; None for the first, of which nothing is known."""

    def keep_best(self, num_outputs: int) -> None:
        """Keep the outputs with the highest mean log-probability of a token, best first."""

        def mean(one: CompletionOutput) -> float:
            assert one.cumulative_logprob is not None, "a contest is decided by log-probabilities"
            return one.cumulative_logprob / len(one.token_ids) if one.token_ids else -math.inf

        self.outputs = sorted(self.outputs, key=mean, reverse=True)[:num_outputs]
        for index, output in enumerate(self.outputs):
            output.index = index


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector, of length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers in it."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """A prompt's vector as the model gives it."""

    data: Tensor
    """[hidden] float32."""


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that a beam search found."""

    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float
    """Of the output."""
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]
