"""The Llama family's decoder over a paged KV cache: Llama, Mistral, SmolLM, Qwen2 (biases), Qwen3 (q and k norms)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.decode_attention_work import DecodeAttention, decode_attention
from kernels.paged_decode_attention import paged_decode_attention
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from workers.checkpoint.model_config import ModelConfig
from workers.model.linear import Linear
from workers.model.rope import rope_table
from workers.model.sharding import Shard, make_shard
from workers.model.step_inputs import StepInputs
from workers.model.tensor_parallel import TensorParallelGroup
from workers.model.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One rank's weights of one layer."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    """None for families that do not normalise heads, as ``k_norm``."""
    k_norm: Tensor | None
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    def linears(self) -> list[Linear]:
        """All projections."""
        return [self.qkv, self.attention_out, self.gate_up, self.down]


class LlamaDecoder:
    """One rank's part of a decoder: token ids in, logits of the sampling rows out."""

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        num_positions: int,
        progress: Callable[[float], None],
    ) -> None:
        """Load this rank's weights from ``source``, layer by layer."""
        self.config = config
        self.shard = make_shard(config, group.rank, group.size)
        self.device = device
        self.dtype = dtype
        self.group = group
        loader = _ShardLoader(config, self.shard, source, device, dtype, is_first=group.rank == 0)
        self.scale = config.head_dim**-0.5
        self.vocab_widths = [len(make_shard(config, rank, group.size).vocab) for rank in range(group.size)]
        self.embedding = loader.embedding()
        self.layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            self.layers.append(loader.layer(index))
            progress((index + 1) / (config.num_layers + 1))
        self.norm = loader.whole("model.norm.weight", (config.hidden_size,))
        self.head = Linear(self.embedding) if config.tie_word_embeddings else loader.head()
        self.cos_sin = rope_table(config, num_positions).to(device)
        progress(1.0)

    def linears(self) -> list[Linear]:
        """All projections, the head last."""
        return [linear for layer in self.layers for linear in layer.linears()] + [self.head]

    def pack(self) -> None:
        """Lay out the linear weights for this CPU."""
        for linear in self.linears():
            linear.pack()

    def forward(self, inputs: StepInputs, kv_cache: Tensor) -> Tensor:
        """Write the step's keys and values to ``kv_cache`` and return logits [num_samples, vocab]."""
        attended, residual = self.attend_all(inputs, kv_cache)
        return self.logits(attended, residual, inputs.sample_tokens)

    def attend_all(self, inputs: StepInputs, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers up to the last one's attention; return what it attended to and the residual."""
        eps = self.config.rms_norm_eps
        residual = self._embed(inputs.token_ids)
        hidden = rms_norm(residual, self.layers[0].attention_norm, eps)
        for index, layer in enumerate(self.layers[:-1]):
            attended = self._attend(layer, index, hidden, inputs, kv_cache)
            hidden = self._finish_layer(layer, attended, residual, self.layers[index + 1].attention_norm)
        return self._attend(self.layers[-1], len(self.layers) - 1, hidden, inputs, kv_cache), residual

    def logits(self, attended: Tensor, residual: Tensor, sample_tokens: Tensor) -> Tensor:
        """Finish what ``attend_all`` began, for some tokens: nothing after the last attention looks at others."""
        if sample_tokens.shape[0] == 0:
            return residual.new_empty(0, self.config.vocab_size)
        hidden = self.hidden(attended, residual, sample_tokens)
        return self.group.gather_columns(self.head(hidden), self.vocab_widths)

    def hidden(self, attended: Tensor, residual: Tensor, tokens: Tensor) -> Tensor:
        """Final hidden states of some tokens of the step, normalised; changes neither argument."""
        return self._finish_layer(self.layers[-1], attended[tokens], residual[tokens], self.norm)

    def _finish_layer(
        self, layer: DecoderLayer, attended: Tensor, residual: Tensor, next_norm: Tensor
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        hidden = self.group.add_rms_norm(layer.attention_out(attended), residual, layer.mlp_norm, eps)
        return self.group.add_rms_norm(layer.down(silu_mul(layer.gate_up(hidden))), residual, next_norm, eps)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return torch.nn.functional.embedding(token_ids, self.embedding)
        vocab = self.shard.vocab
        local = token_ids - vocab.start
        is_foreign = (local < 0) | (local >= len(vocab))
        rows = torch.nn.functional.embedding(local.masked_fill(is_foreign, 0), self.embedding)
        return self.group.all_reduce(rows.masked_fill_(is_foreign[:, None], 0.0))

    def _attend(
        self, layer: DecoderLayer, index: int, hidden: Tensor, inputs: StepInputs, kv_cache: Tensor
    ) -> Tensor:
        """Return [num_padded_tokens, heads of this rank * head_dim]."""
        num_tokens, num_decodes = inputs.num_tokens, inputs.num_decodes
        q = rope_kv_write(
            layer.qkv(hidden),
            inputs.positions,
            inputs.slots,
            self.cos_sin,
            kv_cache,
            index,
            layer.q_norm,
            layer.k_norm,
            self.config.rms_norm_eps,
        )
        if inputs.decode_work is not None:
            return self._attend_by_work(q, index, inputs, inputs.decode_work, kv_cache).view(num_tokens, -1)
        parts: list[Tensor] = []
        if num_decodes:
            parts.append(
                paged_decode_attention(
                    q[:num_decodes],
                    kv_cache,
                    index,
                    inputs.decode_block_tables,
                    inputs.decode_context_lens,
                    self.scale,
                    inputs.max_decode_context_len,
                )
            )
        if num_decodes < num_tokens:
            parts.append(
                prefill_attention(
                    q[num_decodes:],
                    kv_cache,
                    index,
                    inputs.prefill_block_tables,
                    inputs.prefill_query_starts,
                    inputs.prefill_context_lens,
                    self.scale,
                )
            )
        if hidden.shape[0] > num_tokens:
            parts.append(q.new_zeros(hidden.shape[0] - num_tokens, *q.shape[1:]))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.view(hidden.shape[0], -1)

    def _attend_by_work(
        self, q: Tensor, index: int, inputs: StepInputs, work: DecodeAttention, kv_cache: Tensor
    ) -> Tensor:
        """Both kinds of rows into one tensor; on CUDA."""
        out = torch.empty_like(q)
        if inputs.num_decodes:
            decode_attention(q, kv_cache, index, work, self.scale, out)
        if inputs.num_decodes < inputs.num_tokens:
            prefill_attention(
                q,
                kv_cache,
                index,
                inputs.prefill_block_tables,
                inputs.prefill_query_starts,
                inputs.prefill_context_lens,
                self.scale,
                out,
            )
        return out


class _ShardLoader:
    """Reads whole tensors and keeps this rank's rows or columns."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        is_first: bool,
    ) -> None:
        self._config = config
        self._shard = shard
        self._source = source
        self._device = device
        self._dtype = dtype
        self._is_first = is_first

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.read(name, shape).to(self._device, self._dtype)

    def embedding(self) -> Tensor:
        return self._vocab_rows("model.embed_tokens.weight")

    def head(self) -> Linear:
        return Linear(self._vocab_rows("lm_head.weight"))

    def layer(self, index: int) -> DecoderLayer:
        config, shard = self._config, self._shard
        hidden, head_dim = config.hidden_size, config.head_dim
        prefix = f"model.layers.{index}."
        q_rows, kv_rows = _scaled(shard.q_heads, head_dim), _scaled(shard.kv_heads, head_dim)
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        projections = [("q_proj", q_size, q_rows), ("k_proj", kv_size, kv_rows), ("v_proj", kv_size, kv_rows)]
        attention = prefix + "self_attn."
        qkv = [
            self._rows(f"{attention}{name}.weight", (size, hidden), rows) for name, size, rows in projections
        ]
        bias = None
        if config.has_qkv_bias:
            parts = [self._rows(f"{attention}{name}.bias", (size,), rows) for name, size, rows in projections]
            bias = torch.cat(parts).to(self._device, self._dtype)
        q_norm = k_norm = None
        if config.has_qk_norm:
            q_norm = self.whole(attention + "q_norm.weight", (head_dim,))
            k_norm = self.whole(attention + "k_norm.weight", (head_dim,))
        mlp_shape = (config.intermediate_size, hidden)
        gate_up = [
            self._rows(f"{prefix}mlp.{name}.weight", mlp_shape, shard.intermediate)
            for name in ("gate_proj", "up_proj")
        ]
        return DecoderLayer(
            attention_norm=self.whole(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._linear(qkv, bias),
            q_norm=q_norm,
            k_norm=k_norm,
            attention_out=self._columns(attention + "o_proj.weight", (hidden, q_size), q_rows),
            mlp_norm=self.whole(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=self._linear(gate_up),
            down=self._columns(prefix + "mlp.down_proj.weight", mlp_shape[::-1], shard.intermediate),
        )

    def _vocab_rows(self, name: str) -> Tensor:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._rows(name, shape, self._shard.vocab).to(self._device, self._dtype).contiguous()

    def _rows(self, name: str, shape: tuple[int, ...], rows: range) -> Tensor:
        return self._source.read(name, shape)[rows.start : rows.stop]

    def _columns(self, name: str, shape: tuple[int, ...], columns: range) -> Linear:
        weight = self._source.read(name, shape)[:, columns.start : columns.stop]
        return self._linear([weight])

    def _linear(self, parts: list[Tensor], bias: Tensor | None = None) -> Linear:
        weight = torch.cat([part.to(self._device, self._dtype) for part in parts]).contiguous()
        return Linear(weight, bias)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
