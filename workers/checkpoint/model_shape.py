"""What a decoder-only model is made of: everything that weights, layers and KV pool need to know. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from workers.checkpoint.quantization import Quantization
from workers.checkpoint.shape_check import check_shape


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pre-training.

    ``kind`` is "linear" (Chen et al. 2023), "llama3" (Llama 3.1), "yarn" (Peng et al. 2023, arXiv:2309.00071) or
    "longrope" (Ding et al. 2024, arXiv:2402.13753).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    """Of "llama3", as ``high_freq_factor``."""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    """Of "yarn", as ``beta_slow``."""
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """What "yarn" and "longrope" multiply cosines and sines by; None: by their formula."""
    short_factors: tuple[float, ...] = ()
    """Of "longrope", for models that serve no more than the original positions; one a frequency."""
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of MLPs (Shazeer et al. 2017, arXiv:1701.06538)."""

    num_experts: int
    top_k: int
    """Experts a token is given to."""
    intermediate_size: int
    has_normed_weights: bool
    """The chosen experts' weights are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model: everything that weights, layers and KV pool need to know."""

    architecture: str
    """One of the values of ``hf_config.FAMILIES``."""
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
    has_out_bias: bool = False
    """Of attention's output projection."""
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    """True for Qwen3: each head of q and k is normalised before RoPE."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    """None: the model has none."""
    dtype: str = "float32"
    """As stored: "float32", "bfloat16" or "float16"; GGUF weights are dequantized to float32."""
    quantization: Quantization | None = None
    """None: weights are stored in full."""
    activation: str = "silu"
    """Of the gated MLP: "silu" or "gelu_tanh"."""
    windows: tuple[int, ...] = ()
    """By layer: how many tokens, its own included, a token attends to; 0: all. Empty: all layers attend to all."""
    rope_kinds: tuple[str, ...] = ()
    """By layer: "global", "local" (with the next two) or "none". Empty: all are global."""
    local_rope_theta: float = 10000.0
    local_rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """How many of a head's numbers are rotated; None: all."""
    query_scale: float | None = None
    """Factor on attention scores; None: ``head_dim ** -0.5``."""
    attention_soft_cap: float = 0.0
    """c in ``c * tanh(score / c)``; 0: none."""
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    has_offset_norms: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    has_post_norms: bool = False
    """Outputs of attention and MLP are normalised before they join the residual (Gemma 2 and 3)."""
    experts: Experts | None = None
    """None: ordinary MLPs."""

    def __post_init__(self) -> None:
        """Refuse sizes that contradict each other."""
        check_shape(self)

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of key and value of one token over all layers, before any split over ranks."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element

    @property
    def input_widths(self) -> dict[str, int]:
        """Columns of the layers' projections, by the keys of config.json that they come from."""
        widths = {
            "hidden_size": self.hidden_size,
            "num_attention_heads * head_dim": self.num_heads * self.head_dim,
        }
        if self.experts is None or self.experts.dense_layers:
            widths["intermediate_size"] = self.intermediate_size
        if self.experts is not None:
            key = "intermediate_size" if self.architecture == "mixtral" else "moe_intermediate_size"
            widths[key] = self.experts.intermediate_size
        return widths

    @property
    def score_scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int:
        """How many tokens a token of ``layer`` attends to; 0: all."""
        return self.windows[layer] if self.windows else 0

    def rope_kind(self, layer: int) -> str:
        """How ``layer`` rotates: "global", "local" or "none"."""
        return self.rope_kinds[layer] if self.rope_kinds else "global"

    def has_experts(self, layer: int) -> bool:
        """True where ``layer`` has experts in place of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers
