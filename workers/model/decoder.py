"""What a rank asks of a model, whoever's layers it has."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.vocab_shard import VocabShard
from workers.model.kv_pool import KVLayout
from workers.model.linear import LinearLayer
from workers.model.step_inputs import StepInputs


class Decoder(Protocol):
    """One rank's part of a decoder-only model: token ids in, logits of the sampling rows out."""

    @property
    def vocab(self) -> VocabShard:
        """Which part of the vocabulary this rank's logits are of."""
        ...

    def kv_layout(self, block_size: int, dtype: torch.dtype) -> KVLayout:
        """Shape of this rank's KV cache in ``dtype``."""
        ...

    def linears(self) -> list[LinearLayer]:
        """Projections that can be packed and timed."""
        ...

    def pack(self, is_narrow: bool = False) -> None:
        """Lay out the linear weights for this CPU; see ``LinearLayer.pack``."""
        ...

    def attend_all(self, inputs: StepInputs, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values to ``kv_cache``; return what ``logits`` and ``hidden`` finish."""
        ...

    def hidden(self, attended: Tensor, residual: Tensor, tokens: Tensor) -> Tensor:
        """Final hidden states of some tokens of the step, normalised; changes neither argument."""
        ...

    def logits(self, attended: Tensor, residual: Tensor, sample_tokens: Tensor) -> Tensor:
        """Return [num_samples, this rank's vocabulary] of some tokens of the step."""
        ...
