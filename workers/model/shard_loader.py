"""Loads one rank's share of a model's weights, layer by layer; formats are ``quantized``'s business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import Quantization
from workers.model.linear import Linear, LinearLayer
from workers.model.quantized.linears import make_linear
from workers.model.quantized.readers import LinearPart
from workers.model.sharding import Shard
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
    mlp_norm: Tensor
    gate_up: LinearLayer
    down: LinearLayer

    def linears(self) -> list[LinearLayer]:
        """All projections."""
        return [self.qkv, self.attention_out, self.gate_up, self.down]


class ShardLoader:
    """Reads whole tensors and keeps this rank's rows or columns."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        source: TensorSource,
        quantization: Quantization | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Read from ``source`` what ``shard`` says, kept as ``quantization`` says, for activations of ``dtype``."""
        self._config = config
        self._shard = shard
        self._source = source
        self._quantization = quantization
        self._device = device
        self._dtype = dtype

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that every rank holds."""
        return self._source.read(name, shape).to(self._device, self._dtype)

    def embedding(self) -> Tensor:
        """This rank's rows of the embedding, in full."""
        return self._vocab_rows("model.embed_tokens.weight")

    def head(self, embedding: Tensor) -> LinearLayer:
        """The projection to logits, which may be the embedding itself."""
        config = self._config
        if config.tie_word_embeddings:
            return Linear(embedding)
        return self._linear([("lm_head", config.vocab_size, self._shard.vocab)], config.hidden_size)

    def layer(self, index: int) -> DecoderLayer:
        """Everything of layer ``index``."""
        config, shard = self._config, self._shard
        hidden, head_dim = config.hidden_size, config.head_dim
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        q_rows, kv_rows = _scaled(shard.q_heads, head_dim), _scaled(shard.kv_heads, head_dim)
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        projections = [
            (attention + "q_proj", q_size, q_rows),
            (attention + "k_proj", kv_size, kv_rows),
            (attention + "v_proj", kv_size, kv_rows),
        ]
        bias = None
        if config.has_qkv_bias:
            parts = [
                self._source.read(f"{name}.bias", (size,))[rows.start : rows.stop]
                for name, size, rows in projections
            ]
            bias = torch.cat(parts).to(self._device, self._dtype)
        q_norm = k_norm = None
        if config.has_qk_norm:
            q_norm = self.whole(attention + "q_norm.weight", (head_dim,))
            k_norm = self.whole(attention + "k_norm.weight", (head_dim,))
        width = config.intermediate_size
        gate_up = [(f"{prefix}mlp.{name}", width, shard.intermediate) for name in ("gate_proj", "up_proj")]
        return DecoderLayer(
            attention_norm=self.whole(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._linear(projections, hidden, bias),
            q_norm=q_norm,
            k_norm=k_norm,
            attention_out=self._columns(attention + "o_proj", (hidden, q_size), q_rows),
            mlp_norm=self.whole(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=self._linear(gate_up, hidden),
            down=self._columns(prefix + "mlp.down_proj", (hidden, width), shard.intermediate),
        )

    def _vocab_rows(self, name: str) -> Tensor:
        shape, rows = (self._config.vocab_size, self._config.hidden_size), self._shard.vocab
        whole = self._source.read(name, shape)[rows.start : rows.stop]
        return whole.to(self._device, self._dtype).contiguous()

    def _columns(self, name: str, shape: tuple[int, int], columns: range) -> LinearLayer:
        return self._make([LinearPart(name, shape, range(shape[0]), columns)])

    def _linear(
        self, projections: list[tuple[str, int, range]], width: int, bias: Tensor | None = None
    ) -> LinearLayer:
        """Projections of one input: name, rows of the whole, rows of this rank."""
        parts = [LinearPart(name, (size, width), rows, range(width)) for name, size, rows in projections]
        return self._make(parts, bias)

    def _make(self, parts: list[LinearPart], bias: Tensor | None = None) -> LinearLayer:
        weights = [part.read(self._source, self._quantization, self._device) for part in parts]
        return make_linear(weights, bias, self._device, self._dtype)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
