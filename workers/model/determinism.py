"""What the deterministic mode does not cover, said before anything is loaded.

It stands on three things: products of one shape (``fixed_rows``), attention by one kernel for prompts and outputs
alike, in which a query's result depends on its own context only, and sums over ranks in one order.
"""

from __future__ import annotations

import torch

from kernels.native import HEAD_DIM_STEP, MAX_HEAD_DIM, native_kernels
from workers.checkpoint.generic_config import ARCHITECTURE as TRANSFORMERS
from workers.checkpoint.model_config import ModelConfig
from workers.engine.errors import UserError
from workers.model.rank_config import MAX_DETERMINISTIC_RANKS


def check_deterministic(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, tp_size: int
) -> None:
    """Return if results can be equal bit for bit however they are computed.

    Raises:
        UserError: they cannot; the message says by what.
    """
    if tp_size > MAX_DETERMINISTIC_RANKS:
        raise _refused(f"{tp_size} ranks: the order in which they are summed depends on the batch")
    if config.architecture == TRANSFORMERS:
        raise _refused("models with transformers' layers: their products are not ours")
    if device.type == "cuda":
        if config.experts is not None:
            raise _refused(
                "mixtures of experts on a GPU: how tokens are grouped by expert depends on the batch"
            )
        return
    for name, given in (("--dtype float32", dtype), ("--kv-cache-dtype auto", kv_dtype)):
        if given != torch.float32:
            raise _refused(f"{given} on a CPU: give {name}")
    has_window = any(config.window(index) for index in range(config.num_layers))
    has_odd_heads = config.head_dim % HEAD_DIM_STEP or config.head_dim > MAX_HEAD_DIM
    if has_odd_heads:
        raise _refused(
            f"heads of {config.head_dim} numbers on a CPU: multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM} are"
        )
    if has_window or config.attention_soft_cap:
        raise _refused("this family's attention on a CPU, which has no kernel of its own there")
    if native_kernels() is None:
        raise _refused("a CPU without a C compiler, of which its kernels are made")


def _refused(what: str) -> UserError:
    return UserError(f"--deterministic does not cover {what}", "deterministic")
