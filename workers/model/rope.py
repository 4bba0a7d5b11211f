"""Cosines and sines of rotary position embedding, for each family's way of stretching them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.checkpoint.model_config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, num_positions: int, kind: str = "global") -> Tensor:
    """Return [num_positions, head_dim] float32: the cosines of each pair's angle, then the sines.

    Args:
        config: the model's.
        num_positions: how many will be served.
        kind: "global", "local" (base and stretching of its own) or "none" (nothing is rotated).
    """
    rotary_dim = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    theta, scaling = config.rope_theta, config.rope_scaling
    if kind == "local":
        theta, scaling = config.local_rope_theta, config.local_rope_scaling
    frequencies, factor = 1.0 / theta**exponents, 1.0
    if kind == "none":
        frequencies = torch.zeros_like(frequencies)
    elif scaling is not None:
        frequencies, factor = _stretch(frequencies, scaling, theta, rotary_dim, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cosines, sines = angles.cos() * factor, angles.sin() * factor
    # Pairs beyond the rotated ones stay as they are.
    rest = (config.head_dim - rotary_dim) // 2
    cosines = torch.nn.functional.pad(cosines, (0, rest), value=1.0)
    sines = torch.nn.functional.pad(sines, (0, rest))
    return torch.cat((cosines, sines), dim=-1)


def head_order(head_dim: int, rotary_dim: int) -> Tensor:
    """Where a head's numbers go so that halves of the whole head are pairs, when only ``rotary_dim`` are rotated.

    Queries and keys in another, common order have the same products.
    """
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    index = torch.arange(head_dim)
    first, second = index[:half], index[half:rotary_dim]
    return torch.cat((first, index[rotary_dim : rotary_dim + rest], second, index[rotary_dim + rest :]))


def _stretch(
    frequencies: Tensor, scaling: RopeScaling, theta: float, rotary_dim: int, num_positions: int
) -> tuple[Tensor, float]:
    """Stretched frequencies, and what cosines and sines are multiplied by."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, theta, rotary_dim)
    original = scaling.original_max_position_embeddings
    # One choice for all requests, by what is served: cached keys must not depend on the length of a request.
    factors = scaling.short_factors if num_positions <= original else scaling.long_factors
    grown = scaling.factor
    default = 1.0 if grown <= 1 else math.sqrt(1 + math.log(grown) / math.log(original))
    return frequencies / torch.tensor(factors), scaling.attention_factor or default


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are divided, short ones kept, those between interpolated."""
    wave_lengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = (scaling.original_max_position_embeddings / wave_lengths - low) / (high - low)
    share = share.clamp(0.0, 1.0)
    return frequencies * (share + (1 - share) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: RopeScaling, theta: float, rotary_dim: int) -> tuple[Tensor, float]:
    """YaRN: as Llama 3.1 in kind; the bounds count turns within the original positions."""

    def dimension_of(turns: float) -> float:
        original = scaling.original_max_position_embeddings
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_of(scaling.beta_slow)), rotary_dim - 1)
    steps = torch.arange(rotary_dim // 2, dtype=torch.float32)
    divided = ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    default = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    stretched = frequencies * (1 - divided) + frequencies / scaling.factor * divided
    return stretched, scaling.attention_factor or default
