"""Which part of a model each rank of a tensor-parallel group holds (Megatron's split, Shoeybi et al. 2019).

Attention is split by KV head with its group of query heads, the MLP by intermediate columns, embedding and
logits by vocabulary rows, in whole stretches. Shares need not be equal: 3 KV heads over 2 ranks are 2 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.vocab_shard import STRETCH
from workers.checkpoint.model_config import ModelConfig
from workers.engine.errors import UserError


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranges of one rank: start and count of each."""

    q_heads: range
    kv_heads: range
    intermediate: range
    vocab: range


def split_evenly(total: int, parts: int, index: int) -> range:
    """Part ``index`` of ``parts`` consecutive ranges over ``total`` whose lengths differ by one at most."""
    share, extra = divmod(total, parts)
    start = index * share + min(index, extra)
    return range(start, start + share + (index < extra))


def split_vocab(vocab_size: int, parts: int, index: int) -> range:
    """Part ``index`` of a vocabulary cut between stretches; all of it where there are fewer of them than parts."""
    num_stretches = -(-vocab_size // STRETCH)
    if num_stretches < parts:
        return range(vocab_size)
    own = split_evenly(num_stretches, parts, index)
    return range(own.start * STRETCH, min(own.stop * STRETCH, vocab_size))


def make_shard(config: ModelConfig, tp_rank: int, tp_size: int) -> Shard:
    """Return what rank ``tp_rank`` of ``tp_size`` holds.

    With more ranks than KV heads, ranks share a KV head (each keeps a copy) and split its query heads.

    Raises:
        UserError: more ranks than query heads.
    """
    if tp_size > config.num_heads:
        raise UserError(
            f"--tensor-parallel-size is {tp_size}, so many ranks cannot share {config.num_heads} heads: take at "
            f"most {config.num_heads}",
            "tensor_parallel_size",
        )
    group = config.num_heads // config.num_kv_heads
    if tp_size <= config.num_kv_heads:
        kv_heads = split_evenly(config.num_kv_heads, tp_size, tp_rank)
        q_heads = range(kv_heads.start * group, kv_heads.stop * group)
    else:
        # Ranks are dealt to KV heads like heads to ranks above; those of one head split its group.
        owners = [split_evenly(tp_size, config.num_kv_heads, head) for head in range(config.num_kv_heads)]
        head = next(head for head, ranks in enumerate(owners) if tp_rank in ranks)
        kv_heads = range(head, head + 1)
        part = split_evenly(group, len(owners[head]), tp_rank - owners[head].start)
        q_heads = range(head * group + part.start, head * group + part.stop)
    if not q_heads:
        raise UserError(
            f"--tensor-parallel-size is {tp_size}, so many cannot share {config.num_kv_heads} KV heads of {group} "
            f"query heads each: take at most {config.num_kv_heads}",
            "tensor_parallel_size",
        )
    return Shard(
        q_heads=q_heads,
        kv_heads=kv_heads,
        intermediate=split_evenly(config.intermediate_size, tp_size, tp_rank),
        vocab=split_vocab(config.vocab_size, tp_size, tp_rank),
    )
