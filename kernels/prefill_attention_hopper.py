"""Prefill attention for sm_90: a warp copies, two warpgroups multiply, and programs stay for tile after tile.

Triton's language says neither which warps copy nor when a product is waited for; Gluon, Triton's lower language, does.
Blocks of the KV cache come by the tensor memory accelerator, one copy a block and 64 columns, straight to where
``wgmma`` reads them: on an H200 as fast as keys and values laid out in one piece. Each warpgroup holds 64 queries and
multiplies the next tile's keys while it takes the exponents of the last one's scores.

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), sections 3.1 and 3.2, over a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import gl, gluon, gluon_hopper, is_hopper

QUERIES = 128
"""Queries of one head that a program works on at once: 64 a warpgroup."""
TILE_FIELDS = 4
"""int32 fields of a tile: the row of the block tables, the first query's place in ``q``, how many queries, and the
position of the first."""
_TILE = 128
"""Context tokens of a step of the loop."""
_STAGES = 2
"""Tiles of keys, and of values, in shared memory: 64 KiB each at head size 128."""
_COPY_COLUMNS = 64
"""Of 16-bit numbers: what one copy with 128 bytes of swizzle takes at most."""
_HEAD_DIMS = (64, 128)
_REGISTERS = (232, 40)
"""Of a thread that multiplies, and of one that copies: twice the first and once the second make 504 of 512."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """A step's queries in tiles, those that look at most tokens first: all programs then end at about the same time."""

    tiles: Tensor
    """[at least the number of tiles, 4] int32, contiguous."""
    num_tiles: Tensor
    """[1] int32."""


def can_attend(q: Tensor, kv_cache: Tensor, window: int, soft_cap: float) -> bool:
    """True where this kernel takes the place of ``kernels.prefill_attention``'s."""
    return can_attend_with(q.device, q.dtype, kv_cache) and not (window or soft_cap)


def can_attend_with(device: torch.device, q_dtype: torch.dtype, kv_cache: Tensor) -> bool:
    """True where this kernel takes queries of a type over a cache, without windows and soft caps."""
    return (
        gluon is not None
        and is_hopper(device)
        and q_dtype == kv_cache.dtype
        and q_dtype in (torch.bfloat16, torch.float16)
        and kv_cache.shape[5] in _HEAD_DIMS
        and kv_cache.shape[4] in (16, 32, 64)
    )


