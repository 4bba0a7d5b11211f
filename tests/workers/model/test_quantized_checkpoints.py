"""Checkpoints in each tool's layout give the logits of the dense weights that they stand for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.scaled_rows import FLOAT8, quantize_rows_ref
from workers.checkpoint.quantization import Quantization
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model.quantized.linears import make_linear
from workers.model.quantized.readers import read_weight
from workers.model.quantized.stored_weight import DenseWeight, StoredWeight, join
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig
from workers.model.tensor_source import GgufSource, SafetensorsSource

CPU = torch.device("cpu")
VOCAB = 97
PROMPT = [5, 9, 2, 71, 33, 8]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writers = _load("checkpoint_writers")
ALL_FORMATS = writers.WEIGHT_ONLY | writers.SCALED


def random_model() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, 64),
        "lm_head.weight": torch.randn(VOCAB, 64) / 8,
    }
    tensors["model.norm.weight"] = torch.ones(64)
    shapes = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (192, 64),
        "mlp.up_proj": (192, 64),
        "mlp.down_proj": (64, 192),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(64)
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = torch.randn(shape) / shape[1] ** 0.5
    return tensors


def write_models(folder: Path, config: dict, write: object) -> tuple[ModelFiles, ModelFiles]:
    """The same model quantized by ``write``, and as the dense weights that this stands for."""
    quantized, dense = {}, {}
    for name, tensor in random_model().items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj"):
            parts, dense[name] = write(tensor)
            quantized |= {f"{stem}.{part}": value.contiguous() for part, value in parts.items()}
        else:
            quantized[name] = dense[name] = tensor
    files = []
    for kind, tensors, more in (
        ("quantized", quantized, {"quantization_config": config}),
        ("dense", dense, {}),
    ):
        (folder / kind).mkdir()
        save_file(tensors, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps(CONFIG | more))
        files.append(ModelFiles(folder / kind, kind))
    return files[0], files[1]


def logprobs(files: ModelFiles, **fields: object) -> torch.Tensor:
    rank = Rank(RankConfig(files=files, num_threads=1, **fields))
    rank.load()
    rank.allocate(8)
    params = ChoiceParams(max_tokens=1, temperature=0.0, num_logprobs=VOCAB)
    rank.launch(StepPlan(0, [NewRow(0, PROMPT, len(PROMPT), params)], [0], [0], [len(PROMPT)], [True], [[0]]))
    (found,) = rank.collect().logprobs
    ordered = torch.empty(VOCAB)
    ordered[found.top_token_ids] = torch.tensor(found.top_logprobs)
    return ordered


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("name", writers.WEIGHT_ONLY)
def test_codes_give_the_logits_of_what_they_stand_for(name: str, is_packed: bool, tmp_path: Path) -> None:
    quantized, dense = write_models(tmp_path, *writers.WEIGHT_ONLY[name])

    got = logprobs(quantized, pack_weights=is_packed)

    torch.testing.assert_close(got, logprobs(dense), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("name", writers.SCALED)
def test_rounded_activations_stay_near_the_logits(name: str, is_packed: bool, tmp_path: Path) -> None:
    quantized, dense = write_models(tmp_path, *writers.SCALED[name])

    got = logprobs(quantized, pack_weights=is_packed)

    want = logprobs(dense)
    assert 0 < (got - want).abs().max() < 0.5
    assert torch.corrcoef(torch.stack((got, want)))[0, 1] > 0.995


@pytest.mark.parametrize("name", ["fp8", "fp8 static", "compressed int8"])
def test_a_layer_of_8_bits_multiplies_what_it_rounded(name: str) -> None:
    _, write = writers.SCALED[name]
    tensors, dense = write(torch.randn(48, 64))
    is_int8 = tensors["weight"].dtype == torch.int8
    source = _DictSource({f"a.{key}": value for key, value in tensors.items()})
    how = Quantization("compressed-tensors", kind="int-quantized") if is_int8 else Quantization("fp8")
    x = torch.randn(5, 64)

    linear = make_linear([read_weight(source, "a", (48, 64), how)], None, CPU, torch.float32)

    rounded, scales = quantize_rows_ref(
        x, torch.int8 if is_int8 else FLOAT8, 0.01 if name == "fp8 static" else None
    )
    want = rounded.float() * scales[:, None] @ dense.T
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)
    linear.pack()
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)


class _DictSource:
    """Tensors from a dictionary."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(
        self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        assert shape is None or tuple(self._tensors[name].shape) == shape
        return self._tensors[name]

    def has(self, name: str) -> bool:
        return name in self._tensors


