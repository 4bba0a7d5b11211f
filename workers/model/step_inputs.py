"""One step's tensors: what the layers need to know besides weights and hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.chunk_attention import ChunkWork
from kernels.decode_attention_work import DecodeAttention
from kernels.prefill_attention_hopper import QueryTiles


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A plan on the device. Tokens of decoding rows come first, one each, then those of the prefill rows."""

    token_ids: Tensor
    """[num_padded_tokens] int32; padding holds any."""
    positions: Tensor
    """[num_tokens] int64."""
    slots: Tensor
    """[num_tokens] int64: where each token's key and value go."""
    num_decodes: int
    decode_block_tables: Tensor
    """[num_decodes, blocks] int32."""
    decode_context_lens: Tensor
    """[num_decodes] int32, this step's token included."""
    max_decode_context_len: int
    prefill_block_tables: Tensor
    """[num_prefills, blocks] int32."""
    prefill_query_starts: Tensor
    """[num_prefills + 1] int32, counted from the first prefill token, or from the first token with ``decode_work``."""
    prefill_context_lens: Tensor
    """[num_prefills] int32, this step's tokens included."""
    sample_tokens: Tensor
    """[num_samples] int64: which tokens' hidden states give logits."""

    decode_work: DecodeAttention | None = None
    """How the decoding rows' attention is cut, on CUDA; None: by the tables and lengths above."""
    prefill_tiles: QueryTiles | None = None
    """The prefill rows' queries in tiles, counted as ``prefill_query_starts`` are; None: not cut beforehand."""
    prefill_chunks: ChunkWork | None = None
    """The prefill rows' queries and contexts cut into pieces, if they are few; None: by ``prefill_tiles``."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed, without padding."""
        return self.positions.shape[0]
