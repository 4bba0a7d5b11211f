"""Prefill and mixed steps of up to some thousand tokens as CUDA graphs, one for each padded number of tokens.

Launching a layer's kernels one by one takes a host longer than a GPU takes for a few hundred tokens. A graph ends
before the last layer's products: which tokens are sampled, and how many, differs from step to step.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from kernels.decode_attention_work import DecodeAttention
from kernels.prefill_attention_hopper import QueryTiles
from workers.model.batch import Batch
from workers.model.llama import LlamaDecoder
from workers.model.prefill_work import TILE_FIELDS, max_num_tiles
from workers.model.step_inputs import StepInputs

_SIZES = (64, *range(128, 1025, 128), *range(1280, 2049, 256))
"""Padding costs a sixth at most beyond 640 tokens; longer steps keep the GPU busy while they are launched."""
_MAX_PREFILLS = 16
"""Rows with more than one token that a graph's step may have."""


class PrefillGraphs:
    """Graphs from token ids to the last layer's attention."""

    def __init__(
        self, decoder: LlamaDecoder, kv_cache: Tensor, batch: Batch, decode_work: DecodeAttention
    ) -> None:
        """Nothing is captured yet; decoding rows of a step are told of by ``decode_work``."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._decode_work = decode_work
        device, longest = batch.device, _SIZES[-1]
        self._token_ids = torch.zeros(longest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(longest, dtype=torch.int64, device=device)
        self._slots = torch.full((longest,), -1, dtype=torch.int64, device=device)
        num_blocks = batch.block_tables.shape[1]
        self._tables = torch.zeros(_MAX_PREFILLS, num_blocks, dtype=torch.int32, device=device)
        self._starts = torch.zeros(_MAX_PREFILLS + 1, dtype=torch.int32, device=device)
        self._lens = torch.zeros(_MAX_PREFILLS, dtype=torch.int32, device=device)
        self._tiles = QueryTiles(
            torch.zeros(max_num_tiles(longest, _MAX_PREFILLS), TILE_FIELDS, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._sizes: list[int] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def capture(self, max_num_tokens: int) -> None:
        """Record the sizes that steps of up to ``max_num_tokens`` need, largest first into one pool."""
        self._sizes = [size for size in _SIZES if size <= max_num_tokens]
        pool = None
        stream = torch.cuda.Stream()
        for size in reversed(self._sizes):
            inputs = self._inputs(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._decoder.attend_all(inputs, self._kv_cache)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # "thread_local": NCCL's watchdog asks for events meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._outputs[size] = self._decoder.attend_all(inputs, self._kv_cache)
            pool = graph.pool()
            self._graphs[size] = graph

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Do what ``LlamaDecoder.attend_all`` does; results hold until the next step.

        Steps that no graph fits are launched kernel by kernel.
        """
        num_tokens, num_prefills = inputs.num_tokens, inputs.prefill_context_lens.shape[0]
        index = bisect.bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes) or num_prefills > _MAX_PREFILLS:
            return self._decoder.attend_all(inputs, self._kv_cache)
        size = self._sizes[index]
        self._token_ids[:num_tokens].copy_(inputs.token_ids)
        self._positions[:num_tokens].copy_(inputs.positions)
        self._slots[:num_tokens].copy_(inputs.slots)
        self._slots[num_tokens:size].fill_(-1)
        tables = inputs.prefill_block_tables
        self._tables[:num_prefills, : tables.shape[1]].copy_(tables)
        self._starts[: num_prefills + 1].copy_(inputs.prefill_query_starts)
        self._starts[num_prefills + 1 :].fill_(num_tokens)
        self._lens[:num_prefills].copy_(inputs.prefill_context_lens)
        tiles = inputs.prefill_tiles
        if tiles is None:
            self._tiles.num_tiles.zero_()
        else:
            self._tiles.tiles[: tiles.tiles.shape[0]].copy_(tiles.tiles)
            self._tiles.num_tiles.copy_(tiles.num_tiles)
        self._graphs[size].replay()
        return self._outputs[size]

    def _inputs(self, size: int) -> StepInputs:
        nothing = self._token_ids[:0]
        return StepInputs(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            num_decodes=1,
            decode_block_tables=self._tables[:0],
            decode_context_lens=self._lens[:0],
            max_decode_context_len=0,
            prefill_block_tables=self._tables,
            prefill_query_starts=self._starts,
            prefill_context_lens=self._lens,
            sample_tokens=nothing,
            decode_work=self._decode_work,
            prefill_tiles=self._tiles,
        )
