"""Runs each Triton kernel in Triton's interpreter against its reference; prints the largest error of each case as JSON.

A program of its own, since TRITON_INTERPRET must be set before a kernel is decorated. Shapes are tiny: a program of a
kernel takes milliseconds here. No bfloat16: the interpreter computes it wrongly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import torch
from paged_cache import make_cache
from torch import Tensor

from kernels import (
    block_copy,
    draw,
    few_rows,
    filters,
    gemv,
    log_sum_exp,
    rms_norm,
    rope_kv_write,
    silu_mul,
    token_mask,
    top_tokens,
)
from kernels import decode_attention_work as decode_work
from kernels import decode_prepare as prepare
from kernels import enter_params as entering
from kernels import paged_decode_attention as decode
from kernels import prefill_attention as prefill
from kernels import shared_prefix_attention as shared_prefix

OPTIONS = ((0, 0.0), (40, 0.0), (10, 0.8), (0, 0.8))
"""Windows and soft caps."""
FLOAT_TYPES = (torch.float32, torch.float16)
FLOAT8 = rope_kv_write.FLOAT8


def check_draws() -> None:
    """The draw and the step's preparation give integers: they must equal their references."""
    logits = torch.randn(5, 9000) * 2
    logits[0, 4000] = math.nan  # as row 1 samples, and 3 has all, there is no token in any
    logits[1, 8999] = math.inf
    logits[3] = math.nan
    compare_draws(logits)
    compare_draws(torch.randn(5, 9000) * 2)


def compare_draws(logits: Tensor) -> None:
    """Of five rows, the last of which is padding."""
    rows, starts = (torch.tensor(x, dtype=torch.int32) for x in ([5, 0, 2, 3, 1], [3, 9, 1, 0, 7]))
    params = draw.DrawParams(
        torch.tensor([0.0, 1.0, 0.7, 2.0, 0.3, 1.0]),
        torch.tensor([1, 2**40, -5, 7, 8, 9]),
        torch.tensor([0, 1, 0, 0, 2, 1], dtype=torch.int32),
        filters.Filters(
            torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0]),
            torch.tensor([0, 7, 0, 20, 0, 0], dtype=torch.int32),
            torch.tensor([0.5, 1.0, 1.0, 0.9, 1.0, 0.8]),
        ),
    )
    token_ids, drawn = torch.zeros(6, 12, dtype=torch.int32), torch.full((5,), -7, dtype=torch.int32)
    scratch = torch.empty(draw.draw_scratch_len(5, 9000), dtype=torch.float64)
    draw.draw(logits, params, torch.tensor([4], dtype=torch.int32), rows, starts, token_ids, drawn, scratch)
    want = draw.draw_ref(logits, params, rows, starts + 1)
    assert drawn.tolist() == [*want[:4].tolist(), -7]
    is_broken = ~logits[:4].amax(-1).isfinite()
    assert (drawn[:4] == -1).tolist() == is_broken.tolist()
    assert token_ids[rows[:4].long(), starts[:4].long() + 1].tolist() == drawn[:4].clamp(min=0).tolist()
    told: list[Tensor] = []
    off = filters.Filters(torch.zeros(6), torch.zeros(6, dtype=torch.int32), torch.ones(6))
    params = replace(params, filters=off)
    draw.draw(logits, params, torch.tensor([4], dtype=torch.int32), rows, starts, token_ids, drawn, scratch)
    # Each rank's candidates alone; then as the last rank has them all.
    for own, is_last in ((range(4864), False), (range(4864, 9000), True)):
        candidates, columns = (
            torch.zeros(5, 2, dtype=torch.float64),
            logits[:, own.start : own.stop].contiguous(),
        )

        def gather(candidates: Tensor, is_last: bool = is_last) -> Tensor:
            told.append(candidates.clone())
            return torch.stack(told) if is_last else candidates[None]

        shared, shared_ids = torch.full_like(drawn, -7), torch.zeros_like(token_ids)
        num_rows, share = torch.tensor([4], dtype=torch.int32), draw.DrawShare(own.start, candidates, gather)
        draw.draw(columns, params, num_rows, rows, starts, shared_ids, shared, scratch, share)
    assert torch.equal(shared, drawn)
    assert torch.equal(shared_ids, token_ids)

    columns = prepare.DecodeColumns(
        *(torch.tensor(x, dtype=torch.int32) for x in ([3], [4, 0, 2, 9], [16, 5, 33, 1], [7, -1, -1, 3]))
    )
    embedding, token_ids = torch.randn(50, 100), torch.randint(0, 50, (6, 40), dtype=torch.int32)
    whole: Tensor | None = None
    for share in (range(50), range(20), range(20, 50)):
        outs = []
        for run in (prepare.decode_prepare, prepare.decode_prepare_ref):
            tables = torch.arange(18, dtype=torch.int32).view(6, 3).clone()
            positions, slots = torch.full((2, 4), 77)
            hidden = torch.full((4, 100), 9.0)
            own = embedding[share.start : share.stop]
            run(columns, token_ids, tables, own, 16, positions, slots, hidden, share.start)
            outs.append((tables, positions, slots, hidden))
        assert all(torch.equal(got, wanted) for got, wanted in zip(*outs, strict=True))
        whole = hidden if whole is None else whole - hidden
    # What the ranks' shares add up to is what one rank has.
    assert whole is not None
    assert not whole.any()


