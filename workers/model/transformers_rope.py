"""Rotary positions of transformers' layers, made to choose once for all requests.

With longrope (and dynamic NTK) transformers computes the cosines of a whole step by its largest position: a request's
keys would depend on its neighbours. Here every step looks as if it held the longest request served; native layers
choose alike (``rope.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

_BY_LENGTH = {"longrope", "dynamic"}
"""Kinds of which transformers computes the frequencies or the factor by a step's positions."""


def choose_once(model: nn.Module, num_positions: int) -> None:
    """Let rotary modules of ``model`` turn every token as they would beside one at the last of ``num_positions``."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if kinds & _BY_LENGTH:
            module.forward = _beside_the_last(module.forward, num_positions - 1)


def _beside_the_last(forward: Callable[..., Any], last: int) -> Callable[..., Any]:
    """``forward`` of a rotary module: states and positions in, cosines and sines [..., num_tokens, width] out."""

    @wraps(forward)
    def wrapped(states: Tensor, position_ids: Tensor, *others: object, **named: object) -> Any:
        ends = position_ids.new_full((*position_ids.shape[:-1], 1), last)
        out = forward(states, torch.cat((position_ids, ends), dim=-1), *others, **named)
        return out[..., :-1, :] if isinstance(out, Tensor) else tuple(part[..., :-1, :] for part in out)

    return wrapped
