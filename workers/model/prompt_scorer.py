"""Log-probabilities of a prompt's own tokens, each given those before it.

A prompt may be computed in several chunks, so what is known is kept by row until the last chunk comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampler import log_probabilities
from kernels.vocab_shard import VocabShard
from workers.engine.plan import NewRow, StepPlan, TokenLogprobs

LogitsOf = Callable[[Tensor], Tensor]
"""Logits [num_tokens, this rank's vocabulary] of tokens of the step by their index."""

_AT_ONCE = 256
"""Tokens whose logits are held at a time: 128 MB at a vocabulary of 128,256."""

Scores = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of some tokens in order: log-probability, likeliest tokens, their log-probabilities, rank."""


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """Scores on their way from the device."""

    scores: dict[int, Scores]
    """By place among the step's sampling rows."""

    def by_row(self, num_rows: int) -> list[list[TokenLogprobs] | None]:
        """Of each sampling row its prompt's tokens from the second on, where asked for; waits for the device."""
        found: list[list[TokenLogprobs] | None] = [None] * num_rows
        for place, scores in self.scores.items():
            columns = (column.tolist() for column in scores)
            found[place] = [TokenLogprobs(*one) for one in zip(*columns, strict=True)]
        return found


class PromptScorer:
    """The rows of a batch whose prompts are scored."""

    def __init__(self, vocab: VocabShard) -> None:
        """Score by logits of ``vocab``."""
        self._vocab = vocab
        self._rows: dict[int, NewRow] = {}
        self._known: dict[int, list[Scores]] = {}

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        """Take in new rows; what was known of a row before is forgotten."""
        for new in new_rows:
            self._rows.pop(new.row, None)
            self._known.pop(new.row, None)
            if new.params.num_prompt_logprobs is not None:
                self._rows[new.row] = new
                self._known[new.row] = []

    def wants(self, plan: StepPlan) -> bool:
        """True if a row of the plan is scored."""
        return bool(self._rows) and any(row in self._rows for row in plan.rows)

    def score(self, plan: StepPlan, logits_of: LogitsOf, device: torch.device) -> ScoredPrompts | None:
        """Score the step's tokens; return what is known of rows whose prompt ends here.

        All ranks of a group must call it together: they tell each other what their logits say.
        """
        scores: dict[int, Scores] = {}
        place = first = 0
        for row, start, num_tokens, samples in zip(
            plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True
        ):
            new = self._rows.get(row)
            if new is not None:
                self._score_chunk(new, start, num_tokens, first, logits_of, device)
                if samples:
                    scores[place] = _joined(self._known.pop(row), new, device)
                    del self._rows[row]
            place += samples
            first += num_tokens
        return ScoredPrompts(scores) if scores else None

    def _score_chunk(
        self, new: NewRow, start: int, num_tokens: int, first: int, logits_of: LogitsOf, device: torch.device
    ) -> None:
        """Score the tokens that follow those computed, as far as they are the prompt's."""
        num_scored = min(num_tokens, new.num_prompt_tokens - 1 - start)
        for offset in range(0, num_scored, _AT_ONCE):
            count = min(_AT_ONCE, num_scored - offset)
            begin = start + offset + 1
            wanted = torch.tensor(new.token_ids[begin : begin + count], dtype=torch.int64, device=device)
            tokens = torch.arange(first + offset, first + offset + count, device=device)
            num_top = min(new.params.num_prompt_logprobs or 0, self._vocab.size)
            scores = log_probabilities(logits_of(tokens).float(), wanted, num_top, self._vocab)
            self._known[new.row].append(scores)


def _joined(parts: list[Scores], new: NewRow, device: torch.device) -> Scores:
    """All of a prompt's scores; a prompt of one token has none."""
    if not parts:
        nothing = torch.empty(0, device=device)
        return nothing, nothing.view(0, 0), nothing.view(0, 0), nothing
    own, ids, values, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
    assert len(own) == new.num_prompt_tokens - 1, "a part of the prompt was not computed here"
    return own, ids, values, ranks
