"""A decode step of the Llama family on CUDA, from embeddings to logits: fixed shapes, no host in between."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode_attention_work import DecodeAttention, decode_attention
from kernels.few_rows import few_rows_gate_up, few_rows_linear, fits, linear_parts
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import rope_kv_write
from workers.model.linear import Linear, LinearLayer, normed_for
from workers.model.llama import LlamaDecoder
from workers.model.mlp import DenseMlp
from workers.model.shard_loader import DecoderLayer
from workers.model.step_attention import scaled


class DecodeForward:
    """Runs the layers of ``decoder`` over one token a row."""

    def __init__(self, decoder: LlamaDecoder, kv_cache: Tensor, logits: Tensor) -> None:
        """Keep what every step uses; ``logits`` [max rows, this rank's vocabulary] takes the results."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._logits = logits
        self._is_fused = decoder.fuses_one_row

    def __call__(
        self, residual: Tensor, positions: Tensor, slots: Tensor, attention: DecodeAttention
    ) -> Tensor:
        """Return logits [rows, this rank's vocabulary] in the model's dtype, in the memory given for them.

        Args:
            residual: [rows, hidden], the tokens' embeddings; overwritten.
            positions: [rows] int64.
            slots: [rows] int64, negative for padding.
            attention: how the rows' contexts are cut.
        """
        is_one = residual.shape[0] == 1 and self._is_fused
        if len(self._decoder.vocab.own) < self._decoder.vocab.size:
            self._decoder.group.all_reduce(residual)
        if is_one:
            run = self._run_one if self._decoder.group.size == 1 else self._run_one_of_group
        else:
            run = self._run_few if self._has_few(residual.shape[0]) else self._run_many
        if self._decoder.embedding_scale != 1.0:
            residual.mul_(self._decoder.embedding_scale)
        return run(residual, positions, slots, attention)

    def _run_one(
        self, residual: Tensor, positions: Tensor, slots: Tensor, attention: DecodeAttention
    ) -> Tensor:
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        for index, (layer, mlp) in enumerate(self._layers()):
            qkv = layer.qkv.normed(residual, layer.attention_norm, eps)
            attended = self._attend(layer, index, qkv, positions, slots, attention)
            layer.attention_out.add_to(residual, attended)
            gated = mlp.gate_up.normed_gate_up(residual, layer.mlp_norm, eps)
            mlp.down.add_to(residual, gated)
        return decoder.capped(decoder.head.normed(residual, decoder.norm, eps, self._logits[:1]))

    def _run_one_of_group(
        self, residual: Tensor, positions: Tensor, slots: Tensor, attention: DecodeAttention
    ) -> Tensor:
        """Sums over ranks stand where ``_run_one`` folds residual and norm into products."""
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        hidden = rms_norm(residual, decoder.layers[0].attention_norm, eps)
        for index, (layer, mlp) in enumerate(self._layers()):
            qkv = layer.qkv.normed(hidden, None, eps)
            attended = self._attend(layer, index, qkv, positions, slots, attention)
            out = layer.attention_out.normed(attended, None, eps)
            hidden = decoder.group.add_rms_norm(out, residual, layer.mlp_norm, eps)
            gated = mlp.gate_up.normed_gate_up(hidden, None, eps)
            out = mlp.down.normed(gated, None, eps)
            hidden = decoder.group.add_rms_norm(out, residual, self._next_norm(index), eps)
        return decoder.capped(decoder.head.normed(hidden, None, eps, self._logits[:1]))

    def _has_few(self, num_rows: int) -> bool:
        """True where our own products are faster than cuBLAS's."""
        return self._is_fused and all(
            isinstance(linear, Linear) and linear.bias is None and fits(linear.weight, num_rows)
            for linear in self._decoder.linears()
        )

    def _run_few(
        self, residual: Tensor, positions: Tensor, slots: Tensor, attention: DecodeAttention
    ) -> Tensor:
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        hidden = rms_norm(residual, decoder.layers[0].attention_norm, eps)
        for index, (layer, mlp) in enumerate(self._layers()):
            # cuBLAS is faster for this weight, which has too many rows for parts and too few for whole tiles.
            attended = self._attend(layer, index, layer.qkv(hidden), positions, slots, attention)
            parts = linear_parts(attended, _weight(layer.attention_out))
            hidden = decoder.group.add_rms_norm_of_parts(parts, residual, layer.mlp_norm, eps)
            gated = few_rows_gate_up(hidden, _weight(mlp.gate_up))
            parts = linear_parts(gated, _weight(mlp.down))
            hidden = decoder.group.add_rms_norm_of_parts(parts, residual, self._next_norm(index), eps)
        logits = few_rows_linear(hidden, _weight(decoder.head), self._logits[: hidden.shape[0]])
        return decoder.capped(logits)

    def _run_many(
        self, residual: Tensor, positions: Tensor, slots: Tensor, attention: DecodeAttention
    ) -> Tensor:
        decoder, layers = self._decoder, self._decoder.layers
        hidden = normed_for(
            layers[0].qkv, residual, None, layers[0].attention_norm, decoder.config.rms_norm_eps
        )
        for index, layer in enumerate(layers):
            attended = self._attend(layer, index, layer.qkv(hidden), positions, slots, attention)
            hidden = decoder.finish_layer(index, attended, residual)
        head = decoder.head
        if isinstance(head, Linear) and isinstance(hidden, Tensor):
            logits = torch.mm(hidden, head.weight.t(), out=self._logits[: hidden.shape[0]])
            return decoder.capped(logits)
        return decoder.capped(self._logits[: residual.shape[0]].copy_(head(hidden)))

    def _layers(self) -> list[tuple[DecoderLayer, DenseMlp]]:
        """Layers with the MLPs that ``LlamaDecoder.fuses_one_row`` vouches for."""
        layers = self._decoder.layers
        return [(layer, layer.mlp) for layer in layers if isinstance(layer.mlp, DenseMlp)]

    def _next_norm(self, index: int) -> Tensor:
        """The norm that follows layer ``index``."""
        layers = self._decoder.layers
        return layers[index + 1].attention_norm if index + 1 < len(layers) else self._decoder.norm

    def _attend(
        self,
        layer: DecoderLayer,
        index: int,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: DecodeAttention,
    ) -> Tensor:
        decoder = self._decoder
        q = rope_kv_write(
            qkv,
            positions,
            slots,
            decoder.cos_sin[index],
            self._kv_cache,
            index,
            layer.q_norm,
            layer.k_norm,
            decoder.config.rms_norm_eps,
            layer.kv_scales,
        )
        key_scale, value_scale = layer.kv_scales
        attended = decode_attention(
            q,
            self._kv_cache,
            index,
            attention,
            decoder.scale * key_scale,
            window=layer.window,
            soft_cap=decoder.config.attention_soft_cap,
        )
        return scaled(attended, value_scale).view(qkv.shape[0], -1)


def _weight(linear: LinearLayer) -> Tensor:
    assert isinstance(linear, Linear), "asked before"
    return linear.weight