def prefill_attention_hopper(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    work: QueryTiles,
    scale: float,
    out: Tensor,
) -> None:
    """Fill the places of ``out`` that the tiles name; as ``prefill_attention``, which checks shapes."""
    num_tokens, num_heads, head_dim = q.shape
    _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    width = num_heads * head_dim
    queries = gluon_hopper.TensorDescriptor(
        q, [num_tokens, width], [width, 1], [QUERIES // 2, head_dim], layout
    )
    blocks = gluon_hopper.TensorDescriptor(
        kv_cache,
        [kv_cache.numel() // head_dim, head_dim],
        [head_dim, 1],
        [block_size, _COPY_COLUMNS],
        layout,
    )
    _prefill_kernel[(torch.cuda.get_device_properties(q.device).multi_processor_count,)](
        queries,
        blocks,
        block_tables,
        work.tiles,
        work.num_tiles,
        out,
        scale * _LOG2_E,
        block_tables.stride(0),
        layer,
        num_layers,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS,
        num_warps=4,
    )


if gluon is not None:
    from kernels.jit import (
        fence_async_shared,
        mbarrier,
        thread_barrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    # What changes from step to step must not lead to a new variant.
    @gluon.jit(do_not_specialize=["tiles_ptr", "num_tiles_ptr", "table_stride", "layer", "num_layers"])
    def _prefill_kernel(
        q_desc,
        blocks_desc,
        block_tables_ptr,
        tiles_ptr,
        num_tiles_ptr,
        out_ptr,
        scale_log2,
        table_stride,
        layer,
        num_layers,
        NUM_HEADS: gl.constexpr,
        GROUP: gl.constexpr,
        HEAD_DIM: gl.constexpr,
        BLOCK_SIZE: gl.constexpr,
        TILE: gl.constexpr,
        STAGES: gl.constexpr,
        REGISTERS: gl.constexpr,
        num_warps: gl.constexpr,
    ):
        """Every so-many-th pair of tile and head a program, heads first."""
        dtype: gl.constexpr = q_desc.dtype
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        bars: gl.constexpr = mbarrier.MBarrierLayout()
        # The next tile's queries come while this one's are at work.
        q_smem = gl.allocate_shared_memory(dtype, [4, 64, HEAD_DIM], layout)
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], layout)
        v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], layout)
        q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_cleared = gl.allocate_shared_memory(gl.int64, [1], bars)
        for i in gl.static_range(2):
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=2)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=2)
        mbarrier.init(v_cleared, count=2)
        fence_async_shared()

        num_work = gl.load(num_tiles_ptr) * NUM_HEADS
        NUM_KV_HEADS: gl.constexpr = NUM_HEADS // GROUP
        block_stride = num_layers * (2 * NUM_KV_HEADS * BLOCK_SIZE)
        layer_row = layer * (2 * NUM_KV_HEADS * BLOCK_SIZE)
        smem = (q_smem, k_smem, v_smem)
        barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, v_cleared)
        # fmt: off
        gl.warp_specialize([
            (_multiply, (
                0, tiles_ptr, out_ptr, num_work, scale_log2, smem, barriers, NUM_HEADS, HEAD_DIM, TILE, STAGES,
            )),
            (_multiply, (
                1, tiles_ptr, out_ptr, num_work, scale_log2, smem, barriers, NUM_HEADS, HEAD_DIM, TILE, STAGES,
            )),
            (_copy, (
                q_desc, blocks_desc, block_tables_ptr, tiles_ptr, num_work, table_stride, block_stride, layer_row,
                smem, barriers, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, TILE, STAGES,
            )),
        ], [4, 1], REGISTERS)
        # fmt: on

    @gluon.jit
    def _copy(
        q_desc,
        blocks_desc,
        block_tables_ptr,
        tiles_ptr,
        num_work,
        table_stride,
        block_stride,
        layer_row,
        smem,
        barriers,
        NUM_HEADS: gl.constexpr,
        GROUP: gl.constexpr,
        HEAD_DIM: gl.constexpr,
        BLOCK_SIZE: gl.constexpr,
        TILE: gl.constexpr,
        STAGES: gl.constexpr,
    ):
        """One warp: queries, keys and values into shared memory, the last tile of a context first."""
        q_smem, k_smem, v_smem = smem
        q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
        # A tile of 128 tokens lies in memory as its columns' halves, those as their tokens: so a block's part is whole.
        per_tile: gl.constexpr = TILE // BLOCK_SIZE
        per_stage: gl.constexpr = per_tile * (HEAD_DIM // 64)
        piece: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        pieces: gl.constexpr = [STAGES * per_stage, BLOCK_SIZE, 64]
        k_pieces = k_smem._reinterpret(blocks_desc.dtype, pieces, piece)
        v_pieces = v_smem._reinterpret(blocks_desc.dtype, pieces, piece)
        num_bytes: gl.constexpr = TILE * HEAD_DIM * 2
        v_rows: gl.constexpr = (NUM_HEADS // GROUP) * BLOCK_SIZE
        turn = 0
        step = 0
        for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
            item = tiles_ptr + (work // NUM_HEADS) * 4
            head = work % NUM_HEADS
            table = block_tables_ptr + gl.load(item).to(gl.int64) * table_stride
            q_row = gl.load(item + 1)
            end = gl.load(item + 3) + gl.load(item + 2)
            last_block = (end - 1) // BLOCK_SIZE
            num_tiles = (end + TILE - 1) // TILE
            k_row = layer_row + (head // GROUP) * BLOCK_SIZE
            mbarrier.wait(q_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(turn % 2), 128 * HEAD_DIM * 2)
            for part in gl.static_range(2):
                # fmt: off
                tma.async_copy_global_to_shared(
                    q_desc, [q_row + part * 64, head * HEAD_DIM], q_full.index(turn % 2),
                    q_smem.index(turn % 2 * 2 + part),
                )
                # fmt: on
            turn += 1  # noqa: SIM113 (kernels have no enumerate)
            for index in range(num_tiles):
                stage = step % STAGES
                is_empty = ((step // STAGES) & 1) ^ 1
                first_block = (num_tiles - 1 - index) * per_tile
                mbarrier.wait(k_empty.index(stage), is_empty)
                mbarrier.expect(k_full.index(stage), num_bytes)
                for i in gl.static_range(per_tile):
                    # Beyond the context the last block comes again, and is masked.
                    block = gl.load(table + gl.minimum(first_block + i, last_block))
                    for half in gl.static_range(HEAD_DIM // 64):
                        # fmt: off
                        tma.async_copy_global_to_shared(
                            blocks_desc, [block * block_stride + k_row, half * 64], k_full.index(stage),
                            k_pieces.index(stage * per_stage + half * per_tile + i),
                        )
                        # fmt: on
                mbarrier.wait(v_empty.index(stage), is_empty)
                mbarrier.expect(v_full.index(stage), num_bytes)
                for i in gl.static_range(per_tile):
                    block = gl.load(table + gl.minimum(first_block + i, last_block))
                    for half in gl.static_range(HEAD_DIM // 64):
                        # fmt: off
                        tma.async_copy_global_to_shared(
                            blocks_desc, [block * block_stride + k_row + v_rows, half * 64], v_full.index(stage),
                            v_pieces.index(stage * per_stage + half * per_tile + i),
                        )
                        # fmt: on
                step += 1

    @gluon.jit
    def _multiply(
        part: gl.constexpr,
        tiles_ptr,
        out_ptr,
        num_work,
        scale_log2,
        smem,
        barriers,
        NUM_HEADS: gl.constexpr,
        HEAD_DIM: gl.constexpr,
        TILE: gl.constexpr,
        STAGES: gl.constexpr,
    ):
        """One warpgroup: 64 of a tile's queries; online softmax in base 2."""
        q_smem, k_smem, v_smem = smem
        q_full, q_empty, k_full, k_empty, v_full, v_empty, v_cleared = barriers
        dtype: gl.constexpr = q_smem.dtype
        # fmt: off
        s_layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
        )
        o_layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
        )
        # fmt: on
        p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
        o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
        zeros = gl.zeros([64, TILE], gl.float32, s_layout)
        rows = part * 64 + gl.arange(0, 64, layout=o_rows)
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, o_layout))
        turn = 0
        step = 0
        num_cleared = 0
        for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
            item = tiles_ptr + (work // NUM_HEADS) * 4
            q_row = gl.load(item + 1)
            count = gl.load(item + 2)
            position = gl.load(item + 3)
            end = position + count
            num_tiles = (end + TILE - 1) // TILE
            num_whole = (position + 1) // TILE
            first_position = position + part * 64
            q = q_smem.index(turn % 2 * 2 + part)
            acc = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)

            mbarrier.wait(q_full.index(turn % 2), (turn // 2) & 1)
            mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
            k = k_smem.index(step % STAGES).permute((1, 0))
            scores = warpgroup_mma(q, k, zeros, use_acc=False)
            thread_barrier()
            mbarrier.arrive(k_empty.index(step % STAGES), count=1)
            scores = _masked(scores, (num_tiles - 1) * TILE, first_position)
            highest = gl.max(scores, axis=1) * scale_log2
            # The first of 64 queries may see nothing of the context's last tile.
            weights = gl.exp2(scores * scale_log2 - _finite(highest)[:, None])
            total = gl.sum(weights, axis=1)
            p = gl.convert_layout(weights.to(dtype), p_layout)
            if num_tiles * TILE > end:
                # Slots beyond the context may hold anything, and zero times NaN is NaN.
                mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
                _clear(v_smem.index(step % STAGES), part, end - (num_tiles - 1) * TILE)
                mbarrier.arrive(v_cleared, count=1)
                mbarrier.wait(v_cleared, num_cleared & 1)
                num_cleared += 1

            for index in range(1, num_tiles):
                last = step % STAGES
                last_phase = (step // STAGES) & 1
                step += 1
                stage = step % STAGES
                mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                k = k_smem.index(stage).permute((1, 0))
                scores_next = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(last), last_phase)
                acc_next = warpgroup_mma(p, v_smem.index(last), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores_next])
                thread_barrier()
                mbarrier.arrive(k_empty.index(stage), count=1)
                if num_tiles - 1 - index >= num_whole:
                    scores = _masked(scores, (num_tiles - 1 - index) * TILE, first_position)
                new_highest = gl.maximum(highest, gl.max(scores, axis=1) * scale_log2)
                shift = _finite(new_highest)
                weights = gl.exp2(scores * scale_log2 - shift[:, None])
                fade = gl.exp2(highest - shift)
                total = total * fade + gl.sum(weights, axis=1)
                highest = new_highest
                acc, p = warpgroup_mma_wait(0, deps=[acc_next, p])
                thread_barrier()
                mbarrier.arrive(v_empty.index(last), count=1)
                acc = acc * gl.convert_layout(fade, o_rows)[:, None]
                p = gl.convert_layout(weights.to(dtype), p_layout)

            mbarrier.arrive(q_empty.index(turn % 2), count=1)
            turn += 1  # noqa: SIM113
            mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
            acc = warpgroup_mma(p, v_smem.index(step % STAGES), acc)
            thread_barrier()
            mbarrier.arrive(v_empty.index(step % STAGES), count=1)
            step += 1
            acc = acc / gl.convert_layout(total, o_rows)[:, None]
            place = ((q_row + rows).to(gl.int64) * NUM_HEADS + work % NUM_HEADS)[:, None] * HEAD_DIM
            gl.store(out_ptr + (place + columns[None, :]), acc.to(dtype), mask=(rows < count)[:, None])

    @gluon.jit
    def _masked(scores, first_token, first_position):
        """Hide from each query what stands behind it."""
        layout: gl.constexpr = scores.type.layout
        tokens = first_token + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
        positions = first_position + gl.arange(0, scores.shape[0], layout=gl.SliceLayout(1, layout))
        return gl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))

    @gluon.jit
    def _finite(highest):
        """Zero where no score is finite yet, so that differences are not NaN."""
        return gl.where(highest == float("-inf"), 0.0, highest)

    @gluon.jit
    def _clear(values, part: gl.constexpr, num_kept):
        """Set to zero what stands from token ``num_kept`` on, in this warpgroup's half of a tile of values."""
        half: gl.constexpr = values.shape[0] // 2
        width: gl.constexpr = values.shape[1]
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
        mine = values.slice(part * half, half)
        kept = mine.load(layout)
        tokens = part * half + gl.arange(0, half, layout=gl.SliceLayout(1, layout))
        mine.store(gl.where((tokens < num_kept)[:, None], kept, gl.zeros_like(kept)))
        fence_async_shared()
        thread_barrier()
