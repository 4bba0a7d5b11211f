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
_TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(gguf_name: str) -> str | None:
    """``blk.0.attn_q.weight`` to ``model.layers.0.self_attn.q_proj.weight``; None if there is no counterpart."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _TOP_PARTS:
        return f"{_TOP_PARTS[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _LAYER_PARTS:
        return None
    return f"model.layers.{layer}.{_LAYER_PARTS[part]}.{kind}"