def check_enter_params() -> None:
    """Each parameter arrives at its row and nowhere else."""
    told = torch.randint(-(2**31), 2**31 - 1, (70, entering.PARAM_FIELDS), dtype=torch.int32)
    told[:, 0] = torch.randperm(90)[:70]
    told.view(torch.float32)[:, [1, 5, 7]] = torch.rand(70, 3)
    outs = []
    for run in (entering._launch, entering.enter_params_ref):
        choices, top_k = torch.full((2, 90), 7, dtype=torch.int32)
        temperatures, min_p, top_p = torch.full((3, 90), 0.25)
        seeds = torch.full((90,), -7)
        run(told, draw.DrawParams(temperatures, seeds, choices, filters.Filters(min_p, top_k, top_p)))
        outs.append((temperatures, seeds, choices, min_p, top_k, top_p))
    assert all(torch.equal(got, wanted) for got, wanted in zip(*outs, strict=True))


def check_filters() -> None:
    """Floors keep what their reference keeps, but for what is never drawn."""
    for dtype, vocab in ((torch.float32, 3000), (torch.float16, 300)):
        logits = (torch.randn(8, vocab) * 3).to(dtype)
        logits[1] *= 0.02  # nearly all of it is the nucleus
        logits[2, 5:] = float("-inf")
        temperatures = torch.tensor([1.0, 2.0, 1.0, 0.0, 1e-38, 0.7, 0.3, 1.0])
        given = filters.Filters(
            torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.2, 0.05, 0.0]),
            torch.tensor([0, 0, 3, 4, 9, 0, 40, vocab], dtype=torch.int32),
            torch.tensor([0.9, 0.9, 1.0, 0.5, 0.5, 1.0, 0.9, 0.0]),
        )
        rows = torch.arange(8, dtype=torch.int32)
        got = filters.filter_floors(logits, temperatures, given, rows, torch.tensor([8], dtype=torch.int32))
        wanted = filters.filter_floors_ref(logits, temperatures, given)
        logits = logits.float()
        assert torch.equal(logits >= got[:, None], logits >= wanted[:, None])


def check_block_copies() -> None:
    """Copies move bytes: they must equal their reference."""
    source = torch.randn(5, 3, 700)
    pairs = torch.tensor([[4, 0], [1, 2], [0, 3]], dtype=torch.int32)
    got, wanted = torch.zeros(2, 4, 3, 700)
    words = (source.view(torch.int64), got.view(torch.int64))
    block_copy._copy_blocks_kernel[(2,)](*words, pairs, 3, 3 * 350, CHUNK=256)
    block_copy.copy_blocks_ref(source, wanted, pairs)
    assert torch.equal(got, wanted)
    assert not got[1].any()
    few, target = torch.randint(0, 9, (700,), dtype=torch.int32), torch.full((701,), -1, dtype=torch.int32)
    block_copy.copy_words(few, target[:700])
    assert target.tolist() == [*few.tolist(), -1]


def check_masks() -> None:
    """What is forbidden is minus infinity, all else is as it was, and no draw takes what is forbidden."""
    logits = torch.randn(3, 9001)
    allowed = torch.randint(0, 256, (3, 1126), dtype=torch.uint8)
    allowed[1] = 0
    allowed[1, 1000] = 4  # whole stretches are forbidden, and all parts but one
    want = token_mask.forbid_ref(logits, allowed)
    token_mask.forbid(logits, allowed)
    assert torch.equal(logits, want)
    params = draw.DrawParams(
        torch.tensor([0.0, 1.0, 0.7]), torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int32),
        filters.Filters(
            torch.tensor([0.0, 0.1, 0.0]), torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([1.0, 0.5, 0.9])
        ),
    )  # fmt: skip
    rows, starts = torch.arange(3, dtype=torch.int32), torch.tensor([4, 2, 6], dtype=torch.int32)
    token_ids, drawn = torch.zeros(3, 12, dtype=torch.int32), torch.full((3,), -1, dtype=torch.int32)
    scratch = torch.empty(draw.draw_scratch_len(3, 9001), dtype=torch.float64)
    draw.draw(logits, params, torch.tensor([3], dtype=torch.int32), rows, starts, token_ids, drawn, scratch)
    assert drawn.tolist() == draw.draw_ref(logits, params, rows, starts + 1).tolist()
    assert drawn[1] == 8002
    assert logits[rows.long(), drawn.long()].isfinite().all()


