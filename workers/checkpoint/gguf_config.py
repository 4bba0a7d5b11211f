"""A GGUF file's metadata as a ``ModelConfig``."""

from __future__ import annotations

from collections.abc import Mapping

from workers.checkpoint.config_values import integer, number, token_id, token_ids
from workers.checkpoint.gguf_file import GgufFile, MetadataValue
from workers.checkpoint.model_shape import ModelConfig, RopeScaling
from workers.checkpoint.quantization import Quantization
from workers.engine.errors import UserError

GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
_GEMMA_PATTERN = {"gemma2": 2, "gemma3": 6}
"""One layer in so many attends to everything; the metadata do not say it."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The sizes whose queries are scaled by hidden size over heads; the metadata do not say this either."""


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the config from a GGUF file's metadata.

    Raises:
        UserError: a model that Shoal does not have, or something about it that the layers cannot do.
    """
    metadata = file.metadata
    family = metadata.get("general.architecture")
    if family not in GGUF_FAMILIES:
        raise UserError(
            f"{file.path} holds a {family!r} model; as GGUF Shoal runs {', '.join(GGUF_FAMILIES)}"
        )
    family = str(family)
    values = {k.removeprefix(f"{family}."): v for k, v in metadata.items() if k.startswith(f"{family}.")}
    num_heads = integer(values, "attention.head_count")
    num_layers = integer(values, "block_count")
    hidden_size = integer(values, "embedding_length")
    head_dim = integer(values, "attention.key_length", hidden_size // num_heads)
    if integer(values, "rope.dimension_count", head_dim) != head_dim:
        raise UserError(
            f"{file.path} rotates only a part of each head, which Shoal reads from safetensors only"
        )
    if "rope_freqs.weight" in file.shapes:
        raise UserError(f"{file.path} carries its own RoPE factors (Llama 3.1), take the safetensors instead")
    if values.get("expert_count"):
        raise UserError(f"{file.path} has experts, which Shoal reads from safetensors only")
    scaling = None
    if values.get("rope.scaling.type", "none") != "none":
        if values["rope.scaling.type"] != "linear":
            raise UserError(
                f"{file.path}: RoPE scaling {values['rope.scaling.type']!r} is not supported; none and linear are"
            )
        scaling = RopeScaling("linear", number(values, "rope.scaling.factor"))
    is_gemma = family in _GEMMA_PATTERN
    is_local = [(layer + 1) % _GEMMA_PATTERN.get(family, 1) != 0 for layer in range(num_layers)]
    window = integer(values, "attention.sliding_window", 4096) if is_gemma else 0
    query_width = hidden_size // num_heads if num_layers == _GEMMA_27B_LAYERS.get(family) else head_dim
    return ModelConfig(
        architecture=family,
        hidden_size=hidden_size,
        intermediate_size=integer(values, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=file.shapes["token_embd.weight"][0],
        rms_norm_eps=_rounded(number(values, "attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=number(values, "rope.freq_base", 10000.0),
        rope_scaling=scaling,
        max_position_embeddings=integer(values, "context_length"),
        tie_word_embeddings="output.weight" not in file.shapes,
        has_qkv_bias="blk.0.attn_q.bias" in file.shapes,
        has_qk_norm="blk.0.attn_q_norm.weight" in file.shapes,
        eos_token_ids=_eos(metadata),
        bos_token_id=token_id(metadata, "tokenizer.ggml.bos_token_id"),
        dtype="float32",
        quantization=Quantization("gguf"),
        activation="gelu_tanh" if is_gemma else "silu",
        windows=tuple(window if local else 0 for local in is_local) if is_gemma else (),
        rope_kinds=tuple("local" if local else "global" for local in is_local) if family == "gemma3" else (),
        query_scale=query_width**-0.5 if is_gemma else None,
        attention_soft_cap=number(values, "attn_logit_softcapping", 0.0),
        logit_soft_cap=number(values, "final_logit_softcapping", 0.0),
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        # llama.cpp's converter has added the 1 to the norms' weights.
        has_offset_norms=False,
        has_post_norms=is_gemma,
    )


def _eos(metadata: Mapping[str, MetadataValue]) -> tuple[int, ...]:
    """End of sequence, and end of turn where a chat model has its own."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(found for key in keys for found in token_ids(metadata, key)))


def _rounded(value: float) -> float:
    """Undo the float32 storage of constants such as 1e-5."""
    return float(f"{value:.6g}")
