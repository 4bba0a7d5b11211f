"""What a decoder-only model is made of, read from a Hugging Face folder or a GGUF file. No tensors, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.checkpoint.gguf_file import GgufFile, MetadataValue
from workers.checkpoint.quantization import Quantization, quantization_of
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Hugging Face's architecture name to ours. SmolLM and Llama 2 and 3.x are ``LlamaForCausalLM``."""

JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pre-training.

    ``kind`` is "linear" (Chen et al. 2023) or "llama3" (Llama 3.1, which alone uses the last three).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model: everything that weights, layers and KV pool need to know."""

    architecture: str
    """One of the values of ``FAMILIES``."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    """None: frequencies as pre-trained."""
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    has_qkv_bias: bool = False
    """True for Qwen2."""
    has_qk_norm: bool = False
    """True for Qwen3: each head of q and k is normalised before RoPE."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    """None: the model has none."""
    dtype: str = "float32"
    """As stored: "float32", "bfloat16" or "float16"; GGUF weights are dequantized to float32."""
    quantization: Quantization | None = None
    """None: weights are stored in full."""

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of key and value of one token over all layers, before any split over ranks."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Read the config of a .gguf file or a Hugging Face folder.

    Raises:
        UserError: nothing readable there, or a model of a family that Shoal does not have.
    """
    if files.path.is_dir():
        return config_from_hf_folder(files.path)
    if files.path.suffix == ".gguf":
        return config_from_gguf(GgufFile(files.path))
    raise UserError(f"{files.path} is neither a .gguf file nor a folder with config.json")


def config_from_hf_folder(folder: Path) -> ModelConfig:
    """Read ``config.json``, and ``generation_config.json`` for the end-of-sequence tokens where it exists."""
    config = _read_json(folder / "config.json")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in FAMILIES:
        raise UserError(f"{folder} holds a {name}; Shoal runs {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    _refuse_unsupported(config, folder)
    theta, scaling = _rope(config, folder)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    bos = config.get("bos_token_id")
    return ModelConfig(
        architecture=family,
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
        head_dim=_integer(config, "head_dim", hidden_size // num_heads),
        vocab_size=_integer(config, "vocab_size"),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_integer(config, "max_position_embeddings", 2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        eos_token_ids=_token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        bos_token_id=bos if isinstance(bos, int) else None,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        quantization=quantization_of(config, str(folder)),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the config from a GGUF file's metadata."""
    metadata = file.metadata
    family = metadata.get("general.architecture")
    if family not in FAMILIES.values():
        raise UserError(f"{file.path} holds a {family!r} model; Shoal runs {', '.join(FAMILIES.values())}")
    values = {k.removeprefix(f"{family}."): v for k, v in metadata.items() if k.startswith(f"{family}.")}
    num_heads = _integer(values, "attention.head_count")
    hidden_size = _integer(values, "embedding_length")
    head_dim = _integer(values, "attention.key_length", hidden_size // num_heads)
    if _integer(values, "rope.dimension_count", head_dim) != head_dim:
        raise UserError(f"{file.path} rotates only a part of each head, which Shoal does not support")
    if "rope_freqs.weight" in file.shapes:
        raise UserError(f"{file.path} carries its own RoPE factors (Llama 3.1), take the safetensors instead")
    scaling = None
    if values.get("rope.scaling.type", "none") != "none":
        if values["rope.scaling.type"] != "linear":
            raise UserError(f"{file.path}: RoPE scaling {values['rope.scaling.type']!r} is not supported")
        scaling = RopeScaling("linear", _number(values, "rope.scaling.factor", 1.0))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=str(family),
        hidden_size=hidden_size,
        intermediate_size=_integer(values, "feed_forward_length"),
        num_layers=_integer(values, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_integer(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=file.shapes["token_embd.weight"][0],
        rms_norm_eps=_rounded(_number(values, "attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=_number(values, "rope.freq_base", 10000.0),
        rope_scaling=scaling,
        max_position_embeddings=_integer(values, "context_length"),
        tie_word_embeddings="output.weight" not in file.shapes,
        has_qkv_bias="blk.0.attn_q.bias" in file.shapes,
        has_qk_norm="blk.0.attn_q_norm.weight" in file.shapes,
        eos_token_ids=_gguf_eos(metadata),
        bos_token_id=bos if isinstance(bos, int) else None,
        dtype="float32",
        quantization=Quantization("gguf"),
    )


def _gguf_eos(metadata: Mapping[str, MetadataValue]) -> tuple[int, ...]:
    """End of sequence, and end of turn where a chat model has its own."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [metadata[key] for key in keys if key in metadata]
    return _token_ids(list(dict.fromkeys(found)))


def _refuse_unsupported(config: JsonObject, folder: Path) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{folder} uses activation {config['hidden_act']!r}; Shoal has silu")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise UserError(
            f"{folder} uses a sliding window of {config['sliding_window']} tokens, which is not supported"
        )
    if config.get("mlp_bias") or config.get("attention_bias"):
        raise UserError(
            f"{folder} has biases in its MLP or attention; Shoal has them for Qwen2's q, k and v only"
        )


def _rope(config: JsonObject, folder: Path) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5) or the older two fields."""
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise UserError(f"{folder}/config.json: the RoPE parameters are not an object")
    theta = _number(raw, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(raw, "factor", 1.0))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            _number(raw, "factor", 1.0),
            _number(raw, "low_freq_factor", 1.0),
            _number(raw, "high_freq_factor", 4.0),
            _integer(raw, "original_max_position_embeddings", 8192),
        )
    raise UserError(f"{folder}: RoPE scaling {kind!r} is not supported; default, linear and llama3 are")


def _read_json(path: Path) -> JsonObject:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return content


def _integer(values: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"the model's config has {key} = {value!r}, a positive integer is needed")
    return value


def _number(values: Mapping[str, object], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"the model's config has {key} = {value!r}, a number is needed")
    return float(value)


def _rounded(value: float) -> float:
    """Undo the float32 storage of constants such as 1e-5."""
    return float(f"{value:.6g}")


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    found = value if isinstance(value, list) else [value]
    return tuple(token_id for token_id in found if isinstance(token_id, int))
