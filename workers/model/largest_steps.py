"""Steps that need as much memory as any can: run once at start, they show what is left for the KV cache. Ids only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workers.engine.plan import LateMasks, NewRow, StepPlan, TokenMask
from workers.engine.request import ChoiceParams
from workers.model.row_sampler import SAMPLED_AT_ONCE

_NUM_LOGPROBS = 20
_ALL_OF_SAMPLING = ChoiceParams(
    max_tokens=1,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    num_logprobs=_NUM_LOGPROBS,
)


def largest_steps(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int, vocab_size: int
) -> Iterator[list[StepPlan]]:
    """Yield plans in groups to be launched together; what they compute is of no use, and all of it lies in block 0.

    Together they have a step of all tokens that may be batched, all rows sampling with every option on, the longest
    context, masks that come late, and prompts of which one is scored and all are pooled.
    """
    assert max_model_len > 2, "a row has a prompt, and a token that it samples"
    longest = min(max_model_len - 1, max_num_batched_tokens)
    num_rows = min(max_num_seqs, max(max_num_batched_tokens // 2, 1))
    num_tokens = min(longest, max_num_batched_tokens // num_rows)
    yield [_prompts(0, [num_tokens] * num_rows, [_ALL_OF_SAMPLING] * num_rows, block_size)]
    yield _late_step(num_rows, num_tokens, max_model_len - 2, block_size, vocab_size)
    pooled = replace(_ALL_OF_SAMPLING, pooling="mean")
    scored = replace(pooled, num_prompt_logprobs=_NUM_LOGPROBS)
    first = min(longest, max(num_tokens, max_num_batched_tokens // 2))
    num_others = min(num_rows - 1, (max_num_batched_tokens - first) // 2)
    others = min(longest, (max_num_batched_tokens - first) // num_others) if num_others else 0
    yield [_prompts(3, [first, *[others] * num_others], [scored, *[pooled] * num_others], block_size)]


def _prompts(
    step_id: int, num_tokens: Sequence[int], params: Sequence[ChoiceParams], block_size: int
) -> StepPlan:
    """A step in which rows enter and compute all that they have."""
    rows = list(range(len(num_tokens)))
    new_rows = [
        NewRow(row, [0] * count, count, one) for row, count, one in zip(rows, num_tokens, params, strict=True)
    ]
    tables = [[0] * -(-count // block_size) for count in num_tokens]
    return StepPlan(step_id, new_rows, rows, [0] * len(rows), list(num_tokens), [True] * len(rows), tables)


def _late_step(
    num_rows: int, num_tokens: int, position: int, block_size: int, vocab_size: int
) -> list[StepPlan]:
    """A decode step of rows that are there, as many as are sampled at once at ``position``; masks follow it."""
    rows = list(range(num_rows))
    starts = [position if row < SAMPLED_AT_ONCE else num_tokens - 1 for row in rows]
    num_blocks = -(-num_tokens // block_size)
    added = [[0] * (start // block_size + 1 - num_blocks) for start in starts]
    mask = b"\xff" * -(-vocab_size // 8)
    masks = LateMasks(1, [TokenMask(place, mask) for place in rows])
    step = StepPlan(1, [], rows, starts, [1] * num_rows, [True] * num_rows, added, deferred=rows)
    return [step, StepPlan(2, [], [], [], [], [], [], late_masks=masks)]
