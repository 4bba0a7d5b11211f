"""What weights lose of a model: the perplexity of a text, alone and against another form of the same model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.offline.llm import LLM
from deploy.offline.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of one text."""

    num_tokens: int
    """Those that have others before them in their piece."""
    perplexity: float
    change_percent: float | None = None
    """Against the other model; None: there is none."""
    standard_error: float | None = None
    """Of ``change_percent``, by the differences token by token."""


def token_losses(llm: LLM, token_ids: Sequence[int], piece_len: int) -> list[float]:
    """Negative log-probability of each token, given those before it in its piece of ``piece_len``."""
    pieces = [token_ids[start : start + piece_len] for start in range(0, len(token_ids), piece_len)]
    # The token that is generated is thrown away: prompts are what is scored.
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    found = []
    for output in llm.generate([piece for piece in pieces if len(piece) > 1], params):
        assert output.prompt_logprobs is not None, "they were asked for"
        scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found += [-scores[token_id].logprob for token_id, scores in scored if scores is not None]
    return found


def perplexity(losses: Sequence[float], others: Sequence[float] | None = None) -> Perplexity:
    """Of tokens with these losses, and how far it lies from that of ``others``, the same tokens' elsewhere."""
    count = len(losses)
    value = round(math.exp(math.fsum(losses) / count), 3)
    if others is None:
        return Perplexity(count, value)
    changes = [one - other for one, other in zip(losses, others, strict=True)]
    mean = math.fsum(changes) / count
    variance = math.fsum((change - mean) ** 2 for change in changes) / max(1, count - 1)
    return Perplexity(
        count,
        value,
        change_percent=round(100 * math.expm1(mean), 2),
        standard_error=round(100 * math.sqrt(variance / count), 2),
    )
