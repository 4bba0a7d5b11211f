"""Loads one rank's share of a model's weights, layer by layer; formats are ``quantized``'s business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rope_kv_write import KVScales
from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import Quantization
from workers.model.fixed_rows import CPU_ROWS, CUDA_ROWS, FixedRows
from workers.model.linear import Linear, LinearLayer
from workers.model.mlp import DenseMlp, ExpertMlp, Mlp, SeparateExpertMlp
from workers.model.quantized.expert_weights import make_expert_weights
from workers.model.quantized.linears import make_linear
from workers.model.quantized.readers import LinearPart
from workers.model.quantized.stored_weight import StoredWeight
from workers.model.rope import head_order
from workers.model.sharding import Shard, split_evenly
from workers.model.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One rank's weights of one layer."""

    attention_norm: Tensor
    qkv: LinearLayer
    q_norm: Tensor | None
    """None for families that do not normalise heads, as ``k_norm``."""
    k_norm: Tensor | None
    attention_out: LinearLayer
    post_attention_norm: Tensor | None
    """Of attention's output; None for families that add it as it is, as ``post_mlp_norm``."""
    mlp_norm: Tensor
    mlp: Mlp
    post_mlp_norm: Tensor | None
    window: int
    """Tokens that a token attends to; 0: all."""
    kv_scales: KVScales
    """Of an 8-bit KV cache."""

    def linears(self) -> list[LinearLayer]:
        """All projections."""
        return [self.qkv, self.attention_out, *self.mlp.linears()]


