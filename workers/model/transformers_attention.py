"""transformers' attention interface, answered by the paged cache: what its layers call instead of their own attention.

Their forward passes hand on keyword arguments that they do not know; ``KEYWORD`` names ours. There are no masks: what a
token attends to follows from its row's blocks and position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kernels.rope_kv_write import rope_kv_write
from workers.engine.errors import UserError
from workers.model.step_attention import attend
from workers.model.step_inputs import StepInputs

NAME = "shoal_paged"
"""Of the implementation among transformers' own."""
KEYWORD = "shoal_attention"


class Attention(Protocol):
    """What one forward pass does at each layer's attention."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, soft_cap: float
    ) -> Tensor:
        """Return [num_tokens, heads, head_dim] for ``q`` of that shape, ``k`` and ``v`` with their own heads."""
        ...


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Over the blocks of one step."""

    inputs: StepInputs
    kv_cache: Tensor
    unturned: Tensor
    """[1, head_dim] float32: cosines and sines of no rotation, since keys come rotated."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, soft_cap: float
    ) -> Tensor:
        """See ``Attention``."""
        merged = torch.cat((q, k, v), dim=1).flatten(1)
        nowhere = torch.zeros_like(self.inputs.positions)
        q = rope_kv_write(merged, nowhere, self.inputs.slots, self.unturned, self.kv_cache, layer)
        return attend(q, self.kv_cache, layer, self.inputs, scale, window, soft_cap)


@dataclass(slots=True)
class ShapeProbe:
    """Learns what layers ask for, and gives them zeros."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By layer: KV heads and head size on this rank."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, soft_cap: float
    ) -> Tensor:
        """See ``Attention``.

        Raises:
            UserError: keys and values are of different sizes, or a layer attends twice.
        """
        if k.shape != v.shape or q.shape[2] != k.shape[2] or layer in self.shapes:
            raise UserError(f"layer {layer} has attention that the KV cache cannot hold", "model")
        self.shapes[layer] = (k.shape[1], k.shape[2])
        return torch.zeros_like(q)


def register() -> None:
    """Make ``NAME`` an attention implementation of transformers in this process."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Heads come as [1, heads, num_tokens, head_dim] and go as [1, num_tokens, heads, head_dim]."""
    attention = others.get(KEYWORD)
    if not callable(attention) or s_aux is not None:
        raise UserError(f"{type(module).__name__} has attention sinks or takes no other attention", "model")
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention(int(module.layer_idx), q, k, v, scale, sliding_window or 0, softcap or 0.0)  # type: ignore[arg-type]
    return out[None], None
