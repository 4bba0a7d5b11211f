"""Configs are read from both formats, and what Shoal cannot run is refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from workers.checkpoint.gguf_file import GgufFile
from workers.checkpoint.model_config import ModelConfig, RopeScaling, read_model_config
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.tensor_names import hf_name
from workers.engine.errors import UserError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def write_folder(folder: Path, generation: dict | None = None, **fields: object) -> ModelFiles:
    """A folder with a small Llama's config.json; fields of None are left out."""
    config = {key: value for key, value in {**LLAMA, **fields}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelFiles(folder, "x")


def write_gguf(
    path: Path, architecture: str = "llama", quantize: gguf.GGMLQuantizationType | None = None
) -> Path:
    """A GGUF file with the metadata of a tiny model and two tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5e4)
    writer.add_eos_token_id(3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "猫"])
    embedding = np.random.default_rng(0).standard_normal((10, 64)).astype(np.float32)
    if quantize is None:
        writer.add_tensor("token_embd.weight", embedding)
    else:
        writer.add_tensor("token_embd.weight", gguf.quantize(embedding, quantize), raw_dtype=quantize)
    writer.add_tensor("output_norm.weight", np.arange(64, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"x", "is not a GGUF file, which begins with these letters: fetch it again"),
        (b"", "is not a GGUF file, which begins with these letters: fetch it again"),
        (b"GGUF", "is a GGUF file that is damaged or not whole: fetch it again"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 9),
            "is a GGUF file that is damaged or not whole: fetch it again",
        ),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "is of GGUF version 9, which is not read: fetch it again"),
        (None, r"cannot be read \(Is a directory\)"),
    ],
)
def test_what_is_no_gguf_file_is_told_in_our_words(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "bad.gguf"
    path.mkdir() if content is None else path.write_bytes(content)

    with pytest.raises(UserError, match=rf"^{path} {says}$"):
        GgufFile(path)


def test_a_folder_says_what_the_model_is_made_of(tmp_path: Path) -> None:
    files = write_folder(
        tmp_path, num_key_value_heads=2, eos_token_id=5, torch_dtype="bfloat16", rope_theta=5e5
    )

    assert read_model_config(files) == ModelConfig(
        architecture="llama",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        rms_norm_eps=1e-6,
        rope_theta=5e5,
        eos_token_ids=(5,),
        dtype="bfloat16",
    )


def test_the_generation_config_knows_all_ends_of_sequence(tmp_path: Path) -> None:
    files = write_folder(tmp_path, generation={"eos_token_id": [5, 9]}, eos_token_id=5)

    assert read_model_config(files).eos_token_ids == (5, 9)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_of_either_age_is_read(tmp_path: Path, field: str) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    files = write_folder(
        tmp_path, **{field: {**scaling, "original_max_position_embeddings": 8192}}, rope_theta=5e5
    )

    config = read_model_config(files)

    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures = null.*LlamaForCausalLM.*--model-impl"),
        ({"architectures": []}, r"architectures = \[\].*LlamaForCausalLM.*--model-impl"),
        (
            {"architectures": ["MambaForCausalLM"], "num_attention_heads": None},
            "Mamba.*none of num_attention_heads, n_head, .*--model-impl",
        ),
        ({"architectures": ["MptForCausalLM"], "hidden_size": None}, "Mpt.*LlamaForCausalLM.*--model-impl"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 2, "head_dim": 16},
            "5 attention heads and 2 KV heads",
        ),
        (
            {
                "architectures": ["MixtralForCausalLM"],
                "num_key_value_heads": 2,
                "num_local_experts": 4,
                "num_experts_per_tok": 5,
            },
            "num_experts_per_tok = 5 of 4 experts",
        ),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_key_value_heads": 2,
                "num_experts": 4,
                "num_experts_per_tok": 9,
                "moe_intermediate_size": 32,
            },
            "num_experts_per_tok = 9 of 4 experts",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 4, "layer_types": ["x"]},
            "layer_types.* has x:",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 4, "layer_types": ["full_attention"]},
            "1 entries for",
        ),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_hidden_layers": -2}, "num_hidden_layers = -2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq.*awq.*gguf"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "dynamic.*longrope"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, fields: dict, complaint: str) -> None:
    files = write_folder(tmp_path, **fields)

    with pytest.raises(UserError, match=complaint):
        read_model_config(files)


@pytest.mark.parametrize(
    ("config_name", "sizes"),
    [
        ("GPTNeoConfig", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}),
        ("XGLMConfig", {"d_model": 64, "num_layers": 2, "attention_heads": 4}),
        ("MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 4}),
        ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        ("GPTBigCodeConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    ],
)
def test_sizes_are_found_by_the_names_each_class_has(config_name: str, sizes: dict, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, config_name)(
        **{
            "hidden_size": 64,
            "vocab_size": 100,
            "eos_token_id": 2,
            "architectures": ["GptForCausalLM"],
            **sizes,
        }
    )
    config.save_pretrained(tmp_path)

    read = read_model_config(ModelFiles(tmp_path, "x"))

    assert (read.hidden_size, read.num_layers, read.num_heads) == (64, 2, 4)


def test_a_path_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        read_model_config(ModelFiles(tmp_path, "x"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_model_config(ModelFiles(tmp_path, "x"))
    with pytest.raises(UserError, match="neither"):
        read_model_config(ModelFiles(tmp_path / "model.bin", "x"))


def test_a_gguf_file_says_what_the_model_is_made_of(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")

    config = read_model_config(ModelFiles(path, "x"))

    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.rms_norm_eps, config.rope_theta) == (10, 1e-6, 5e4)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (3,)
    assert GgufFile(path).metadata["tokenizer.ggml.tokens"] == ["a", "é", "猫"]


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_gguf_tensors_equal_the_librarys(tmp_path: Path, kind: gguf.GGMLQuantizationType | None) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", quantize=kind)
    file = GgufFile(path)

    for tensor in gguf.GGUFReader(path).tensors:
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.read(tensor.name), want.astype(np.float32))


@pytest.mark.parametrize("length", [3, 30, 300, -1])
def test_a_damaged_gguf_file_is_refused(tmp_path: Path, length: int) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole[:length])

    with pytest.raises(UserError, match="damaged"):
        GgufFile(damaged)
    damaged.write_bytes(b"PK" + whole[2:])
    with pytest.raises(UserError, match="not a GGUF"):
        GgufFile(damaged)


def test_a_gguf_file_of_another_family_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "other.gguf", architecture="mamba")

    with pytest.raises(UserError, match=r"mamba.*llama"):
        read_model_config(ModelFiles(path, "x"))


def test_the_demo_models_shape(demo_model: ModelFiles) -> None:
    config = read_model_config(demo_model)

    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.rope_theta, config.rms_norm_eps) == (49152, 1e5, 1e-5)
    assert config.eos_token_ids == (2,)


def test_names_are_hugging_faces() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.11.attn_q.bias") == "model.layers.11.self_attn.q_proj.bias"
    assert hf_name("blk.0.ffn_down.weight") == "model.layers.0.mlp.down_proj.weight"
    assert hf_name("rope_freqs.weight") is None
    assert hf_name("blk.0.ssm_a") is None
