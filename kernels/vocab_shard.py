"""Columns of the vocabulary that one of several ranks holds, and what ranks must tell each other to sample from all.

Knows no channel: ``workers.model.tensor_parallel`` brings one along. A lone rank has nobody to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

STRETCH = 256
"""Tokens that race together, always on one rank: however many ranks there are, the same stretches race."""


class VocabShard(Protocol):
    """One rank's columns. All ranks must ask the same things in the same order."""

    @property
    def own(self) -> range:
        """The tokens whose logits this rank has, from a multiple of ``STRETCH`` on."""
        ...

    @property
    def size(self) -> int:
        """Tokens of all ranks."""
        ...

    def highest(self, values: Tensor) -> Tensor:
        """Return the highest of the ranks' ``values``, elementwise."""
        ...

    def side_by_side(self, columns: Tensor) -> Tensor:
        """Return the ranks' ``columns`` [num_rows, any number, the same everywhere] in rank order."""
        ...

    def whole(self, columns: Tensor) -> Tensor:
        """Return [num_rows, size] of which ``columns`` are this rank's own tokens'."""
        ...


@dataclass(frozen=True, slots=True)
class WholeVocab:
    """All columns, of a lone rank or of each of several."""

    size: int

    @property
    def own(self) -> range:
        """See ``VocabShard``."""
        return range(self.size)

    def highest(self, values: Tensor) -> Tensor:
        """See ``VocabShard``."""
        return values

    def side_by_side(self, columns: Tensor) -> Tensor:
        """See ``VocabShard``."""
        return columns

    def whole(self, columns: Tensor) -> Tensor:
        """See ``VocabShard``."""
        return columns
