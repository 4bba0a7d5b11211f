"""What ``shoal quantize`` cannot do is one sentence at the door, and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deploy.commands import app
from workers.engine.errors import UserError

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": BYTE_LEVEL,
    "decoder": BYTE_LEVEL,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer of two letters."""
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


@pytest.fixture
def source(tiny: Path, tmp_path: Path) -> Path:
    """A copy to spoil, its weights linked."""
    folder = tmp_path / "source"
    folder.mkdir()
    for path in tiny.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def refusal(source: Path, *options: str) -> UserError:
    """What the command raises, which the command line prints in one line."""
    result = CliRunner().invoke(app, ["quantize", str(source), *options])
    assert isinstance(result.exception, UserError), repr(result.exception)
    assert "\n" not in result.exception.message
    assert result.output == ""  # no bar of a work that does not begin
    return result.exception


def write_tokenizer_of_another_model(folder: Path) -> None:
    tokenizer = {**TOKENIZER, "model": {"type": "BPE", "vocab": {"a": 0, "b": 500}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json cannot be read"),
    "a damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"), r"tokenizer\.json is not understood"
    ),
    "another model's tokenizer": (write_tokenizer_of_another_model, "token id 500, .* vocabulary has 97"),
    "another family": (
        lambda folder: change_config(folder, architectures=["Gemma3ForCausalLM"], hidden_act="gelu_pytorch_tanh"),
        "family gemma3; quantize knows llama, mistral, qwen2, qwen3",
    ),
    "no decoder": (lambda folder: change_config(folder, architectures=["T5ForConditionalGeneration"]), "T5"),
    "no architecture": (lambda folder: change_config(folder, architectures=None), "architectures = null"),
    "a damaged config": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    "impossible sizes": (lambda folder: change_config(folder, num_hidden_layers=0), "num_hidden_layers = 0"),
    "quantized weights": (
        lambda folder: change_config(folder, quantization_config={"quant_method": "awq"}), "quantized already .awq"
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no \.safetensors file"),
    "damaged weights": (
        lambda folder: ((folder / "model.safetensors").unlink(), (folder / "model.safetensors").write_bytes(b"x")),
        "damaged or cut off",
    ),
    "weights of another model": (
        lambda folder: change_config(folder, num_hidden_layers=2), r"has no tensor model\.layers\.1"
    ),
    "an odd MLP": (
        lambda folder: change_config(folder, intermediate_size=130), "intermediate_size = 130, .* multiples of 32"
    ),
    "odd KV heads": (
        lambda folder: change_config(folder, num_key_value_heads=1),
        r"num_key_value_heads \* head_dim = 16, .*--method fp8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILED)
def test_a_model_that_cannot_be_quantized_is_said(source: Path, tmp_path: Path, kind: str) -> None:
    spoil, says = SPOILED[kind]
    spoil(source)
    text = tmp_path / "text.txt"
    text.write_text("ab" * 600)

    error = refusal(source, "--method", "awq", "--calibration", str(text), "--output", str(tmp_path / "out"))

    assert error.param in ("model", "method", "calibration")
    with pytest.raises(UserError, match=says):
        raise error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "hqq"], "'hqq' is unknown; fp8, awq, gptq are"),
        (["--method", "awq"], "--method awq needs --calibration FILE.*--method fp8 needs none"),
        (["--method", "gptq", "--calibration", "short.txt"], "512 tokens or more.*this one has 5"),
        (["--method", "gptq", "--calibration", "missing.txt"], "missing.txt cannot be read"),
        (["--method", "gptq", "--calibration", "."], "cannot be read"),
        (["--method", "fp8", "--calibration", "empty.txt"], "512 tokens or more.*this one has 0"),
        (
            ["--method", "fp8", "--group-size", "32"],
            "--group-size is 32, and --method fp8 has a step for each row",
        ),
        (
            ["--method", "awq", "--calibration", "long.txt", "--group-size", "0"],
            "--group-size is 0, .* 32, 64, 128",
        ),
        (["--method", "fp8", "--output", "short.txt"], "short.txt is a file: name a folder"),
        (["--method", "fp8", "--output", "source"], "source exists and is not empty"),
        (["--method", "fp8", "--output", "short.txt/out"], "cannot be made: there is no folder .*short.txt"),
        (["--method", "fp8", "--output", "none/out"], "cannot be made: there is no folder .*none"),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_followed_is_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("ababa")
    (tmp_path / "long.txt").write_text("ab" * 600)
    (tmp_path / "empty.txt").touch()
    if "--output" not in options:
        options = [*options, "--output", "out"]

    error = refusal(source, *options)

    with pytest.raises(UserError, match=says):
        raise error
    assert not (tmp_path / "out").exists()


DAMAGED = {
    "not a number": (lambda weight: weight.view(-1)[7:8].fill_(torch.nan), "holds NaN or infinity"),
    "far too large": (lambda weight: weight.mul_(1e30), "beyond"),
}


@pytest.mark.parametrize("was_there", [True, False])
@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_weights_that_are_no_numbers_are_named_and_nothing_is_left(
    source: Path, tmp_path: Path, kind: str, method: str, was_there: bool
) -> None:
    spoil, says = DAMAGED[kind]
    tensors = load_file(source / "model.safetensors")
    spoil(tensors["model.layers.0.mlp.up_proj.weight"])
    (source / "model.safetensors").unlink()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (tmp_path / "text.txt").write_text("ab" * 600)
    target = tmp_path / "out"
    if was_there:
        target.mkdir()
    options = ["--method", method, "--calibration", str(tmp_path / "text.txt"), "--output", str(target)]

    result = CliRunner().invoke(app, ["quantize", str(source), *options])

    assert isinstance(result.exception, UserError), repr(result.exception)
    assert "\n" not in result.exception.message
    with pytest.raises(UserError, match=rf"model\.layers\.0\.mlp\.(up|down)_proj.*{says}"):
        raise result.exception
    assert target.exists() == was_there
    assert not was_there or not list(target.iterdir())


def test_files_of_other_kinds_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file or folder"):
        raise refusal(tmp_path / "nowhere", "--method", "fp8", "--output", str(tmp_path / "out"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="is a GGUF file, which is quantized already"):
        raise refusal(tmp_path / "model.gguf", "--method", "fp8", "--output", str(tmp_path / "out"))
