"""A rank on a GPU gives the CPU's tokens."""

from __future__ import annotations

import pytest
import torch

from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.source import ModelFiles
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model import rank as rank_module
from workers.model import tensor_source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig(
    "qwen3", 128, 192, 3, 6, 2, head_dim=64, vocab_size=300, max_position_embeddings=512, has_qk_norm=True
)
PROMPTS = [[1, 2, 3], [4] * 20, list(range(290)), [9]]


def test_sampled_tokens_equal_the_cpus(make_rank, plan_driver, monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU's generator draws other numbers than the CPU's: take the CPU's weights on both.
    monkeypatch.setattr(
        rank_module, "open_source", lambda *args: tensor_source.DummySource(3, torch.device("cpu"))
    )
    params = [
        ChoiceParams(max_tokens=99, seed=s, top_p=0.9, top_k=40, presence_penalty=0.3) for s in range(4)
    ]
    fields = {"load_format": "dummy", "model_config": CONFIG, "dtype": "float32", "kv_cache_bytes": 1 << 26}

    on_cpu, on_gpu = (
        plan_driver.PlanDriver(make_rank(device=device, **fields), 64).generate(
            PROMPTS, 20, params, chunk=100, is_ahead=True
        )[0]
        for device in ("cpu", "cuda")
    )

    assert on_gpu == on_cpu


def test_goldens_in_float32(make_rank, demo_model: ModelFiles, goldens, plan_driver) -> None:
    rank = make_rank(num_blocks=400, files=demo_model, max_model_len=256, device="cuda", dtype="float32")

    outputs, _ = plan_driver.PlanDriver(rank, 400).generate(
        [c["prompt_token_ids"] for c in goldens], 64, is_ahead=True
    )

    assert outputs == [case["output_token_ids"] for case in goldens]


def test_bfloat16_departs_only_where_the_choice_is_close(
    make_rank, demo_model: ModelFiles, goldens, plan_driver
) -> None:
    rank = make_rank(num_blocks=400, files=demo_model, max_model_len=256, device="cuda")

    outputs, _ = plan_driver.PlanDriver(rank, 400).generate([c["prompt_token_ids"] for c in goldens], 64)

    for case, tokens in zip(goldens, outputs, strict=True):
        pairs = zip(tokens, case["output_token_ids"], case["margins"], strict=True)
        first_margin = next((margin for got, want, margin in pairs if got != want), 0.0)
        # bfloat16 keeps 8 bits: logits near 20 carry errors of some tenths.
        assert first_margin < 0.6, case["name"]


def test_memory_left_by_the_utilization_becomes_blocks(make_rank, demo_model: ModelFiles) -> None:
    rank = make_rank(files=demo_model, max_model_len=1024, device="cuda", gpu_memory_utilization=0.5)

    total = torch.cuda.mem_get_info()[1]
    pool_bytes = rank.max_num_blocks() * rank._layout.block_bytes
    assert 0.3 * total < pool_bytes < 0.5 * total


def test_vectors_of_prompts_equal_the_cpus(make_rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rank_module, "open_source", lambda *args: tensor_source.DummySource(3, torch.device("cpu"))
    )
    fields = {"load_format": "dummy", "model_config": CONFIG, "dtype": "float32", "kv_cache_bytes": 1 << 26}
    params = [ChoiceParams(max_tokens=1, pooling=kind) for kind in ("mean", "last")]
    rows = [NewRow(row, PROMPTS[2 - row], len(PROMPTS[2 - row]), one) for row, one in enumerate(params)]
    lengths = [len(row.token_ids) for row in rows]
    tables = [list(range(20)), list(range(20, 24))]

    vectors = []
    for device in ("cpu", "cuda"):
        rank = make_rank(device=device, **fields)
        rank.launch(StepPlan(0, rows, [0, 1], [0, 0], lengths, [True, True], tables))
        pooled = rank.collect().pooled
        vectors.append([torch.frombuffer(bytearray(one), dtype=torch.float32) for one in pooled])

    for on_cpu, on_gpu in zip(*vectors, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=1e-4, rtol=1e-4)
