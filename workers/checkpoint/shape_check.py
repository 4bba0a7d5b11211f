"""Which sizes of a model contradict each other: what no single value of its config shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.engine.errors import UserError

if TYPE_CHECKING:
    from workers.checkpoint.model_shape import ModelConfig, RopeScaling


def check_shape(model: ModelConfig) -> None:
    """Return if the sizes go together; of transformers' own layers, transformers knows better.

    Raises:
        UserError: two that do not, with their values.
    """
    _check_ends(model)
    if model.architecture != "transformers":
        _check_heads(model)
        _check_rope(model)
    experts = model.experts
    if experts is not None and experts.top_k > experts.num_experts:
        _refuse(
            f"num_experts_per_tok = {experts.top_k} of {experts.num_experts} experts: {experts.num_experts} at most "
            "are possible"
        )
    for name, by_layer in (("windows", model.windows), ("kinds of RoPE", model.rope_kinds)):
        if by_layer and len(by_layer) != model.num_layers:
            _refuse(f"{model.num_layers} layers, but {name} of {len(by_layer)}")


def _check_ends(model: ModelConfig) -> None:
    for token_id in model.eos_token_ids:
        if token_id >= model.vocab_size:
            _refuse(
                f"eos_token_id = {token_id}, its vocabulary has {model.vocab_size:,} tokens: the ids of config.json "
                f"and generation_config.json must be from 0 to {model.vocab_size - 1}"
            )


def _check_heads(model: ModelConfig) -> None:
    if model.num_heads % model.num_kv_heads:
        _refuse(
            f"{model.num_heads} attention heads and {model.num_kv_heads} KV heads: the first must be a multiple of the "
            "second"
        )


def _check_rope(model: ModelConfig) -> None:
    rotary_dim = model.head_dim if model.rotary_dim is None else model.rotary_dim
    if rotary_dim < 2 or rotary_dim % 2 or model.head_dim % 2:
        _refuse(
            f"heads of {model.head_dim} numbers (head_dim), {rotary_dim} of them rotated: RoPE turns pairs, both must "
            "be even"
        )
    for scaling in (model.rope_scaling, model.local_rope_scaling):
        if scaling is not None and scaling.kind == "longrope":
            _check_factors(scaling, rotary_dim)


def _check_factors(scaling: RopeScaling, rotary_dim: int) -> None:
    for key, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
        if len(factors) != rotary_dim // 2:
            _refuse(
                f"{len(factors)} numbers in {key}: it must have one for each of {rotary_dim // 2} rotated pairs"
            )


def _refuse(what: str) -> None:
    raise UserError(f"the model's config has {what}", "model")
