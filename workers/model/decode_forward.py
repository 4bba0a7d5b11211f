"""A decode step of the Llama family on CUDA, from embeddings to logits: fixed shapes, no host in between."""

from __future__ import annotations

from torch import Tensor

from kernels.decode_attention_work import DecodeWork, decode_attention_over_work
from kernels.gemv import linear_add, norm_gate_up, norm_linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from workers.model.llama import DecoderLayer, LlamaDecoder

GEMV_ROWS = 1
"""Up to so many rows the fused products of ``kernels.gemv`` are faster than cuBLAS and kernels between."""


class DecodeForward:
    """Runs the layers of ``decoder`` over one token a row."""

    def __init__(self, decoder: LlamaDecoder, kv_cache: Tensor, block_tables: Tensor) -> None:
        """Keep the tensors that every step uses."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_tables = block_tables

    def __call__(self, residual: Tensor, positions: Tensor, slots: Tensor, work: DecodeWork) -> Tensor:
        """Return logits [rows, vocab] in the model's dtype.

        Args:
            residual: [rows, hidden], the tokens' embeddings; overwritten.
            positions: [rows] int64.
            slots: [rows] int64, negative for padding.
            work: the pieces of the rows' contexts.
        """
        is_few = residual.shape[0] <= GEMV_ROWS and self._decoder._group.size == 1
        run = self._run_few if is_few else self._run_many
        return run(residual, positions, slots, work)

    def _run_few(self, residual: Tensor, positions: Tensor, slots: Tensor, work: DecodeWork) -> Tensor:
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        for index, layer in enumerate(decoder._layers):
            qkv = norm_linear(residual, layer.attention_norm, layer.qkv._weight, layer.qkv._bias, eps)
            attended = self._attend(layer, index, qkv, positions, slots, work)
            linear_add(attended, layer.attention_out._weight, residual)
            gated = norm_gate_up(residual, layer.mlp_norm, layer.gate_up._weight, eps)
            linear_add(gated, layer.down._weight, residual)
        return norm_linear(residual, decoder._norm, decoder._head._weight, None, eps)

    def _run_many(self, residual: Tensor, positions: Tensor, slots: Tensor, work: DecodeWork) -> Tensor:
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        group, layers = decoder._group, decoder._layers
        hidden = rms_norm(residual, layers[0].attention_norm, eps)
        for index, layer in enumerate(layers):
            attended = self._attend(layer, index, layer.qkv(hidden), positions, slots, work)
            out = group.all_reduce(layer.attention_out(attended))
            hidden = add_rms_norm(out, residual, layer.mlp_norm, eps)
            out = group.all_reduce(layer.down(silu_mul(layer.gate_up(hidden))))
            norm = layers[index + 1].attention_norm if index + 1 < len(layers) else decoder._norm
            hidden = add_rms_norm(out, residual, norm, eps)
        return group.gather_columns(decoder._head(hidden), decoder._vocab_widths)

    def _attend(
        self,
        layer: DecoderLayer,
        index: int,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        work: DecodeWork,
    ) -> Tensor:
        decoder = self._decoder
        q = rope_kv_write(
            qkv,
            positions,
            slots,
            decoder._cos_sin,
            self._kv_cache,
            index,
            layer.q_norm,
            layer.k_norm,
            decoder.config.rms_norm_eps,
        )
        attended = decode_attention_over_work(
            q, self._kv_cache, index, self._block_tables, work, decoder._scale
        )
        return attended.view(qkv.shape[0], -1)
