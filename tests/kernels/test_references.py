"""The references say what the formulas say, and the CPU's compiled kernels agree with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.block_copy import copy_blocks
from kernels.native import NativeKernels, native_kernels
from kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_ref
from kernels.prefill_attention import prefill_attention, prefill_attention_ref
from kernels.rms_norm import add_rms_norm, add_rms_norm_ref, add_two_rms_norm, rms_norm, rms_norm_ref
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_ref
from kernels.silu_mul import silu_mul, silu_mul_ref

MakeCache = Callable[..., tuple[Tensor, Tensor]]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def native() -> NativeKernels:
    """The compiled kernels, or a skipped test where there is no compiler."""
    found = native_kernels()
    if found is None:
        pytest.skip("no C compiler here")
    return found


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain_attention(
    q: Tensor, keys: Tensor, values: Tensor, num_before: int, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Attention by the formula in float64: q [n, heads, d], keys and values [context, kv_heads, d]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[2] ** -0.5
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    for query in range(q.shape[0]):
        position = num_before + query
        scores[:, query, position + 1 :] = float("-inf")
        if window:
            scores[:, query, : max(position + 1 - window, 0)] = float("-inf")
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def context_of(cache: Tensor, table: Tensor, length: int, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one row, [context, kv_heads, d] each, token by token."""
    block_size = cache.shape[4]
    tokens = [cache[table[t // block_size], layer, :, :, t % block_size] for t in range(length)]
    keys_values = torch.stack(tokens)
    return keys_values[:, 0], keys_values[:, 1]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_heads", "num_kv_heads"), [(64, 16, 9, 3), (80, 32, 4, 4)]
)
def test_decode_attention_is_softmax_over_the_rows_own_context(
    make_cache: MakeCache, head_dim: int, block_size: int, num_heads: int, num_kv_heads: int
) -> None:
    context_lens = [1, 0, 70, 33]
    cache, tables = make_cache(context_lens, num_kv_heads, block_size, head_dim, torch.float32)
    q = torch.randn(4, num_heads, head_dim)

    got = paged_decode_attention_ref(q, cache.nan_to_num(), 1, tables, lengths(*context_lens), head_dim**-0.5)

    assert (got[1] == 0).all()
    for row in (0, 2, 3):
        keys, values = context_of(cache, tables[row], context_lens[row], layer=1)
        want = plain_attention(q[row : row + 1], keys, values, num_before=context_lens[row] - 1)
        torch.testing.assert_close(got[row : row + 1].double(), want, **CLOSE)


def test_prefill_attention_is_causal_after_what_was_computed_before(make_cache: MakeCache) -> None:
    context_lens, query_lens = [50, 3, 7], [20, 0, 7]
    cache, tables = make_cache(context_lens, 3, 16, 64, torch.float32)
    q = torch.randn(27, 9, 64)

    got = prefill_attention_ref(q, cache, 0, tables, lengths(0, 20, 20, 27), lengths(*context_lens), 0.125)

    for row, queries in ((0, slice(0, 20)), (2, slice(20, 27))):
        keys, values = context_of(cache, tables[row], context_lens[row], layer=0)
        want = plain_attention(q[queries], keys, values, context_lens[row] - query_lens[row])
        torch.testing.assert_close(got[queries].double(), want, **CLOSE)


@pytest.mark.parametrize(("window", "soft_cap"), [(5, 0.0), (0, 0.7), (20, 0.7), (1, 0.0), (500, 0.0)])
def test_a_window_hides_what_lies_further_back_and_a_soft_cap_bounds_scores(
    make_cache: MakeCache, window: int, soft_cap: float
) -> None:
    context_lens, query_lens = [50, 1, 7, 33], [20, 0, 7, 1]
    cache, tables = make_cache(context_lens, 3, 16, 64, torch.float32)
    lens = lengths(*context_lens)
    one_each, many = torch.randn(4, 9, 64) * 4, torch.randn(28, 9, 64) * 4

    decoded = paged_decode_attention(
        one_each, cache.nan_to_num(), 1, tables, lens, 0.125, 50, window, soft_cap
    )
    starts = lengths(0, 20, 20, 27, 28)
    prefilled = prefill_attention(
        many, cache, 1, tables, starts, lens, 0.125, window=window, soft_cap=soft_cap
    )

    for row, context in enumerate(context_lens):
        keys, values = context_of(cache, tables[row], context, layer=1)
        want = plain_attention(one_each[row : row + 1], keys, values, context - 1, window, soft_cap)
        torch.testing.assert_close(decoded[row : row + 1].double(), want, **CLOSE)
        queries = slice(int(starts[row]), int(starts[row + 1]))
        before = context - query_lens[row]
        want = plain_attention(many[queries], keys, values, before, window, soft_cap)
        torch.testing.assert_close(prefilled[queries].double(), want, **CLOSE)


def test_rope_turns_pairs_by_the_positions_angle_and_fills_the_slots() -> None:
    head_dim, positions, slots = 8, torch.tensor([0, 5]), torch.tensor([3, 18])
    angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.3, 0.1, 0.02]))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    qkv = torch.randn(2, 3 * head_dim)
    cache = torch.zeros(2, 2, 2, 1, 16, head_dim)

    q = rope_kv_write_ref(qkv, positions, slots, cos_sin, cache, 1)

    pairs = torch.view_as_complex(qkv.view(2, 3, 2, 4).transpose(2, 3).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(2, 1, 4), angles[positions][:, None]))
    turned = turned.transpose(2, 3).reshape(2, 3, head_dim)
    torch.testing.assert_close(q[:, 0], turned[:, 0])
    torch.testing.assert_close(cache[[0, 1], 1, 0, 0, [3, 2]], turned[:, 1])
    torch.testing.assert_close(cache[[0, 1], 1, 1, 0, [3, 2]], qkv.view(2, 3, head_dim)[:, 2])
    assert cache[:, 0].abs().sum() == 0
    assert cache.count_nonzero() == 2 * 2 * head_dim


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_compiled_decode_attention_agrees_and_reads_no_slot_beyond_the_context(
    native: NativeKernels, make_cache: MakeCache, head_dim: int, block_size: int
) -> None:
    context_lens = [1, 0, 200, 64, 65]
    cache, tables = make_cache(context_lens, 2, block_size, head_dim, torch.float32)
    q, lens = torch.randn(5, 6, head_dim), lengths(*context_lens)

    got = native.paged_decode_attention(q, cache, 1, tables, lens, head_dim**-0.5)

    want = paged_decode_attention_ref(q, cache.nan_to_num(), 1, tables, lens, head_dim**-0.5)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 8), (1, 8), (5, 123), (7, 512), (40, 576)])
