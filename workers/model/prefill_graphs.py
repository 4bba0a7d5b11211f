"""Prefill and mixed steps of up to some thousand tokens as CUDA graphs, one for each padded number of tokens.

Launching a layer's kernels one by one takes a host longer than a GPU takes for a few hundred tokens. A graph ends
before the last layer's products: which tokens are sampled, and how many, differs from step to step.
"""

from __future__ import annotations

import bisect
import math
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.chunk_attention import ChunkWork
from kernels.decode_attention_work import DecodeAttention
from kernels.prefill_attention_hopper import QueryTiles
from workers.model.batch import Batch
from workers.model.chunk_work import MAX_ROWS, MAX_TOKENS, ChunkArrays, ChunkCut
from workers.model.decode_buffers import MAX_LAUNCHED
from workers.model.llama import LlamaDecoder
from workers.model.prefill_work import TILE_FIELDS, max_num_tiles
from workers.model.step_arrays import StepArrays, aligned
from workers.model.step_inputs import StepInputs

_SIZES = (64, *range(128, 1025, 128), *range(1280, 2049, 256))
"""Padding costs a sixth at most beyond 640 tokens; longer steps keep the GPU busy while they are launched."""
_MAX_PREFILLS = MAX_ROWS
"""Rows with more than one token that a graph's step may have."""