def stored(name: str, weight: torch.Tensor) -> tuple[StoredWeight, torch.Tensor]:
    """A weight as ``name`` stores it, read back, and what it stands for."""
    from workers.checkpoint.quantization import quantization_of

    config, write = ALL_FORMATS[name]
    tensors, dense = write(weight)
    source = _DictSource({f"a.{key}": value for key, value in tensors.items()})
    how = quantization_of({"quantization_config": config}, "here")
    return read_weight(source, "a", tuple(weight.shape), how), dense


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_ranks_parts_are_parts_of_the_whole(name: str) -> None:
    whole, dense = stored(name, torch.randn(96, 128))

    torch.testing.assert_close(whole.dequantize(), dense, rtol=1e-6, atol=1e-6)
    for rows, columns in (
        (range(48), range(128)),
        (range(40, 96), range(128)),
        (range(96), range(64, 128)),
        (range(96), range(16, 48)),
    ):
        part = whole.take(rows, columns)
        want = dense[rows.start : rows.stop, columns.start : columns.stop]
        torch.testing.assert_close(part.dequantize(), want, rtol=1e-6, atol=1e-6)
        linear = make_linear([part], None, CPU, torch.float32)
        assert (linear.out_features, linear.in_features) == (len(rows), len(columns))


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_projections_of_one_input_become_one_layer(name: str) -> None:
    torch.manual_seed(3)
    first, first_dense = stored(name, torch.randn(32, 64))
    torch.manual_seed(3)  # the same order of columns, where the format has one
    second, second_dense = stored(name, torch.randn(32, 64))

    joined = join([first, second])

    assert len(joined) == 1
    want = torch.cat((first_dense, second_dense))
    torch.testing.assert_close(joined[0].dequantize(), want, rtol=1e-6, atol=1e-6)


def test_layers_of_several_kinds_are_stacked() -> None:
    first, first_dense = stored("awq", torch.randn(32, 64))
    x, bias, plain = torch.randn(3, 64), torch.randn(40), torch.randn(8, 64)
    parts = [first, DenseWeight(plain)]

    linear = make_linear(parts, bias, CPU, torch.float32)

    torch.testing.assert_close(linear(x), x @ torch.cat((first_dense, plain)).T + bias)


def test_a_layer_left_out_of_the_format_is_read_in_full(tmp_path: Path) -> None:
    quantized, dense = write_models(tmp_path, *writers.WEIGHT_ONLY["awq"])
    name = "model.layers.1.mlp.down_proj"
    tensors = load_file(quantized.path / "model.safetensors")
    plain = load_file(dense.path / "model.safetensors")[f"{name}.weight"]
    kept = {key: value for key, value in tensors.items() if not key.startswith(name)}
    save_file(kept | {f"{name}.weight": plain}, quantized.path / "model.safetensors")

    torch.testing.assert_close(logprobs(quantized), logprobs(dense), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [("gptq", "gptq.*checkpoint is awq"), ("fp8", "checkpoint is awq"), ("bitsnbytes", "unknown.*awq.*gguf")],
)
def test_a_format_that_contradicts_the_checkpoint_is_refused(
    wanted: str, complaint: str, tmp_path: Path
) -> None:
    quantized, dense = write_models(tmp_path, *writers.WEIGHT_ONLY["awq"])

    with pytest.raises(UserError, match=complaint):
        Rank(RankConfig(files=quantized, quantization=wanted))
    with pytest.raises(UserError, match=r"not quantized.*fp8, int8, int4|unknown"):
        Rank(RankConfig(files=dense, quantization="awq" if wanted == "gptq" else "bitsnbytes"))


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq symmetric", "gptq 3 bits", "packed zeros"])
def test_codes_of_even_steps_stay_narrow_on_a_cpu_if_asked(name: str, tmp_path: Path) -> None:
    quantized, dense = write_models(tmp_path, *writers.WEIGHT_ONLY[name])

    rank = Rank(RankConfig(files=quantized, num_threads=1, quantization="int4"))
    rank.load()

    assert all(linear._narrow is not None for linear in rank._decoder.linears()[:-1])
    got, want = logprobs(quantized, quantization="int4"), logprobs(dense)
    assert 0 < (got - want).abs().max() < 0.15  # activations are rounded to 8 bits