def test_compiled_norms_and_activation_agree(native: NativeKernels, num_tokens: int, hidden: int) -> None:
    x, residual = torch.randn(2, num_tokens, hidden) * 3
    weight = torch.randn(hidden)
    sum_got, sum_want = residual.clone(), residual.clone()

    torch.testing.assert_close(native.rms_norm(x, None, weight, 1e-5), rms_norm_ref(x, weight, 1e-5), **CLOSE)
    got = native.rms_norm(x, sum_got, weight, 1e-5)
    torch.testing.assert_close(got, add_rms_norm_ref(x, sum_want, weight, 1e-5), **CLOSE)
    torch.testing.assert_close(sum_got, sum_want)
    gate_up = torch.cat((x, residual), dim=1) * 20
    torch.testing.assert_close(native.silu_mul(gate_up), silu_mul_ref(gate_up), **CLOSE)


@pytest.mark.parametrize(("head_dim", "num_tokens"), [(64, 1), (80, 5), (128, 40), (256, 3)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_compiled_rope_agrees(native: NativeKernels, head_dim: int, num_tokens: int, has_norm: bool) -> None:
    qkv = torch.randn(num_tokens + 2, (6 + 2 * 2) * head_dim)
    positions, slots = torch.randint(0, 50, (num_tokens,)), torch.randperm(64)[:num_tokens]
    cos_sin = torch.randn(50, head_dim)
    norms = torch.randn(2, head_dim) if has_norm else (None, None)
    got, want = torch.zeros(2, 4, 3, 2, 2, 16, head_dim)

    q_got = native.rope_kv_write(qkv, positions, slots, cos_sin, got, 2, *norms, 1e-6)

    q_want = rope_kv_write_ref(qkv, positions, slots, cos_sin, want, 2, *norms, 1e-6)
    torch.testing.assert_close(q_got, q_want, **CLOSE)
    torch.testing.assert_close(got, want, **CLOSE)


def test_two_parts_are_added_before_they_are_rounded() -> None:
    x, other, residual = torch.tensor([[256.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 4.0]])
    residual = residual.bfloat16()

    normed = add_two_rms_norm(x.bfloat16(), other.bfloat16(), residual, torch.ones(2).bfloat16(), 0.0)

    assert residual.tolist() == [[258.0, 4.0]], "in bfloat16 alone 256 + 1 is 256"
    torch.testing.assert_close(normed, rms_norm_ref(residual, torch.ones(2), 0.0))


def test_queries_are_written_where_they_are_wanted(make_cache: MakeCache) -> None:
    cache, _ = make_cache([16], 1, 16, 64, torch.float32)
    qkv, cos_sin = torch.randn(3, 4 * 64), torch.randn(4, 64)
    positions = slots = torch.arange(3)
    out = torch.zeros(5, 2, 64)

    got = rope_kv_write(qkv, positions, slots, cos_sin, cache, 0, out=out[1:4])

    assert got.data_ptr() == out[1:4].data_ptr()
    torch.testing.assert_close(got, rope_kv_write(qkv, positions, slots, cos_sin, cache, 0))
    assert not out[[0, 4]].any()
    with pytest.raises(ValueError, match="out"):
        rope_kv_write(qkv, positions, slots, cos_sin, cache, 0, out=out)


def test_a_batch_without_tokens_gives_a_result_without_tokens(make_cache: MakeCache) -> None:
    cache, tables = make_cache([16], 1, 16, 64, torch.float32)
    none = torch.zeros(0, dtype=torch.int64)

    assert rms_norm(torch.zeros(0, 8), torch.ones(8)).shape == (0, 8)
    assert silu_mul(torch.zeros(0, 8)).shape == (0, 4)
    assert rope_kv_write(torch.zeros(0, 3 * 64), none, none, torch.zeros(4, 64), cache, 0).shape == (0, 1, 64)
    q = torch.zeros(0, 1, 64)
    assert paged_decode_attention(q, cache, 0, tables[:0], lengths(), 1.0, 0).shape == (0, 1, 64)
    assert prefill_attention(q, cache, 0, tables[:0], lengths(0), lengths(), 1.0).shape == (0, 1, 64)


def test_launchers_refuse_shapes_and_types_that_do_not_fit(make_cache: MakeCache) -> None:
    cache, tables = make_cache([16], 2, 16, 64, torch.float32)
    q = torch.zeros(1, 4, 64)

    with pytest.raises(ValueError, match="hidden"):
        rms_norm(torch.zeros(2, 8), torch.ones(9))
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.ones(8))
    with pytest.raises(ValueError, match="does not match x"):
        add_two_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(2, 8), torch.ones(8))
    with pytest.raises(ValueError, match="gate_up"):
        silu_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="int32"):
        paged_decode_attention(q, cache, 0, tables.long(), lengths(16), 1.0, 16)
    with pytest.raises(ValueError, match="cannot hold"):
        paged_decode_attention(q, cache, 0, tables, lengths(16), 1.0, 17)
    with pytest.raises(ValueError, match="does not fit"):
        prefill_attention(torch.zeros(1, 3, 64), cache, 0, tables, lengths(0, 1), lengths(16), 1.0)
    with pytest.raises(ValueError, match="layer"):
        prefill_attention(q, cache, 2, tables, lengths(0, 1), lengths(16), 1.0)


def test_blocks_are_copied_by_pairs_and_nothing_else_is_touched() -> None:
    source, target = torch.randn(4, 2, 8), torch.zeros(3, 2, 8)

    copy_blocks(source, target, torch.tensor([[3, 0], [1, 2]], dtype=torch.int32))

    assert torch.equal(target[[0, 2]], source[[3, 1]])
    assert not target[1].any()
    with pytest.raises(ValueError, match="one size"):
        copy_blocks(source, torch.zeros(3, 2, 6), torch.zeros(0, 2, dtype=torch.int32))
