"""What a model takes on a GPU, from its config alone: weights, KV bytes a token, how many requests fit, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import Quantization
from workers.engine.errors import InvalidRequest
from workers.model.rank_config import COPY_SHARE

GPU_GIB = {
    "B200": 179.0,
    "H200": 140.4,
    "H100": 79.6,
    "A100": 80.0,
    "A100-40": 40.0,
    "L40S": 45.0,
    "L4": 22.5,
}
"""Memory as ``nvidia-smi`` reports it, GiB."""
POWERS = (1, 2, 4, 8, 16, 32, 64)
"""Sizes of groups that are looked at."""
_SAMPLER_BYTES = 24
"""A logit during sampling: as ``Rank`` reckons."""
_DENSE_BYTES = 2
_CODED = {"awq", "gptq", "squeezellm", "gguf", "int4", "pack-quantized", "nf4", "fp4"}
"""Formats and kinds whose weights are codes."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a model's tensors, by how ranks share them."""

    split: int
    """Divided among ranks."""
    whole: int
    """On every rank."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one rank of a replica holds, in bytes, and what that serves."""

    tensor_parallel_size: int
    weight_bytes: int
    kv_bytes_per_token: int
    step_bytes: int
    """Activations and logits of the largest step."""
    kv_bytes: int
    """What is left for the KV pool; negative: the weights do not fit."""
    context: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return max(self.kv_bytes, 0) // self.kv_bytes_per_token

    @property
    def max_requests(self) -> int:
        """Requests of ``context`` tokens at once."""
        return self.kv_tokens // self.context


def count_weights(config: ModelConfig, how: Quantization | None) -> Weights:
    """Bytes of all tensors on a GPU in 16 bits, linear layers as ``how`` keeps them."""
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    split = whole = 0
    for layer in range(config.num_layers):
        projections = [((heads + 2 * kv_heads) * head_dim, hidden), (hidden, heads * head_dim)]
        split += sum(_linear_bytes(shape, how) for shape in projections)
        if config.experts is not None and config.has_experts(layer):
            width, count = config.experts.intermediate_size, config.experts.num_experts
            split += count * (_linear_bytes((2 * width, hidden), how) + _linear_bytes((hidden, width), how))
            whole += count * hidden * _DENSE_BYTES
        else:
            width = config.intermediate_size
            split += _linear_bytes((2 * width, hidden), how) + _linear_bytes((hidden, width), how)
            split += 2 * width * _DENSE_BYTES * config.has_mlp_bias
        split += (heads + 2 * kv_heads) * head_dim * _DENSE_BYTES * config.has_qkv_bias
        whole += hidden * _DENSE_BYTES * (config.has_out_bias + config.has_mlp_bias)
        norm_bytes = 4 if config.has_offset_norms else _DENSE_BYTES
        whole += norm_bytes * (
            (4 if config.has_post_norms else 2) * hidden + 2 * head_dim * config.has_qk_norm
        )
    whole += hidden * (4 if config.has_offset_norms else _DENSE_BYTES)
    split += config.vocab_size * hidden * _DENSE_BYTES * (1 if config.tie_word_embeddings else 2)
    return Weights(split, whole)


def count_copies(config: ModelConfig, how: Quantization | None) -> int:
    """Bytes of the linear layers in 16 bits where they are stored as codes, experts apart; else 0."""
    if how is None or not {how.format, how.kind} & _CODED:
        return 0
    hidden, heads = config.hidden_size, config.num_heads + config.num_kv_heads
    dense = sum(not config.has_experts(layer) for layer in range(config.num_layers))
    attention = 2 * heads * config.head_dim * hidden
    return (config.num_layers * attention + dense * 3 * config.intermediate_size * hidden) * _DENSE_BYTES


def plan_memory(
    config: ModelConfig,
    how: Quantization | None,
    gpu_bytes: int,
    context: int,
    tensor_parallel_size: int,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 16384,
    kv_bytes_per_element: int = 2,
    device_bytes: int | None = None,
) -> MemoryPlan:
    """Reckon one rank's memory; ``gpu_bytes`` is what the engine may take of it.

    ``device_bytes``, all that the GPU has, decides whether weights of codes are kept in 16 bits as well; None: not.
    """
    weights = count_weights(config, how)
    size = tensor_parallel_size
    kv_heads = -(-config.num_kv_heads // size)
    per_token = 2 * config.num_layers * kv_heads * config.head_dim * kv_bytes_per_element
    widths = 4 * config.hidden_size + 3 * config.intermediate_size + 2 * config.num_heads * config.head_dim
    step = max_num_batched_tokens * widths * _DENSE_BYTES
    step += max_num_seqs * config.vocab_size * _SAMPLER_BYTES
    rank_weights = -(-weights.split // size) + weights.whole
    copies = -(-count_copies(config, how) // size)
    if device_bytes is not None and copies <= device_bytes // COPY_SHARE:
        rank_weights += copies
    return MemoryPlan(size, rank_weights, per_token, step, gpu_bytes - rank_weights - step, context)


def fewest_ranks(
    config: ModelConfig,
    how: Quantization | None,
    gpu_bytes: int,
    context: int,
    kv_bytes_per_element: int = 2,
    device_bytes: int | None = None,
    sizes: Sequence[int] = POWERS,
) -> MemoryPlan:
    """The smallest group, of ``sizes``, that serves one request of ``context`` tokens.

    Raises:
        InvalidRequest: not even as many ranks as can share the model suffice.
    """
    for size in sizes:
        if size > config.num_heads:
            break
        plan = plan_memory(
            config,
            how,
            gpu_bytes,
            context,
            size,
            kv_bytes_per_element=kv_bytes_per_element,
            device_bytes=device_bytes,
        )
        if plan.max_requests >= 1:
            return plan
    raise InvalidRequest(
        f"{plan.weight_bytes / 2**30:.1f} GiB of weights on each of {plan.tensor_parallel_size} ranks leave no "
        f"room for {context} tokens in {gpu_bytes / 2**30:.1f} GiB: take a larger GPU or a shorter context",
        "gpu",
    )


def _linear_bytes(shape: tuple[int, int], how: Quantization | None) -> int:
    """One layer's weight, scales and zero points, as ``workers.model.quantized`` lays them out on a GPU."""
    out, width = shape
    if how is None or how.kind == "block":
        return out * width * _DENSE_BYTES
    is_8bit = how.format in ("fp8", "int8") or how.kind in ("float-quantized", "int-quantized", "int8")
    if is_8bit:
        return out * width + 4 * out
    if how.format == "gguf":
        # Types differ from layer to layer; most files of 4 bits are near this.
        return out * width * 5 // 8
    code_bytes = out * width // (2 if how.bits <= 4 else 1)
    if how.format == "squeezellm":
        return code_bytes + out * 16 * _DENSE_BYTES
    group = min(how.group_size or 128, 128)
    zero_bytes = (1 if how.bits <= 4 else 2) if how.has_zeros else 0
    if how.is_online:
        zero_bytes = 2  # an offset
    return code_bytes + out * -(-width // group) * (2 + zero_bytes)
