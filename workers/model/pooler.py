"""Hidden states of whole prompts as one vector: their mean, or the last one.

A prompt may be computed in several chunks, so sums are kept by row until the last chunk comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.plan import NewRow, StepPlan

HiddenOf = Callable[[Tensor], Tensor]
"""Final hidden states [num_tokens, hidden], normalised, of tokens of the step by their index."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Vectors on their way from the device."""

    places: list[int]
    """Which of the step's sampling rows they belong to."""
    vectors: Tensor
    """[len(places), hidden] float32."""

    def by_row(self, num_rows: int) -> list[bytes | None]:
        """Bytes of each sampling row's vector, None where it has none; waits for the device."""
        found: list[bytes | None] = [None] * num_rows
        for place, vector in zip(self.places, self.vectors.cpu(), strict=True):
            found[place] = vector.numpy().astype("<f4").tobytes()
        return found


class Pooler:
    """The pooling rows of a batch."""

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}
        self._sums: dict[int, Tensor] = {}

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        """Take in new rows; what a row summed up before is forgotten."""
        for new in new_rows:
            self._sums.pop(new.row, None)
            self._kinds.pop(new.row, None)
            if new.params.pooling is not None:
                self._kinds[new.row] = new.params.pooling

    def wants(self, plan: StepPlan) -> bool:
        """True if a row of the plan is pooled."""
        return bool(self._kinds) and any(row in self._kinds for row in plan.rows)

    def pool(self, plan: StepPlan, hidden_of: HiddenOf, device: torch.device) -> PooledRows | None:
        """Add the step's tokens of pooled rows up; return the vectors of rows whose prompt ends here.

        All ranks of a group must call it together: ``hidden_of`` may reduce over them.
        """
        spans: list[tuple[int, int]] = []  # of each pooled row of the step: row, number of tokens taken
        tokens: list[int] = []
        start = 0
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            end = start + num_tokens
            if row in self._kinds:
                first = start if self._kinds[row] == "mean" else end - 1
                spans.append((row, end - first))
                tokens.extend(range(first, end))
            start = end
        hidden = hidden_of(torch.tensor(tokens, dtype=torch.int64, device=device)).float()
        parts = dict(zip((row for row, _ in spans), hidden.split([count for _, count in spans]), strict=True))
        places: list[int] = []
        vectors: list[Tensor] = []
        place = 0
        for row, begin, num_tokens, samples in zip(
            plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True
        ):
            if row in parts:
                vector = self._take(row, parts[row], begin + num_tokens, samples)
                if vector is not None:
                    places.append(place)
                    vectors.append(vector)
            place += samples
        return PooledRows(places, torch.stack(vectors)) if places else None

    def _take(self, row: int, hidden: Tensor, num_tokens: int, is_last: bool) -> Tensor | None:
        """Keep a chunk's sum; with the last chunk return the vector and forget the row."""
        if self._kinds[row] == "mean":
            total = hidden.sum(0) + self._sums.get(row, 0.0)
            self._sums[row] = total
            vector = total / num_tokens
        else:
            vector = hidden[-1]
        if not is_last:
            return None
        self._kinds.pop(row)
        self._sums.pop(row, None)
        return vector
