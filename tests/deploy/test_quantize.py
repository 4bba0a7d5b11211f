"""What ``shoal quantize`` writes is served, and costs no more than its method is known to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.quantize.calibration import InputStatistics
from deploy.quantize.folder import Job, quantize_folder
from deploy.quantize.grids import CodeGrid, Float8Grid
from deploy.quantize.rounding import best_awq_scale, drifting_error, output_error, round_with_feedback
from kernels.codes import dequantize_ref, quantize_to_codes
from router.text.tokenizer import Tokenizer
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.vocabulary import load_vocabulary
from workers.engine.errors import InvalidRequest
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig
from workers.model.tensor_source import GgufSource

ROOT = Path(__file__).parents[2]
TEXT = Path(__file__).parent / "texts" / "lincoln.txt"


def write_folder(folder: Path) -> Path:
    """A tiny random Llama."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def log_perplexity(files: ModelFiles, token_ids: list[int]) -> float:
    """Mean negative log-likelihood of a text's tokens, each given all before it."""
    rank = Rank(RankConfig(files=files, num_threads=2, max_model_len=1024))
    rank.load()
    rank.allocate(64)
    params = ChoiceParams(max_tokens=1, temperature=0.0)
    blocks = list(range(-(-len(token_ids) // 16)))
    row = NewRow(0, token_ids, len(token_ids), params)
    plan = StepPlan(0, [row], [0], [0], [len(token_ids)], [True], [blocks])
    with torch.inference_mode():
        rank._batch.apply(plan)
        inputs = replace(rank._batch.inputs(plan), sample_tokens=torch.arange(len(token_ids) - 1))
        assert rank._kv_cache is not None
        logits = rank._decoder.forward(inputs, rank._kv_cache)
    return float(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(token_ids[1:])))


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_a_quantized_folder_is_read_as_its_format(method: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "full")
    token_ids = torch.randint(0, 97, (1024,)).tolist()
    shares: list[float] = []

    quantize_folder(Job(ModelFiles(source, "full"), tmp_path / method, method, token_ids), shares.append)

    files = ModelFiles(tmp_path / method, method)
    quantization = read_model_config(files).quantization
    assert quantization is not None
    assert quantization.format == ("compressed-tensors" if method == "fp8" else method)
    assert shares == [0.0, 0.5, 1.0]
    full = log_perplexity(ModelFiles(source, "full"), token_ids[:200])
    assert log_perplexity(files, token_ids[:200]) == pytest.approx(full, rel=0.1)


def test_awq_changes_no_output_before_rounding(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "full")
    token_ids = torch.randint(0, 97, (1024,)).tolist()

    quantize_folder(Job(ModelFiles(source, "full"), tmp_path / "awq", "awq", token_ids))

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "awq"))
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(before[norm].bfloat16(), after[norm])
    assert "model.layers.0.self_attn.q_proj.qweight" in after
    assert "model.layers.0.self_attn.q_proj.weight" not in after


def correlated(num_tokens: int) -> torch.Tensor:
    """Inputs that have directions in common, of very different sizes."""
    torch.manual_seed(0)
    return torch.randn(num_tokens, 128) @ torch.randn(128, 128) * (torch.rand(128) * 4) ** 2


GRIDS: dict[str, Callable[[torch.Tensor], CodeGrid | Float8Grid]] = {
    "codes": lambda weight: CodeGrid(weight, 128),
    "fp8": Float8Grid,
}


def seen_of(inputs: torch.Tensor, full: torch.Tensor) -> InputStatistics:
    seen = InputStatistics.empty(inputs.shape[-1])
    seen.add(inputs, full)
    return seen


@pytest.mark.parametrize("kind", ["codes", "fp8"])
def test_error_feedback_beats_plain_rounding(kind: str) -> None:
    inputs, weight = correlated(512), torch.randn(64, 128)
    seen = seen_of(inputs, inputs)

    rounded, grid = round_with_feedback(weight, GRIDS[kind], seen)

    nearest = GRIDS[kind](weight).rounded(weight)
    assert output_error(rounded, weight, seen.held_out) < 0.7 * output_error(nearest, weight, seen.held_out)
    assert torch.equal(grid.rounded(rounded), rounded)  # all of it is on the grid


@pytest.mark.parametrize("kind", ["codes", "fp8"])
def test_what_the_layers_before_got_wrong_is_made_good(kind: str) -> None:
    full, weight = correlated(1024), torch.randn(64, 128)
    inputs = full + 0.1 * (full.mean(1, keepdim=True) - full)  # an error that inputs tell of

    seen = seen_of(inputs, full)
    rounded, grid = round_with_feedback(weight, GRIDS[kind], seen)
    blind, _ = round_with_feedback(weight, GRIDS[kind], seen_of(inputs, inputs))

    def error(found: torch.Tensor) -> torch.Tensor:
        return (inputs @ found.t() - full @ weight.t()).square().sum()

    assert error(rounded) < 0.5 * error(blind)
    assert drifting_error(rounded, weight, seen) < drifting_error(blind, weight, seen)
    assert torch.equal(grid.rounded(rounded), rounded)


