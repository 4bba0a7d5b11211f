"""Llama's decoder and its relatives over a paged KV cache; what families differ by stands in ``ModelConfig``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from workers.checkpoint.generic_config import ARCHITECTURE as TRANSFORMERS
from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import Quantization
from workers.model.kv_pool import KVLayout
from workers.model.linear import Activations, LinearLayer, normed_for
from workers.model.mlp import Mlp
from workers.model.quantized.linears import narrow_head
from workers.model.rope import rope_table
from workers.model.shard_loader import DecoderLayer, ShardLoader
from workers.model.sharding import make_shard
from workers.model.step_attention import attend, scaled
from workers.model.step_inputs import StepInputs
from workers.model.tensor_parallel import PendingRows, TensorParallelGroup, vocab_of
from workers.model.tensor_source import TensorSource


def is_computed_in_parts(config: ModelConfig) -> bool:
    """True where sums over ranks of one part of a step's tokens can hide behind products of another.

    Norms between a product and the residual wait for the sum.
    """
    return config.architecture != TRANSFORMERS and not config.has_post_norms


class LlamaDecoder:
    """One rank's part of a decoder: token ids in, logits of the sampling rows out."""

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup,
        source: TensorSource,
        quantization: Quantization | None,
        device: torch.device,
        dtype: torch.dtype,
        num_positions: int,
        progress: Callable[[float], None],
        is_deterministic: bool = False,
    ) -> None:
        """Load this rank's weights from ``source``, layer by layer; see ``ShardLoader`` for the last argument."""
        self.config = config
        self.shard = make_shard(config, group.rank, group.size)
        self.device = device
        self.dtype = dtype
        self.group = group
        loader = ShardLoader(
            config, self.shard, group.rank, group.size, source, quantization, device, dtype, is_deterministic
        )
        self.scale = config.score_scale
        self.vocab = vocab_of(
            group, [make_shard(config, rank, group.size).vocab for rank in range(group.size)]
        )
        self.embedding = loader.embedding()
        self.layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            self.layers.append(loader.layer(index))
            progress((index + 1) / (config.num_layers + 1))
        self.norm = loader.norm("model.norm.weight", config.hidden_size)
        self.head = loader.head(self.embedding)
        kinds = [config.rope_kind(index) for index in range(config.num_layers)]
        tables = {kind: rope_table(config, num_positions, kind).to(device) for kind in dict.fromkeys(kinds)}
        self.cos_sin = [tables[kind] for kind in kinds]
        # As transformers rounds it.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        progress(1.0)

    def kv_layout(self, block_size: int, dtype: torch.dtype) -> KVLayout:
        """Shape of this rank's KV cache."""
        return KVLayout.of(self.config, self.shard, block_size, dtype)

    def linears(self) -> list[LinearLayer]:
        """All projections, the head last."""
        return [linear for layer in self.layers for linear in layer.linears()] + [self.head]

    @property
    def fuses_one_row(self) -> bool:
        """True where products of one row can take norms, residual and SiLU in (``LinearLayer.normed`` and so on)."""
        config = self.config
        is_plain = config.activation == "silu" and config.experts is None and not config.has_post_norms
        has_bias = config.has_out_bias or config.has_mlp_bias
        return is_plain and not has_bias and all(linear.fuses_one_row for linear in self.linears())

    def pack(self, is_narrow: bool = False) -> None:
        """Lay out the linear weights for this CPU; see ``LinearLayer.pack``. The head becomes narrow as well then."""
        if is_narrow and self.dtype == torch.float32:
            self.head = narrow_head(self.head)
        for linear in self.linears():
            linear.pack(is_narrow)

    def keep_copies(self, most_bytes: int) -> None:
        """Keep coded weights in full as well, if that takes no more memory: many tokens are multiplied faster then."""
        linears = self.linears()
        if sum(linear.copy_bytes for linear in linears) <= most_bytes:
            for linear in linears:
                linear.keep_copy()

    def forward(self, inputs: StepInputs, kv_cache: Tensor) -> Tensor:
        """Write the step's keys and values to ``kv_cache`` and return logits [num_samples, this rank's vocabulary]."""
        attended, residual = self.attend_all(inputs, kv_cache)
        return self.logits(attended, residual, inputs.sample_tokens)

    def attend_all(self, inputs: StepInputs, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers up to the last one's attention; return what it attended to and the residual."""
        eps = self.config.rms_norm_eps
        residual = self._embed(inputs.token_ids)
        parts = self.group.overlapped_parts(residual.shape[0])
        if parts is not None and is_computed_in_parts(self.config):
            return self._attend_all_in_parts(inputs, kv_cache, residual, parts), residual
        first = self.layers[0]
        hidden = normed_for(first.qkv, residual, None, first.attention_norm, eps)
        for index, layer in enumerate(self.layers[:-1]):
            attended = self._attend(layer, index, hidden, inputs, kv_cache)
            hidden = self.finish_layer(index, attended, residual)
        return self._attend(self.layers[-1], len(self.layers) - 1, hidden, inputs, kv_cache), residual

    def logits(self, attended: Tensor, residual: Tensor, sample_tokens: Tensor) -> Tensor:
        """Finish what ``attend_all`` began, for some tokens: nothing after the last attention looks at others."""
        if sample_tokens.shape[0] == 0:
            return residual.new_empty(0, len(self.vocab.own))
        hidden = self.hidden(attended, residual, sample_tokens)
        return self.capped(self.head(hidden))

    def capped(self, logits: Tensor) -> Tensor:
        """Bend ``logits`` towards the family's limit, in place."""
        cap = self.config.logit_soft_cap
        return logits if cap == 0 else logits.div_(cap).tanh_().mul_(cap)

    def hidden(self, attended: Tensor, residual: Tensor, tokens: Tensor) -> Tensor:
        """Final hidden states of some tokens of the step, normalised; changes neither argument."""
        hidden = self.finish_layer(len(self.layers) - 1, attended[tokens], residual[tokens])
        assert isinstance(hidden, Tensor), "the head is given plain activations"
        return hidden

    def finish_layer(self, index: int, attended: Tensor, residual: Tensor) -> Activations:
        """Do what follows a layer's attention; return what the next layer's first product, or the head, takes."""
        layer = self.layers[index]
        out = layer.attention_out(attended)
        hidden = self._add_normed(out, layer.post_attention_norm, residual, layer.mlp_norm, layer.mlp)
        out = layer.mlp(hidden)
        if index + 1 == len(self.layers):
            return self._add_normed(out, layer.post_mlp_norm, residual, self.norm, None)
        following = self.layers[index + 1]
        return self._add_normed(out, layer.post_mlp_norm, residual, following.attention_norm, following.qkv)

    def _add_normed(
        self,
        out: Tensor,
        post_norm: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        target: LinearLayer | Mlp | None,
    ) -> Activations:
        """Sum ``out`` over ranks, add it to ``residual``, normalise the sum for ``target`` (None: for the head)."""
        eps = self.config.rms_norm_eps
        if post_norm is not None:
            out = rms_norm(self.group.all_reduce(out), post_norm, eps)
        elif self.group.size > 1 or target is None:
            return self.group.add_rms_norm(out, residual, norm, eps)
        if target is None:
            return add_rms_norm(out, residual, norm, eps)
        return normed_for(target, out, residual, norm, eps)

    def _attend_all_in_parts(
        self, inputs: StepInputs, kv_cache: Tensor, residual: Tensor, parts: list[slice]
    ) -> Tensor:
        """Compute one part of the tokens while another's sum is under way: attention alone waits for all of them."""
        eps, start = self.config.rms_norm_eps, self.group.start_add_rms_norm
        num_heads, head_dim = len(self.shard.q_heads), self.config.head_dim
        hidden: list[PendingRows] = [
            partial(rms_norm, residual[part], self.layers[0].attention_norm, eps) for part in parts
        ]
        for index, layer in enumerate(self.layers):
            q = residual.new_empty(inputs.num_tokens, num_heads, head_dim)
            for one, part in zip(hidden, parts, strict=True):
                self._queries(layer, index, one(), inputs, kv_cache, part, q[part])
            attended = self._attend_to(q, layer, index, inputs, kv_cache, residual.shape[0])
            if index + 1 < len(self.layers):
                next_norm = self.layers[index + 1].attention_norm
                sums = [
                    start(layer.attention_out(attended[part]), residual[part], layer.mlp_norm, eps)
                    for part in parts
                ]
                hidden = [
                    start(layer.mlp(one()), residual[part], next_norm, eps)
                    for one, part in zip(sums, parts, strict=True)
                ]
        return attended

    def _embed(self, token_ids: Tensor) -> Tensor:
        rows = self._embed_rows(token_ids)
        return rows if self.embedding_scale == 1.0 else rows.mul_(self.embedding_scale)

    def _embed_rows(self, token_ids: Tensor) -> Tensor:
        own = self.vocab.own
        if len(own) == self.vocab.size:
            return torch.nn.functional.embedding(token_ids, self.embedding)
        local = token_ids - own.start
        is_foreign = (local < 0) | (local >= len(own))
        rows = torch.nn.functional.embedding(local.masked_fill(is_foreign, 0), self.embedding)
        return self.group.all_reduce(rows.masked_fill_(is_foreign[:, None], 0.0))

    def _attend(
        self, layer: DecoderLayer, index: int, hidden: Activations, inputs: StepInputs, kv_cache: Tensor
    ) -> Tensor:
        """Return [num_padded_tokens, heads of this rank * head_dim]."""
        q = self._queries(layer, index, hidden, inputs, kv_cache, slice(None))
        return self._attend_to(q, layer, index, inputs, kv_cache, inputs.token_ids.shape[0])

    def _queries(
        self,
        layer: DecoderLayer,
        index: int,
        hidden: Activations,
        inputs: StepInputs,
        kv_cache: Tensor,
        part: slice,
        out: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values of the tokens ``part``, whose activations are given; return their queries."""
        return rope_kv_write(
            layer.qkv(hidden),
            inputs.positions[part],
            inputs.slots[part],
            self.cos_sin[index],
            kv_cache,
            index,
            layer.q_norm,
            layer.k_norm,
            self.config.rms_norm_eps,
            layer.kv_scales,
            out,
        )

    def _attend_to(
        self,
        q: Tensor,
        layer: DecoderLayer,
        index: int,
        inputs: StepInputs,
        kv_cache: Tensor,
        num_rows: int,
    ) -> Tensor:
        key_scale, value_scale = layer.kv_scales
        attended = attend(
            q,
            kv_cache,
            index,
            inputs,
            self.scale * key_scale,
            layer.window,
            self.config.attention_soft_cap,
            num_rows,
        )
        return scaled(attended, value_scale).view(attended.shape[0], -1)
