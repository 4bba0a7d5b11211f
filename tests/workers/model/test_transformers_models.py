"""Models without native layers run with transformers' own over paged blocks, and answer as transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "starcoder2 with a window": ("Starcoder2Config", {"sliding_window": 24}),
    "granite": (
        "GraniteConfig",
        {"logits_scaling": 3.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
}


def save(folder: Path, config_name: str, fields: dict) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_native_layers_computes_what_transformers_computes(
    family: str, make_rank, ragged_logprobs, tmp_path: Path
) -> None:
    model = save(tmp_path, *FAMILIES[family])
    rank = make_rank(files=ModelFiles(tmp_path, family))
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in (1, 19, 64, 33)]

    with torch.inference_mode():
        wanted = [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts]

    for chunk in (64, 9):
        for got, want in zip(ragged_logprobs(rank, prompts, chunk), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
    "original_max_position_embeddings": 64,
    "short_mscale": 1.1,
    "long_mscale": 1.4,
}


@pytest.mark.parametrize(
    ("config_name", "fields"),
    [("Phi3Config", {}), ("PhimoeConfig", {"num_local_experts": 4}), ("OlmoConfig", {})],
)
def test_a_tokens_angles_do_not_depend_on_the_steps_other_positions(
    config_name: str, fields: dict, make_rank, ragged_logprobs, tmp_path: Path
) -> None:
    model = save(
        tmp_path,
        config_name,
        {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE, **fields},
    )
    short, long = (torch.randint(3, VOCAB, (length,)).tolist() for length in (20, 100))
    with torch.inference_mode():
        wanted = model(torch.tensor([long]), use_cache=False).logits[0, -1].log_softmax(-1)

    rank = make_rank(files=ModelFiles(tmp_path, "x"), model_impl="transformers")
    (alone,) = ragged_logprobs(rank, [short], 100)
    # Chunks of the long one end before and behind the original positions.
    beside = [ragged_logprobs(rank, [long, short], chunk) for chunk in (100, 30)]

    for got_long, got_short in beside:
        torch.testing.assert_close(got_long, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got_short, alone, rtol=1e-4, atol=1e-4)


def test_the_implementation_can_be_asked_for(make_rank, ragged_logprobs, tmp_path: Path) -> None:
    save(tmp_path, "LlamaConfig", {})
    prompts = [[5, 6, 7], [9] * 40]

    native, borrowed = (
        ragged_logprobs(make_rank(files=ModelFiles(tmp_path, "x"), model_impl=impl), prompts, 16)
        for impl in ("native", "transformers")
    )

    for one, other in zip(native, borrowed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_native_layers_are_not_replaced_by_others_when_they_are_asked_for(tmp_path: Path) -> None:
    save(tmp_path, "GPTNeoXConfig", {})

    with pytest.raises(
        UserError, match=r"GPTNeoXForCausalLM, which --model-impl native has not.*LlamaForCausalLM"
    ):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x"), model_impl="native"))


def test_a_model_with_attention_that_blocks_cannot_hold_is_refused(tmp_path: Path) -> None:
    save(
        tmp_path,
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
    )

    with pytest.raises(UserError, match="sinks"):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x"))).load()


def test_a_model_that_hides_a_bias_in_its_mask_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "BloomConfig", {"n_layer": 2, "n_head": 4})

    with pytest.raises(UserError, match="no attention but its own"):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x"))).load()


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (
            lambda tensors: tensors.pop("transformer.h.1.attn.c_attn.weight"),
            "has no tensor .*h.1.attn.c_attn",
        ),
        (
            lambda tensors: tensors.update({"transformer.ln_f.bias": torch.zeros(63)}),
            r"ln_f.bias .* has shape \[63\], its config says \[64\]",
        ),
    ],
)
def test_weights_that_are_not_all_there_are_refused(break_it, says: str, tmp_path: Path) -> None:
    save(tmp_path, *FAMILIES["gpt2"])
    tensors = load_file(tmp_path / "model.safetensors")
    break_it(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(UserError, match=says):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x"))).load()


@pytest.mark.parametrize("family", [("GPT2Config", FAMILIES["gpt2"][1]), ("LlamaConfig", {})])
def test_a_file_that_is_cut_off_is_named(family: tuple[str, dict], tmp_path: Path) -> None:
    save(tmp_path, *family)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    with pytest.raises(UserError, match=f"{tmp_path}.* is damaged or cut off"):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x"))).load()


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    save(tmp_path, "LlamaConfig", {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["NovelForCausalLM"]}))

    with pytest.raises(UserError, match="NovelForCausalLM"):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x"))).load()