def test_scaled_inputs_beat_plain_rounding() -> None:
    inputs, weight = correlated(512), torch.randn(64, 128)
    gram = inputs.t() @ inputs

    scale = best_awq_scale(weight, 128, inputs.abs().mean(0), gram)

    plain = CodeGrid(weight, 128, least_zero=0).rounded(weight)
    scaled = CodeGrid(weight * scale, 128, gram.diagonal() / scale**2, least_zero=0).rounded(weight * scale)
    assert output_error(scaled / scale, weight, gram) < output_error(plain, weight, gram)


def test_ends_are_cut_off_where_the_rest_gains_more() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    weight[:, 5] *= 1.5

    alike, favoured = torch.ones(128), torch.ones(128)
    favoured[5] = 1000.0

    plain = (dequantize_ref(quantize_to_codes(weight, 4, 32)) - weight) ** 2
    clipped, kept = ((CodeGrid(weight, 32, one).rounded(weight) - weight) ** 2 for one in (alike, favoured))

    assert clipped.sum() < plain.sum()
    assert kept[:, 5].sum() < 0.5 * clipped[:, 5].sum()


def test_feedback_from_few_tokens_costs_other_texts_no_more_than_plain_rounding() -> None:
    torch.manual_seed(0)
    # Inputs that have nothing in common but chance: all that columns could learn of each other is noise.
    inputs, other = torch.randn(240, 128), torch.randn(4096, 128)
    weight = torch.randn(64, 128)
    grid = CodeGrid(weight, 128)

    rounded, _ = round_with_feedback(weight, lambda _: grid, seen_of(inputs, inputs))

    gram = other.t() @ other
    assert output_error(rounded, weight, gram) < 1.02 * output_error(grid.rounded(weight), weight, gram)


def test_gptq_keeps_rows_without_a_negative_weight() -> None:
    torch.manual_seed(0)
    weight = torch.rand(16, 64) + 0.1

    grid = CodeGrid(weight, 64)

    assert (grid.zeros >= 1).all()  # stored less one: 0 would be read as 16
    assert (grid.rounded(weight) - weight).abs().max() < 0.2
    assert torch.equal(dequantize_ref(grid.codes(weight)), grid.rounded(weight))


@pytest.mark.parametrize(
    ("group", "says"), [(48, "it must be one of 32, 64, 128"), (128, "take --group-size 64")]
)
def test_groups_that_do_not_go_are_said(tmp_path: Path, group: int, says: str) -> None:
    source = write_folder(tmp_path / "full")

    with pytest.raises(InvalidRequest, match=says):
        quantize_folder(Job(ModelFiles(source, "full"), tmp_path / "out", "awq", [1] * 600, group))


def test_the_command_writes_a_folder_once(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from deploy.commands import app

    source = write_folder(tmp_path / "full")
    (source / "tokenizer.json").write_text("{}")
    command = ["quantize", str(source), "--method", "fp8", "--output", str(tmp_path / "fp8")]

    first, second = (CliRunner().invoke(app, command) for _ in range(2))

    assert first.exit_code == 0, first.output
    assert "model.layers.1.mlp.down_proj.weight_scale" in load_file(tmp_path / "fp8" / "model.safetensors")
    assert (tmp_path / "fp8" / "tokenizer.json").exists()
    assert isinstance(second.exception, InvalidRequest)
    assert "not empty" in second.exception.message


def write_demo_folder(demo_model: ModelFiles, folder: Path) -> ModelFiles:
    """The demo model in full, as a Hugging Face folder."""
    config = read_model_config(demo_model)
    source = GgufSource(demo_model.path, config)
    hidden, width, kv = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    names = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config.num_layers)
        for name, shape in shapes.items()
    }
    names |= {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    folder.mkdir()
    save_file(
        {n: source.read(n, s) for n, s in names.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelFiles(folder, "demo")


@pytest.mark.slow
@pytest.mark.timeout(600)  # GPTQ rounds each layer four times
@pytest.mark.parametrize(("method", "worst"), [("fp8", 0.08), ("awq", 0.5), ("gptq", 1.2)])
def test_the_demo_model_stays_a_language_model(
    method: str, worst: float, demo_model: ModelFiles, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(load_vocabulary(demo_model))
    full = write_demo_folder(demo_model, tmp_path / "full")
    calibration = tokenizer.encode((ROOT / "README.md").read_text() + (ROOT / "LICENSE").read_text())
    text = tokenizer.encode(TEXT.read_text())

    quantize_folder(Job(full, tmp_path / method, method, calibration[:2048]))

    before = log_perplexity(full, text)
    loss = log_perplexity(ModelFiles(tmp_path / method, method), text) - before
    growth = float(torch.tensor(loss).exp()) - 1
    print(f"perplexity {torch.tensor(before).exp():.3f}, with {method} {100 * growth:+.2f} %")
    assert growth < worst
