"""A ``config.json`` of any decoder-only model: sizes by the names that families give them. Layers are transformers'."""

from __future__ import annotations

from workers.checkpoint.config_values import Values, flag, integer, stored_dtype, token_id, token_ids
from workers.checkpoint.model_shape import ModelConfig
from workers.checkpoint.quantization import quantization_of
from workers.engine.errors import UserError

ARCHITECTURE = "transformers"
"""``ModelConfig.architecture`` of models whose layers transformers brings."""
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "num_kv_heads": ("num_key_value_heads", "multi_query_group_num"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"),
}
"""By size, the first that a config has; transformers maps them in each class's ``attribute_map``."""
_ENDINGS = ("ForCausalLM", "LMHeadModel")
"""Of class names of decoder-only models."""


def is_decoder(name: object) -> bool:
    """True for the class name of a model that writes text and reads nothing but text."""
    return isinstance(name, str) and name.endswith(_ENDINGS)


def generic_config(config: Values, generation: Values, where: str) -> ModelConfig:
    """Read what blocks, batches and memory plans need to know; layers may turn out otherwise when they are loaded.

    Raises:
        UserError: a size is missing or no positive integer.
    """

    def size(key: str, default: int | None = None) -> int:
        given = next((config[name] for name in _NAMES[key] if config.get(name) is not None), None)
        if given is None and default is None:
            raise UserError(f"the model's config has none of {', '.join(_NAMES[key])}", "model")
        return integer({_NAMES[key][0]: given}, _NAMES[key][0], default)

    hidden_size, num_heads = size("hidden_size"), size("num_heads")
    return ModelConfig(
        architecture=ARCHITECTURE,
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size", 4 * hidden_size),
        num_layers=size("num_layers"),
        num_heads=num_heads,
        num_kv_heads=size("num_kv_heads", num_heads),
        head_dim=integer(config, "head_dim", hidden_size // num_heads),
        vocab_size=integer(config, "vocab_size"),
        max_position_embeddings=size("positions", 2048),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        eos_token_ids=token_ids(generation if "eos_token_id" in generation else config, "eos_token_id"),
        bos_token_id=token_id(config, "bos_token_id"),
        dtype=stored_dtype(config),
        quantization=quantization_of(config, where),
    )
