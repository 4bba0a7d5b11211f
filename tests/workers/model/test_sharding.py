"""Shards cover the model once, whatever the numbers of heads and ranks."""

from __future__ import annotations

import pytest

from kernels.vocab_shard import STRETCH
from workers.checkpoint.model_config import ModelConfig
from workers.engine.errors import UserError
from workers.model.sharding import make_shard, split_evenly, split_vocab

VOCAB = 2000


def config(num_heads: int, num_kv_heads: int) -> ModelConfig:
    return ModelConfig("llama", 64, 101, 1, num_heads, num_kv_heads, head_dim=16, vocab_size=VOCAB)


def test_parts_follow_each_other_and_differ_by_one_at_most() -> None:
    parts = [split_evenly(11, 4, index) for index in range(4)]

    assert [list(part) for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (4, 1), (6, 2), (8, 8), (14, 2)])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_each_head_column_and_word_belongs_to_one_rank(
    num_heads: int, num_kv_heads: int, tp_size: int
) -> None:
    shape = config(num_heads, num_kv_heads)

    shards = [make_shard(shape, rank, tp_size) for rank in range(tp_size)]

    assert [head for shard in shards for head in shard.q_heads] == list(range(num_heads))
    assert [column for shard in shards for column in shard.intermediate] == list(range(101))
    assert [word for shard in shards for word in shard.vocab] == list(range(VOCAB))
    group = num_heads // num_kv_heads
    for shard in shards:
        assert {head // group for head in shard.q_heads} == set(shard.kv_heads)
        assert len(shard.q_heads) % len(shard.kv_heads) == 0


def test_more_ranks_than_query_heads_are_refused() -> None:
    with pytest.raises(UserError, match="at most 4"):
        make_shard(config(4, 2), 0, 5)


@pytest.mark.parametrize(
    ("vocab_size", "tp_size"), [(128256, 2), (128256, 8), (49152, 7), (1001, 4), (300, 2)]
)
def test_a_vocabulary_is_cut_between_stretches(vocab_size: int, tp_size: int) -> None:
    parts = [split_vocab(vocab_size, tp_size, rank) for rank in range(tp_size)]

    assert [word for part in parts for word in part] == list(range(vocab_size))
    assert all(part.start % STRETCH == 0 and part for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 2 * STRETCH


def test_a_vocabulary_of_fewer_stretches_than_ranks_is_held_whole() -> None:
    assert [split_vocab(300, 3, rank) for rank in range(3)] == [range(300)] * 3
