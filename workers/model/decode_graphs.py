"""Decode steps as CUDA graphs, one for each padded batch size, captured largest first into one pool."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.decode_prepare import decode_prepare
from kernels.draw import draw
from workers.model.batch import Batch
from workers.model.decode_buffers import DecodeBuffers
from workers.model.decode_forward import DecodeForward

_FEWEST_SHARED = 4
"""Smaller steps have no graph for shared prefixes."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Padded batch sizes: padding costs at most a seventh beyond 8 rows, and graphs stay few."""
    sizes = {1, 2, 4, 8, *range(16, 129, 8), *range(144, 257, 16), *range(288, max_num_seqs + 1, 32)}
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class DecodeGraphs:
    """Graphs from what the buffers were told to tokens drawn and stored."""

    def __init__(
        self,
        forward: DecodeForward,
        buffers: DecodeBuffers,
        batch: Batch,
        embedding: Tensor,
        first_token: int,
        sizes: Sequence[int],
    ) -> None:
        """Nothing is captured yet; ``embedding`` holds the tokens from ``first_token`` on that this rank has."""
        self._forward = forward
        self._buffers = buffers
        self._batch = batch
        self._embedding = embedding
        self._first_token = first_token
        self._sizes = sorted(sizes)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Run each size once, so that kernels are compiled, then record it. The buffers must hold a step of no rows."""
        pool = None
        stream = torch.cuda.Stream()
        keys = [(size, is_shared) for size in reversed(self._sizes) for is_shared in (True, False)]
        for size, is_shared in keys:
            if is_shared and size < _FEWEST_SHARED:
                continue
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute(size, is_shared)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # "thread_local": NCCL's watchdog asks for events meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._compute(size, is_shared)
            pool = graph.pool()
            self._graphs[size, is_shared] = graph

    def run(self, num_rows: int, is_shared: bool) -> Tensor:
        """Queue the step that the buffers were told of; return its logits [num_rows, vocab], until the next step."""
        key = (self._sizes[bisect.bisect_left(self._sizes, num_rows)], is_shared)
        self._graphs[key].replay()
        return self._buffers.logits[:num_rows]

    def _compute(self, size: int, is_shared: bool) -> None:
        buffers, batch = self._buffers, self._batch
        hidden, positions, slots = buffers.hidden[:size], buffers.positions[:size], buffers.slots[:size]
        decode_prepare(
            buffers.columns,
            batch.token_ids,
            batch.block_tables,
            self._embedding,
            batch.block_size,
            positions,
            slots,
            hidden,
            self._first_token,
        )
        logits = self._forward(hidden, positions, slots, buffers.attention(is_shared))
        columns = buffers.columns
        draw(
            logits,
            buffers.params,
            columns.num_rows,
            columns.rows,
            columns.starts,
            batch.token_ids,
            buffers.drawn,
            buffers.scratch,
            buffers.share,
        )