def check_top_tokens() -> None:
    """Sums as the reference's, also of nothing; the highest to the bit and, of equal ones, those of lowest id."""
    logits = (torch.randn(3, 5001) * 4).round()[:, 1:]  # dozens of each number, and rows that are not aligned
    logits[1, 100:], logits[2] = float("-inf"), float("-inf")
    torch.testing.assert_close(log_sum_exp._launch(logits), log_sum_exp.log_sum_exp_ref(logits))
    for count in (1, 20):
        for got, want in zip(
            top_tokens._launch(logits, count), top_tokens.top_tokens_ref(logits, count), strict=True
        ):
            assert torch.equal(got, want)


def main() -> None:
    """Print ``{case: error}``, the error relative to the reference's largest value."""
    torch.manual_seed(0)
    check_block_copies()
    check_draws()
    check_masks()
    check_top_tokens()
    check_filters()
    check_enter_params()
    errors = {
        name: float((got.float() - want.float()).abs().max() / want.float().abs().max())
        for name, got, want in cases()
    }
    print(json.dumps(errors))


def cases() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, the kernel's result, the reference's."""
    yield from float8_cache_cases()
    for dtype in FLOAT_TYPES:
        yield from norm_cases(dtype)
        yield from rope_cases(dtype)
        yield from decode_cases(dtype)
        yield from prefill_cases(dtype)
        yield from gemv_cases(dtype)
        yield from few_rows_cases(dtype)
        yield from work_cases(dtype)
        x = torch.randn(3, 2 * 123, dtype=dtype)
        yield f"silu_mul {dtype}", silu_mul._launch(x), silu_mul.silu_mul_ref(x)


def gemv_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Products of one row; widths that fill a step and that do not."""
    for width, num_out in ((123, 7), (2048, 4)):
        x, norm, bias = (torch.randn(n, dtype=dtype) for n in (width, width, num_out))
        weight = torch.randn(2 * num_out, width, dtype=dtype) * 0.05
        x, half = x[None], weight[:num_out].contiguous()
        name = f"{width} {dtype}"
        got = gemv.norm_linear(x, norm, half, bias, 1e-5)
        yield f"norm_linear {name}", got, gemv.norm_linear_ref(x, norm, half, bias, 1e-5)
        got = gemv.norm_gate_up(x, norm, weight, 1e-5)
        yield f"norm_gate_up {name}", got, gemv.norm_gate_up_ref(x, norm, weight, 1e-5)
        sum_got = torch.randn(1, num_out, dtype=dtype)
        sum_want = sum_got.clone()
        gemv.linear_add(x, half, sum_got)
        gemv.linear_add_ref(x, half, sum_want)
        yield f"linear_add {name}", sum_got, sum_want


