"""Names of tensors: GGUF's to Hugging Face's, which the rest of the code uses."""

from __future__ import annotations

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Where families with norms on both sides differ."""
_TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(gguf_name: str, has_post_norms: bool = False) -> str | None:
    """``blk.0.attn_q.weight`` to ``model.layers.0.self_attn.q_proj.weight``; None if there is no counterpart."""
    parts = _LAYER_PARTS | _GEMMA_PARTS if has_post_norms else _LAYER_PARTS
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _TOP_PARTS:
        return f"{_TOP_PARTS[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in parts:
        return None
    return f"model.layers.{layer}.{parts[part]}.{kind}"