class PrefillGraphs:
    """Graphs from token ids to the last layer's attention."""

    def __init__(
        self,
        decoder: LlamaDecoder,
        kv_cache: Tensor,
        batch: Batch,
        decode_work: DecodeAttention,
        chunk_cut: ChunkCut | None,
    ) -> None:
        """Nothing is captured yet; decoding rows of a step are told of by ``decode_work``.

        The attention of few tokens is cut by ``chunk_cut``, as the arrays of their steps are; None: not at all.
        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._batch = batch
        self._decode_work = decode_work
        self._chunk_cut = chunk_cut
        longest = _SIZES[-1]
        chunk_shapes = chunk_cut.shapes() if chunk_cut is not None else {}
        self._layout = _Layout(
            token_places=((longest,), torch.int64),
            positions=((longest,), torch.int64),
            slots=((longest,), torch.int64),
            sample_tokens=((longest,), torch.int64),
            starts=((_MAX_PREFILLS + 1,), torch.int32),
            lens=((_MAX_PREFILLS,), torch.int32),
            num_tiles=((1,), torch.int32),
            tiles=((max_num_tiles(longest, _MAX_PREFILLS), TILE_FIELDS), torch.int32),
            **{name: (shape, torch.int32) for name, shape in chunk_shapes.items()},
            # Last: a step's copy ends where its tables do.
            tables=((_MAX_PREFILLS, batch.block_tables.shape[1]), torch.int32),
        )
        size = self._layout.num_bytes
        self._told = torch.zeros(size, dtype=torch.uint8, device=batch.device)
        self._parts = self._layout.cut(self._told)
        self._token_ids = torch.zeros(longest, dtype=torch.int32, device=batch.device)
        self._staging = torch.zeros(MAX_LAUNCHED, size, dtype=torch.uint8).pin_memory()
        self._staged: list[dict[str, NDArray[Any]]] = [
            {name: part.numpy() for name, part in self._layout.cut(turn).items()} for turn in self._staging
        ]
        self._turn = 0
        self._sizes: list[int] = []
        # By size and whether the attention of few tokens is cut.
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._outputs: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def capture(self, max_num_tokens: int) -> None:
        """Record the sizes that steps of up to ``max_num_tokens`` need, largest first into one pool."""
        self._sizes = [size for size in _SIZES if size <= max_num_tokens]
        pool = None
        stream = torch.cuda.Stream()
        cut_sizes = [size for size in self._sizes if size <= MAX_TOKENS and self._chunk_cut is not None]
        for key in [
            *((size, False) for size in reversed(self._sizes)),
            *((size, True) for size in cut_sizes),
        ]:
            inputs = self._inputs(*key)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._decoder.attend_all(inputs, self._kv_cache)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # "thread_local": NCCL's watchdog asks for events meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._outputs[key] = self._decoder.attend_all(inputs, self._kv_cache)
            pool = graph.pool()
            self._graphs[key] = graph

    def fits(self, arrays: StepArrays) -> bool:
        """True if there is a graph for the step; others are launched kernel by kernel."""
        has_size = bool(self._sizes) and arrays.num_tokens <= self._sizes[-1]
        return has_size and arrays.num_prefills <= _MAX_PREFILLS

    def run(self, arrays: StepArrays) -> tuple[Tensor, Tensor, Tensor]:
        """Do what ``LlamaDecoder.attend_all`` does; return its results, which hold until the next step.

        Third ``StepInputs.sample_tokens``, which hold as long.
        """
        size = self._sizes[bisect.bisect_left(self._sizes, arrays.num_tokens)]
        end = self._stage(arrays, size)
        self._told[:end].copy_(self._staging[self._turn, :end], non_blocking=True)
        self._turn = (self._turn + 1) % MAX_LAUNCHED
        self._batch.tokens_at(self._parts["token_places"][:size], out=self._token_ids[:size])
        key = (size, size <= MAX_TOKENS and arrays.chunks is not None)
        self._graphs[key].replay()
        return *self._outputs[key], self._parts["sample_tokens"][: len(arrays.sample_tokens)]

    def _stage(self, arrays: StepArrays, size: int) -> int:
        """Write a step, padded to ``size`` tokens, to pinned memory; return where it ends, in bytes."""
        staged, num_tokens, num_prefills = self._staged[self._turn], arrays.num_tokens, arrays.num_prefills
        staged["token_places"][:num_tokens] = arrays.token_places
        staged["token_places"][num_tokens:size] = 0
        staged["positions"][:num_tokens] = arrays.positions
        staged["slots"][:num_tokens] = arrays.slots
        staged["slots"][num_tokens:size] = -1
        staged["sample_tokens"][: len(arrays.sample_tokens)] = arrays.sample_tokens
        staged["starts"][: num_prefills + 1] = arrays.query_starts
        staged["starts"][num_prefills + 1 :] = num_tokens
        staged["lens"][:num_prefills] = arrays.context_lens[arrays.num_decodes :]
        staged["num_tiles"][0] = len(arrays.tiles)
        staged["tiles"][: len(arrays.tiles)] = arrays.tiles
        if size <= MAX_TOKENS and arrays.chunks is not None:
            _stage_chunks(staged, arrays.chunks)
        tables, num_blocks = staged["tables"], arrays.num_prefill_blocks
        rows = arrays.rows[arrays.num_decodes :]
        tables[:num_prefills, :num_blocks] = self._batch.host_block_tables[rows, :num_blocks]
        end = max(num_prefills - 1, 0) * tables.shape[1] + num_blocks
        return self._layout.places["tables"] + end * tables.itemsize

    def _inputs(self, size: int, is_cut: bool) -> StepInputs:
        parts = self._parts
        chunks = None
        if is_cut:
            assert self._chunk_cut is not None, "nothing is cut without it"
            chunks = ChunkWork(*(parts[name] for name in self._chunk_cut.shapes()))
        return StepInputs(
            token_ids=self._token_ids[:size],
            positions=parts["positions"][:size],
            slots=parts["slots"][:size],
            num_decodes=1,
            decode_block_tables=parts["tables"][:0],
            decode_context_lens=parts["lens"][:0],
            max_decode_context_len=0,
            prefill_block_tables=parts["tables"],
            prefill_query_starts=parts["starts"],
            prefill_context_lens=parts["lens"],
            sample_tokens=parts["sample_tokens"][:0],
            decode_work=self._decode_work,
            prefill_tiles=QueryTiles(parts["tiles"], parts["num_tiles"]),
            prefill_chunks=chunks,
        )


def _stage_chunks(staged: dict[str, NDArray[Any]], chunks: ChunkArrays) -> None:
    staged["chunk_tiles"][: len(chunks.tiles)] = chunks.tiles
    staged["chunk_items"][: len(chunks.items)] = chunks.items
    staged["chunk_shares"][:] = chunks.shares
    staged["chunk_merges"][: len(chunks.merges)] = chunks.merges
    # The graph has tokens of padding: of those nothing is merged.
    staged["chunk_merges"][len(chunks.merges) :] = 0


class _Layout:
    """Tensors of several types one after the other in bytes, each at an aligned address."""

    def __init__(self, **parts: tuple[tuple[int, ...], torch.dtype]) -> None:
        """Place each part's shape and type."""
        self._parts = parts
        self.places: dict[str, int] = {}
        self.num_bytes = 0
        for name, (shape, dtype) in parts.items():
            self.places[name] = self.num_bytes
            self.num_bytes += aligned(math.prod(shape) * dtype.itemsize)

    def cut(self, told: Tensor) -> dict[str, Tensor]:
        """The parts of ``told`` [num_bytes] uint8."""
        return {
            name: told[self.places[name] :][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype) in self._parts.items()
        }