def few_rows_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Products of a few rows in parts, and the norm that sums them."""
    tiles = few_rows.FewRowsTiles(32, 32, 2, 4, 1)
    x, weight = torch.randn(5, 128, dtype=dtype), torch.randn(64, 128, dtype=dtype) * 0.1
    parts = few_rows.linear_parts(x, weight, tiles)
    yield f"linear_parts {dtype}", parts, few_rows.linear_parts_ref(x, weight, 2)
    whole = few_rows.FewRowsTiles(32, 32, 1, 4, 1)
    got = few_rows.few_rows_linear(x, weight, None, whole)
    yield f"few_rows_linear {dtype}", got, few_rows.few_rows_linear_ref(x, weight)
    got = few_rows.few_rows_gate_up(x, weight, whole)
    yield f"few_rows_gate_up {dtype}", got, few_rows.few_rows_gate_up_ref(x, weight)
    residual, norm = torch.randn(5, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    sum_want = residual.clone()
    got = few_rows.add_rms_norm_of_parts(parts, residual, norm, 1e-5)
    yield f"norm of parts {dtype}", got, few_rows.add_rms_norm_of_parts_ref(parts, sum_want, norm, 1e-5)
    yield f"residual of parts {dtype}", residual, sum_want


def work_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Decode attention over pieces: three rows share 64 tokens, which are read once; one row shares nothing."""
    num_kv_heads, group, head_dim, block_size = 1, 3, 64, 16
    positions = torch.tensor([70, 100, 130, 90], dtype=torch.int32)
    num_blocks = 4 + sum(int(position) // block_size + 1 for position in positions)
    cache = torch.randn(num_blocks, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    tables = torch.zeros(4, 9, dtype=torch.int32)
    free = torch.randperm(num_blocks).tolist()
    shared_blocks = [free.pop() for _ in range(4)]
    for row, position in enumerate(positions.tolist()):
        blocks = [*shared_blocks] if row < 3 else []
        blocks += [free.pop() for _ in range(position // block_size + 1 - len(blocks))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
    # token, row, start, end, slot, first slot, own slots, all slots
    items = [
        [0, 0, 64, 96, 0, 0, 1, 2],
        [1, 1, 64, 128, 2, 2, 1, 2],
        [2, 2, 64, 96, 4, 4, 2, 3],
        [2, 2, 96, 160, 5, 4, 2, 3],
        [3, 3, 0, 96, 7, 7, 1, 1],
    ]
    ints = {
        name: torch.tensor(values, dtype=torch.int32)
        for name, values in {
            "items": items,
            "shares": [0, 3, 5],
            "shared": [[0, 3, 0, 0, 64, 0, 0, 0]],
            "count": [1],
            "members": [0, 1, 2],
            "first_slots": [1, 3, 6, 0],
        }.items()
    }
    work = decode_work.DecodeWork(
        ints["items"],
        ints["shares"],
        positions,
        torch.full((8, 3, head_dim), float("nan")),
        torch.full((8, 3), float("nan")),
        torch.zeros(4, dtype=torch.int32),
    )
    shared = shared_prefix.SharedWork(ints["shared"], ints["count"], ints["members"], ints["first_slots"], 2)
    q = torch.randn(4, group, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    attention = decode_work.DecodeAttention(tables, work, shared)
    for window, soft_cap in OPTIONS:
        got = decode_work.decode_attention(q, cache, 1, attention, scale, None, window, soft_cap)
        want = decode_work.decode_attention_over_work_ref(
            q, cache, 1, tables, torch.arange(4), positions + 1, scale, window, soft_cap
        )
        yield f"decode over work {window} {soft_cap} {dtype}", got, want
        assert not work.counters.any(), "counters are left at zero"
        work.partial.fill_(float("nan"))


def norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """RMSNorm with and without residual."""
    for num_tokens, hidden in ((1, 8), (5, 123)):
        x, residual = torch.randn(2, num_tokens, hidden, dtype=dtype)
        weight = torch.randn(hidden, dtype=dtype)
        name = f"{num_tokens}x{hidden} {dtype}"
        yield (
            f"rms_norm {name}",
            rms_norm._launch(x, None, weight, 1e-5),
            rms_norm.rms_norm_ref(x, weight, 1e-5),
        )
        sum_got, sum_want = residual.clone(), residual.clone()
        got = rms_norm._launch(x, sum_got, weight, 1e-5)
        yield f"add_rms_norm {name}", got, rms_norm.add_rms_norm_ref(x, sum_want, weight, 1e-5)
        yield f"residual {name}", sum_got, sum_want
        other, sum_got, sum_want = (
            torch.randn(num_tokens, hidden, dtype=dtype),
            residual.clone(),
            residual.clone(),
        )
        got = rms_norm._launch(x, sum_got, weight, 1e-5, other)
        yield f"add_two_rms_norm {name}", got, rms_norm.add_two_rms_norm(x, other, sum_want, weight, 1e-5)
        yield f"residual of two {name}", sum_got, sum_want


def rope_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Rotation and KV write, head sizes that are powers of two and not, with and without head norms."""
    for head_dim, has_norm in ((64, False), (80, True)):
        num_heads, num_kv_heads, num_tokens = 3, 1, 4
        qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        positions = torch.tensor([0, 7, 3, 11])
        slots = torch.tensor([5, 40, 17, 63])
        cos_sin = torch.randn(16, head_dim)
        norms = torch.randn(2, head_dim, dtype=dtype) if has_norm else (None, None)
        got, want = torch.zeros(2, 4, 2, 2, num_kv_heads, 16, head_dim, dtype=dtype)
        q_got = rope_kv_write._launch(
            qkv, positions, slots, cos_sin, got, 1, *norms, 1e-6, rope_kv_write.UNSCALED
        )
        q_want = rope_kv_write.rope_kv_write_ref(qkv, positions, slots, cos_sin, want, 1, *norms, 1e-6)
        yield f"rope q {head_dim} {dtype}", q_got, q_want
        yield f"rope kv {head_dim} {dtype}", got, want


def float8_cache_cases() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """A cache of e4m3: written with scales, cut off at its limit, read by decode and prefill attention."""
    head_dim, num_kv_heads = 64, 2
    qkv = torch.randn(4, (3 + 2 * num_kv_heads) * head_dim) * 60
    places = (torch.tensor([0, 7, 3, 11]), torch.tensor([5, 40, 17, 63]), torch.randn(16, head_dim))
    got, want = torch.zeros(2, 4, 2, 2, num_kv_heads, 16, head_dim, dtype=torch.uint8).view(FLOAT8)
    rope_kv_write._launch(qkv, *places, got, 1, None, None, 1e-6, (0.25, 2.0))
    rope_kv_write.rope_kv_write_ref(qkv, *places, want, 1, kv_scales=(0.25, 2.0))
    # The interpreter does not round halves to even as a GPU does, and what rounds up to a power of two loses the carry.
    is_close = (got.float() - want.float()).abs() <= want.float().abs() / 8 + 2**-9
    is_carried = (2 * got.float() == want.float()) & (want.float().abs().log2() % 1 == 0)
    assert (is_close | is_carried).all()
    assert is_close.float().mean() > 0.98
    assert want.float().abs().max() == rope_kv_write.MAX_FLOAT8
    context_lens = [37, 1, 20]
    cache, tables = make_cache(context_lens, num_kv_heads, 16, head_dim, torch.float32)
    stored, kept = cache.to(FLOAT8), cache.nan_to_num().to(FLOAT8)
    lens = torch.tensor(context_lens, dtype=torch.int32)
    q = torch.randn(3, 4, head_dim)
    args = (tables, lens, head_dim**-0.5)
    yield (
        f"decode of e4m3 {torch.float32}",
        decode._launch(q, stored, 1, *args, 37, 0, 0.0),
        decode.paged_decode_attention_ref(q, kept, 1, *args),
    )
    starts = torch.tensor([0, 5, 6, 26], dtype=torch.int32)
    q = torch.randn(26, 4, head_dim)
    args = (tables, starts, lens, head_dim**-0.5)
    yield (
        f"prefill of e4m3 {torch.float32}",
        prefill._launch(q, stored, 1, *args, None, 0, 0.0),
        prefill.prefill_attention_ref(q, kept, 1, *args),
    )


def decode_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Decode attention: an empty row, one token, partial blocks, and a context of several splits."""
    for head_dim, group, context_lens in ((64, 3, [1, 0, 37]), (80, 1, [20]), (64, 2, [520])):
        block_size, num_kv_heads = 16, 1
        cache, tables = make_cache(context_lens, num_kv_heads, block_size, head_dim, dtype)
        q = torch.randn(len(context_lens), num_kv_heads * group, head_dim, dtype=dtype)
        lens = torch.tensor(context_lens, dtype=torch.int32)
        for window, soft_cap in OPTIONS if head_dim == 64 else OPTIONS[:1]:
            args = (tables, lens, head_dim**-0.5)
            want = decode.paged_decode_attention_ref(q, cache.nan_to_num(), 1, *args, window, soft_cap)
            got = decode._launch(q, cache, 1, *args, max(context_lens), window, soft_cap)
            yield f"decode {head_dim} {context_lens} {window} {soft_cap} {dtype}", got, want


def prefill_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Prefill attention: whole prompts, a chunk after a prefix, a row without queries."""
    for head_dim, query_lens, context_lens in ((64, [1, 0, 5, 60], [1, 3, 21, 110]), (96, [40], [40])):
        block_size, num_kv_heads, group = 16, 1, 2
        cache, tables = make_cache(context_lens, num_kv_heads, block_size, head_dim, dtype)
        q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim, dtype=dtype)
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        lens = torch.tensor(context_lens, dtype=torch.int32)
        for window, soft_cap in OPTIONS if head_dim == 64 else OPTIONS[:1]:
            args = (tables, starts, lens, head_dim**-0.5)
            want = prefill.prefill_attention_ref(q, cache.nan_to_num(), 1, *args, window, soft_cap)
            got = prefill._launch(q, cache, 1, *args, None, window, soft_cap)
            yield f"prefill {head_dim} {query_lens} {window} {soft_cap} {dtype}", got, want


if __name__ == "__main__":
    main()
