"""What cannot work is said before anything starts, with what would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deploy import local_cluster
from deploy.preflight import check_cluster
from deploy.settings import make_settings
from shoal import LLM
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip


LAYER = {
    "input_layernorm": (64,), "post_attention_layernorm": (64,), "self_attn.q_proj": (96, 64),
    "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 96),
    "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (97, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (97, 64),
    **{f"model.layers.{index}.{name}.weight": shape for index in range(2) for name, shape in LAYER.items()},
}


def write_weights(folder: Path, **changes: tuple[int, ...] | None) -> None:
    """All tensors of the config; those of ``changes`` in another shape, or left out."""
    shapes = {name: shape for name, shape in (SHAPES | changes).items() if shape is not None}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with everything but sense in it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_weights(tmp_path)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path


def check(folder: Path, **flags: Any) -> None:
    files = ModelFiles(folder, "tiny")
    check_cluster(make_settings(model=str(folder), device="cpu", **flags), files, read_model_config(files))


def test_what_fits_passes(folder: Path) -> None:
    check(folder, tensor_parallel_size=2)
    check(folder, kv_cache_gib=0.01, max_model_len=64)


@pytest.mark.parametrize(
    ("flags", "param", "says"),
    [
        ({"max_model_len": 4096}, "max_model_len", "takes at most 2048"),
        ({"tensor_parallel_size": 7}, "tensor_parallel_size", "at most 6"),
        ({"load_format": "gguf"}, "load_format", "is a folder"),
        ({"kv_cache_gib": 0.0001}, "kv_cache_gib", "--max-model-len 208"),
        ({"kv_cache_gib": 1e-9}, "kv_cache_gib", "hold 0 tokens"),
        (
            {"num_gpu_blocks_override": 4, "max_model_len": 100},
            "num_gpu_blocks_override",
            "holds 64 tokens.*7 blocks",
        ),
        ({"dtype": "float16"}, "dtype", "float32"),
        ({"quantization": "int3"}, "quantization", "--quantization is 'int3': .*'awq', 'gptq'"),
        ({"quantization": "awq"}, "quantization", "the checkpoint is not quantized"),
        ({"max_model_len": 1}, "max_model_len", "--max-model-len is 1.*2"),
        (
            {"swap_space": 1e9},
            "swap_space",
            r"--swap-space 1,000,000,000 \(GiB\) for each of 2 ranks.*lower it, to .* GiB",
        ),
        ({"kv_cache_gib": 1e9}, "kv_cache_gib", r"1,000,000,000 GiB of KV blocks.*lower --kv-cache-gib"),
        ({"num_gpu_blocks_override": 10**12}, "num_gpu_blocks_override", "lower .*--num-gpu-blocks-override"),
        (
            {"num_gpu_blocks_override": 2000, "kv_cache_gib": 0.01},
            "num_gpu_blocks_override",
            "is 2,000, --kv-cache-gib 0.01 holds 1,310 blocks",
        ),
        ({"cpu_threads": 1000}, "cpu_threads", "is 1000, this machine has .* cores"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_flag_that_does_not_fit_the_model_is_named(
    folder: Path, flags: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        check(folder, **flags)

    assert caught.value.param == param


@pytest.mark.parametrize("name", ["none", "a file", "a folder"])
def test_a_place_without_a_tokenizer_is_told_with_the_flag_that_named_it(folder: Path, name: str) -> None:
    (folder / "a file").touch()
    (folder / "a folder").mkdir()

    says = rf"--tokenizer .*/{name} is neither a folder with tokenizer.json nor a .gguf file: give"
    with pytest.raises(UserError, match=says) as caught:
        check(folder, tokenizer=folder / name)

    assert caught.value.param == "tokenizer"


@pytest.mark.parametrize(
    ("flag", "name", "says"),
    [
        ("api_keys", "none", r"the key file .*/none cannot be read \(No such file or directory\): name one"),
        ("api_keys", "bytes", "the key file .*/bytes is no text: give a list 'keys'"),
        ("api_keys", "empty", "the key file .*/empty: it holds no keys: give a list 'keys'"),
        ("record_trace", "empty", "is a file, it must be a folder: name one"),
        ("record_trace", "empty/inner", r"cannot be written to \(Not a directory\): name another folder"),
    ],
)
def test_a_file_that_is_no_such_file_is_told_before_the_model_is_read(
    tmp_path: Path, flag: str, name: str, says: str
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").touch()
    settings = make_settings(**{flag: tmp_path / name})

    with pytest.raises(UserError, match=rf"^--{flag.replace('_', '-')}\W.*{says}") as caught:
        local_cluster._configs(settings, ModelFiles(tmp_path / "no model", "tiny"))

    assert caught.value.param == flag


def test_the_advice_for_kv_memory_is_enough(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        check(folder, kv_cache_gib=0.0001)

    advised = float(caught.value.message.split("--kv-cache-gib ")[1].split(",")[0])
    check(folder, kv_cache_gib=advised)


def test_a_gpu_that_is_not_there_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    files = ModelFiles(folder, "tiny")

    for start in (
        lambda: check_cluster(make_settings(device="cuda"), files, read_model_config(files)),
        lambda: LLM(str(folder), device="cuda"),
    ):
        with pytest.raises(UserError, match=r"no CUDA device.*--device cpu") as caught:
            start()

        assert caught.value.param == "device"


def test_too_few_gpus_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    files = ModelFiles(folder, "tiny")
    settings = make_settings(device="cuda", replicas=2, tensor_parallel_size=2)

    with pytest.raises(UserError, match="need 4 GPUs, this machine has 3"):
        check_cluster(settings, files, read_model_config(files))
    with pytest.raises(UserError, match="--tensor-parallel-size 4 needs 4 GPUs, this machine has 3"):
        LLM(str(folder), device="cuda", tensor_parallel_size=4)


def test_a_folder_without_weights_is_told(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(UserError, match=r"no \.safetensors file.*--load-format dummy"):
        check(folder)
    check(folder, load_format="dummy")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"a": "model-2.safetensors"}}, r"model-2\.safetensors is missing, though"),
        ({"weight_map": {"a": "model.safetensors"}}, r"model\.safetensors has no tensor a, though"),
        (
            {"weight_map": {"a": "../model.safetensors"}},
            "names '../model.safetensors', which is no file of its own",
        ),
        ({"weight_map": {"a": "/etc/passwd"}}, "names '/etc/passwd', which is no file of its own"),
        ({"weight_map": {"a": 7}}, "names 7, which is no file"),
        ({"weight_map": [1]}, "index.json cannot be read"),
        ({}, "index.json cannot be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_index_that_does_not_fit_its_files_is_told(folder: Path, index: object, says: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(UserError, match=says):
        check(folder)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 20_000, -1])
def test_a_file_that_is_cut_off_is_told(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])

    with pytest.raises(UserError, match=r"model\.safetensors is damaged or cut off"):
        check(folder)


@pytest.mark.parametrize(
    ("shape", "says"), [(None, "has no tensor"), ((32, 60), r"has shape \(32, 60\).*\(32, 64\)")]
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(
    folder: Path, shape: tuple[int, ...] | None, says: str
) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    write_weights(folder, **{name: shape})

    with pytest.raises(UserError, match=says) as caught:
        check(folder)
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ({"quant_method": "awq"}, "says awq, but no layer is stored so .none has qweight.*in full"),
        ({"quant_method": "gptq", "bits": 4}, "says gptq, but no layer"),
        ({"quant_method": "fp8"}, "says fp8, but .*--quantization fp8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_full_weights_that_are_called_quantized_are_refused(
    folder: Path, method: dict[str, object], says: str
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": method}))

    with pytest.raises(UserError, match=says):
        check(folder)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 80}, "hidden_size is 80"),
        ({"intermediate_size": 100}, "intermediate_size is 100"),
        ({"head_dim": 6}, r"num_attention_heads \* head_dim is 36"),
        (
            {"architectures": ["MixtralForCausalLM"], "intermediate_size": 100},
            "intermediate_size is 100",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 48},
            "moe_intermediate_size is 48",
        ),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 8,
                "moe_intermediate_size": 32,
                "intermediate_size": 100,
                "mlp_only_layers": [0],
            },
            "intermediate_size is 100",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_width_that_4_bit_codes_do_not_divide_is_named_wherever_it_is(
    folder: Path, fields: dict[str, object], says: str
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))

    with pytest.raises(UserError, match=f"int4 takes widths that are multiples of 32, {says}: take int8"):
        check(folder, quantization="int4", load_format="dummy")


def test_widths_of_layers_that_a_model_does_not_have_do_not_matter(folder: Path) -> None:
    fields = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32, "intermediate_size": 100}
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))

    check(folder, quantization="int4", load_format="dummy")


def test_the_advice_for_swap_space_is_enough(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        check(folder, swap_space=1e9)

    check(folder, swap_space=float(caught.value.message.split("lower it, to ")[1].split(" GiB")[0]))


def test_a_pool_of_blocks_may_be_larger_than_the_default(folder: Path) -> None:
    check(folder, num_gpu_blocks_override=100_000)


def test_a_folder_without_a_tokenizer_is_told(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()

    with pytest.raises(UserError, match=r"tokenizer\.json"):
        check(folder)
    shutil.rmtree(folder)