class ShardLoader:
    """Reads whole tensors and keeps this rank's rows or columns."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        tp_rank: int,
        tp_size: int,
        source: TensorSource,
        quantization: Quantization | None,
        device: torch.device,
        dtype: torch.dtype,
        is_deterministic: bool = False,
    ) -> None:
        """Read from ``source`` what ``shard`` says, kept as ``quantization`` says, for activations of ``dtype``.

        With ``is_deterministic``, a token's products do not depend on the others of its step.
        """
        self._config = config
        self._shard = shard
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._source = source
        self._quantization = quantization
        self._device = device
        self._dtype = dtype
        self._is_deterministic = is_deterministic

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that every rank holds."""
        return self._source.read(name, shape).to(self._device, self._dtype)

    def norm(self, name: str, width: int) -> Tensor:
        """A norm's weight as it multiplies."""
        if not self._config.has_offset_norms:
            return self.whole(name, (width,))
        # The sum would lose digits in 16 bits.
        return self._source.read(name, (width,)).to(self._device, torch.float32) + 1.0

    def embedding(self) -> Tensor:
        """This rank's rows of the embedding, in full."""
        return self._vocab_rows("model.embed_tokens.weight")

    def head(self, embedding: Tensor) -> LinearLayer:
        """The projection to logits, which may be the embedding itself."""
        config = self._config
        if config.tie_word_embeddings:
            return self._finished(Linear(embedding))
        hidden = config.hidden_size
        return self._make(
            [LinearPart("lm_head", (config.vocab_size, hidden), self._shard.vocab, range(hidden))]
        )

    def layer(self, index: int) -> DecoderLayer:
        """Everything of layer ``index``."""
        config = self._config
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        hidden, head_dim = config.hidden_size, config.head_dim
        q_norm = k_norm = post_attention_norm = post_mlp_norm = None
        if config.has_qk_norm:
            order = self._head_order()
            q_norm = self.norm(attention + "q_norm.weight", head_dim)[order]
            k_norm = self.norm(attention + "k_norm.weight", head_dim)[order]
        mlp_norm = "post_attention_layernorm.weight"
        if config.has_post_norms:
            post_attention_norm = self.norm(prefix + mlp_norm, hidden)
            post_mlp_norm = self.norm(prefix + "post_feedforward_layernorm.weight", hidden)
            mlp_norm = "pre_feedforward_layernorm.weight"
        q_rows = _scaled(self._shard.q_heads, head_dim)
        return DecoderLayer(
            attention_norm=self.norm(prefix + "input_layernorm.weight", hidden),
            qkv=self._qkv(attention),
            q_norm=q_norm,
            k_norm=k_norm,
            attention_out=self._columns(
                attention + "o_proj", (hidden, config.num_heads * head_dim), q_rows, config.has_out_bias
            ),
            post_attention_norm=post_attention_norm,
            mlp_norm=self.norm(prefix + mlp_norm, hidden),
            mlp=self._experts(prefix) if config.has_experts(index) else self._mlp(prefix),
            post_mlp_norm=post_mlp_norm,
            window=config.window(index),
            kv_scales=(self._kv_scale(attention, "k"), self._kv_scale(attention, "v")),
        )

    def _kv_scale(self, attention: str, kind: str) -> float:
        """As calibrated, under either of the names that tools give it; else 1, as other engines take it."""
        for name in (f"{attention}{kind}_scale", f"{attention}{kind}_proj.{kind}_scale"):
            if self._source.has(name):
                return float(self._source.read(name, None).reshape(-1)[0])
        return 1.0

    def _qkv(self, attention: str) -> LinearLayer:
        config, shard = self._config, self._shard
        head_dim, hidden = config.head_dim, config.hidden_size
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        q_rows, kv_rows = _scaled(shard.q_heads, head_dim), _scaled(shard.kv_heads, head_dim)
        if config.architecture == "phi3":
            # One stored projection holds all three.
            name, size = attention + "qkv_proj", q_size + 2 * kv_size
            starts = (0, q_size, q_size + kv_size)
            sizes = (size, size, size)
            names = (name, name, name)
        else:
            starts, sizes = (0, 0, 0), (q_size, kv_size, kv_size)
            names = (attention + "q_proj", attention + "k_proj", attention + "v_proj")
        parts = [
            LinearPart(name, (size, hidden), range(start + rows.start, start + rows.stop), range(hidden))
            for name, size, start, rows in zip(names, sizes, starts, (q_rows, kv_rows, kv_rows), strict=True)
        ]
        weights = [self._read(part) for part in parts]
        order = self._head_order()
        if config.rotary_dim is not None:
            weights[:2] = [
                weight.reorder_rows(
                    (
                        torch.arange(0, weight.shape[0], head_dim, device=order.device)[:, None] + order
                    ).flatten()
                )
                for weight in weights[:2]
            ]
        bias = None
        if config.has_qkv_bias:
            assert config.rotary_dim is None, "no family has both biases and partly rotated heads"
            bias = torch.cat([self._bias(part) for part in parts]).to(self._device, self._dtype)
        return make_linear(weights, bias, self._device, self._dtype)

    def _head_order(self) -> Tensor:
        config = self._config
        return head_order(config.head_dim, config.rotary_dim or config.head_dim).to(self._device)

    def _mlp(self, prefix: str) -> DenseMlp:
        config, columns = self._config, self._shard.intermediate
        if config.architecture == "phi3":
            width, hidden = config.intermediate_size, config.hidden_size
            name, shape = prefix + "mlp.gate_up_proj", (2 * width, hidden)
            halves = [columns, range(width + columns.start, width + columns.stop)]
            parts = [LinearPart(name, shape, rows, range(hidden)) for rows in halves]
            down = self._columns(prefix + "mlp.down_proj", (hidden, width), columns)
            return DenseMlp(self._make(parts), down, config.activation)
        names = (prefix + "mlp.gate_proj", prefix + "mlp.up_proj", prefix + "mlp.down_proj")
        return self._gated(names, config.intermediate_size, columns, config.has_mlp_bias)

    def _gated(
        self, names: tuple[str, str, str], width: int, columns: range, has_bias: bool = False
    ) -> DenseMlp:
        config = self._config
        hidden = config.hidden_size
        parts = [LinearPart(name, (width, hidden), columns, range(hidden)) for name in names[:2]]
        bias = None
        if has_bias:
            bias = torch.cat([self._bias(part) for part in parts]).to(self._device, self._dtype)
        gate_up = self._make(parts, bias)
        down = self._columns(names[2], (hidden, width), columns, has_bias)
        return DenseMlp(gate_up, down, config.activation)

    def _experts(self, prefix: str) -> Mlp:
        """Every rank holds its columns of every expert."""
        config = self._config
        shape = config.experts
        assert shape is not None, "only layers with experts come here"
        columns = split_evenly(shape.intermediate_size, self._tp_size, self._tp_rank)
        if config.architecture == "mixtral":
            block, kinds = prefix + "block_sparse_moe.", ("w1", "w3", "w2")
        else:
            block, kinds = prefix + "mlp.", ("gate_proj", "up_proj", "down_proj")
        router_shape = (shape.num_experts, config.hidden_size)
        router = self._finished(Linear(self.whole(block + "gate.weight", router_shape)))
        names = [
            tuple(f"{block}experts.{expert}.{kind}" for kind in kinds) for expert in range(shape.num_experts)
        ]
        if self._device.type == "cpu":
            mlps = [
                self._gated((gate, up, down), shape.intermediate_size, columns) for gate, up, down in names
            ]
            return SeparateExpertMlp(shape, router, mlps)
        hidden, width = config.hidden_size, shape.intermediate_size
        gate_ups = [
            self._read(LinearPart(name, (width, hidden), columns, range(hidden)))
            for gate, up, _ in names
            for name in (gate, up)
        ]
        downs = [
            self._read(LinearPart(down, (hidden, width), range(hidden), columns)) for _, _, down in names
        ]
        return ExpertMlp(
            shape,
            router,
            make_expert_weights(gate_ups, shape.num_experts, self._device, self._dtype),
            make_expert_weights(downs, shape.num_experts, self._device, self._dtype),
        )

    def _bias(self, part: LinearPart) -> Tensor:
        return self._source.read(f"{part.name}.bias", part.shape[:1])[part.rows.start : part.rows.stop]

    def _vocab_rows(self, name: str) -> Tensor:
        shape, rows = (self._config.vocab_size, self._config.hidden_size), self._shard.vocab
        whole = self._source.read(name, shape)[rows.start : rows.stop]
        return whole.to(self._device, self._dtype).contiguous()

    def _columns(
        self, name: str, shape: tuple[int, int], columns: range, has_bias: bool = False
    ) -> LinearLayer:
        """A layer whose inputs are split; its outputs are summed over ranks, so that one of them has the bias."""
        part = LinearPart(name, shape, range(shape[0]), columns)
        bias = None
        if has_bias and self._tp_rank == 0:
            bias = self._bias(part).to(self._device, self._dtype)
        return self._make([part], bias)

    def _make(self, parts: list[LinearPart], bias: Tensor | None = None) -> LinearLayer:
        stored = [self._read(part) for part in parts]
        return self._finished(make_linear(stored, bias, self._device, self._dtype))

    def _finished(self, linear: LinearLayer) -> LinearLayer:
        if not self._is_deterministic:
            return linear
        return FixedRows(linear, CPU_ROWS if self._device.type == "cpu" else CUDA_ROWS)

    def _read(self, part: LinearPart) -> StoredWeight:
        return part.read(self._source, self._quantization, self._device)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