@pytest.mark.parametrize("name", ["squeezellm", "nf4", "gptq 8 bits"])
def test_what_has_no_even_steps_of_4_bits_is_not_narrow(name: str, tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, *writers.WEIGHT_ONLY[name])

    with pytest.raises(UserError, match="'int4' was asked for, but the checkpoint is"):
        Rank(RankConfig(files=quantized, quantization="int4"))


@pytest.mark.parametrize(("wanted", "worst"), [("fp8", 0.4), ("int8", 0.2), ("int4", 1.5)])
def test_full_weights_are_quantized_at_load_if_asked(wanted: str, worst: float, tmp_path: Path) -> None:
    _, dense = write_models(tmp_path, *writers.WEIGHT_ONLY["awq"])

    got, want = logprobs(dense, quantization=wanted), logprobs(dense)

    assert 0 < (got - want).abs().max() < worst


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "hqq"}, "hqq.*awq, gptq"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "x"}, "'x'"),
        (writers.compressed("marlin-24", "channel"), "marlin-24"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "layout 'gemv_fast'.*'gemm'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'.*gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "several kinds"),
        ({"quant_method": "mxfp4"}, "'mxfp4'.*awq, gptq"),
        ({"quant_method": "quark"}, "'quark'.*awq, gptq"),
        (
            writers.compressed("nvfp4-pack-quantized", "tensor_group", 4),
            "nvfp4-pack-quantized.*pack-quantized of 4",
        ),
        (
            writers.compressed("float-quantized", "channel")
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse-24-bitmask",
        ),
    ],
)
def test_variants_that_are_not_read_are_named(raw: dict, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": raw}))

    with pytest.raises(UserError, match=complaint):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x")))


GGUF_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16")


def random_blocks(kind: str, num_rows: int, width: int) -> np.ndarray:
    """Random bytes of a type with scales that are numbers."""
    rng = np.random.default_rng(7)
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (num_rows * width // block, num_bytes), dtype=np.uint8)
    halves = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2))
    for start in halves:
        scales = (rng.standard_normal((len(raw), 1)) * 0.1).astype(np.float16)
        raw[:, start : start + 2] = scales.view(np.uint8)
    return raw.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_gguf_blocks_are_kept_and_mean_what_the_library_says(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "qwen2")
    kind_number = gguf.GGMLQuantizationType[kind]
    if kind == "F16":
        raw = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float16)
    else:
        raw = random_blocks(kind, 16, 512)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind_number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(tmp_path / "tiny.gguf", _Config())
    name = "model.layers.0.mlp.up_proj.weight"

    weight = source.read_blocks(name, (16, 512))

    want = torch.from_numpy(gguf.dequantize(raw, kind_number).astype(np.float32))
    assert torch.equal(weight.dequantize(), want)
    assert isinstance(weight, DenseWeight) == (kind == "F16")
    x = torch.randn(3, 512)
    linear = make_linear([weight], None, CPU, torch.float32)
    torch.testing.assert_close(linear(x), x @ want.T, rtol=1e-4, atol=1e-3)


class _Config:
    architecture = "qwen2"
    has_post_norms = False


def test_a_safetensors_file_of_another_type_is_refused(tmp_path: Path) -> None:
    save_file({"a.qweight": torch.zeros(64, 4)}, tmp_path / "model.safetensors")

    with pytest.raises(UserError, match=r"holds torch\.float32, torch\.int32 was expected"):
        read_weight(SafetensorsSource(tmp_path), "a", (32, 64), Quantization("awq", group_size=32))
