"""Cosines and sines of rotary position embedding, for each family's way of stretching them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.checkpoint.model_config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, num_positions: int) -> Tensor:
    """Return [num_positions, head_dim] float32: the cosines of each pair's angle, then the sines."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: long waves are divided, short ones kept, those between interpolated.
    wave_lengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = (scaling.original_max_position_embeddings / wave_lengths - low) / (high - low)
    share = share.clamp(0.0, 1.0)
    return frequencies * (share + (1 - share) / scaling.factor)
