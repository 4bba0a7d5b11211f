"""The largest steps are as large as the limits say, and a rank can run them."""

from __future__ import annotations

import pytest

from workers.checkpoint.model_config import ModelConfig
from workers.model.largest_steps import largest_steps

CONFIG = ModelConfig("llama", 64, 96, 2, 4, 2, head_dim=16, vocab_size=500, max_position_embeddings=256)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    [(1, 1, 3), (1, 64, 256), (8, 64, 256), (200, 64, 64), (4, 1024, 256), (150, 400, 33)],
)
def test_they_keep_to_the_limits(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
    groups = list(largest_steps(max_num_seqs, max_num_batched_tokens, max_model_len, 16, 500))

    plans = [plan for group in groups for plan in group]
    most = min(max_num_batched_tokens, max_num_seqs * (max_model_len - 1))
    assert max(plan.num_batched_tokens for plan in plans) > most * 0.7
    assert max(len(plan.rows) for plan in plans) >= min(max_num_seqs, max_num_batched_tokens // 2)
    ends = [
        start + count for plan in plans for start, count in zip(plan.starts, plan.num_tokens, strict=True)
    ]
    assert max(ends) == max_model_len - 1
    for plan in plans:
        assert len(plan.rows) <= max_num_seqs
        assert plan.num_batched_tokens <= max_num_batched_tokens
    blocks: dict[int, int] = {}
    for plan in plans:
        blocks.update((new.row, 0) for new in plan.new_rows)
        columns = zip(plan.rows, plan.starts, plan.num_tokens, plan.new_block_ids, strict=True)
        for row, start, count, added in columns:
            blocks[row] += len(added)
            assert blocks[row] == -(-(start + count) // 16)


def test_a_rank_runs_them_in_one_block(make_rank) -> None:
    rank = make_rank(num_blocks=1, load_format="dummy", model_config=CONFIG, max_num_seqs=8)

    for plans in largest_steps(8, 64, 256, 16, CONFIG.vocab_size):
        for plan in plans:
            rank.launch(plan)
        for plan in plans:
            assert len(rank.collect().token_ids) == sum(plan.samples)
