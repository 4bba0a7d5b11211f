"""``best_of``: which of a prompt's choices are given."""

from __future__ import annotations


class Contest:
    """The best of each prompt's choices, by the mean of their tokens' log-probabilities, as OpenAI has it."""

    def __init__(self, num_winners: int, num_choices: int) -> None:
        """``num_winners`` of every ``num_choices``."""
        self._num_winners = num_winners
        self.num_choices = num_choices
        """Of each prompt."""
        self._sums: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def note(self, index: int, logprob: float) -> None:
        """Take in a token of a choice."""
        self._sums[index] = self._sums.get(index, 0.0) + logprob
        self._counts[index] = self._counts.get(index, 0) + 1

    def winners(self, num_all: int) -> list[int]:
        """Indices of the winners of all prompts, the best of each first."""
        found: list[int] = []
        for first in range(0, num_all, self.num_choices):
            indices = range(first, first + self.num_choices)
            found += sorted(indices, key=lambda i: -self._mean(i))[: self._num_winners]
        return found

    def _mean(self, index: int) -> float:
        count = self._counts.get(index, 0)
        return self._sums[index] / count if count else float("-inf")
