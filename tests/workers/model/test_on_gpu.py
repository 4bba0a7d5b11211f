"""A rank on a GPU gives the CPU's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from workers.checkpoint.model_config import Experts, ModelConfig
from workers.checkpoint.source import ModelFiles
from workers.engine.plan import LateMasks, NewRow, StepPlan, StepResult, TokenMask
from workers.engine.request import ChoiceParams
from workers.model import cuda_rank, tensor_source
from workers.model import rank as rank_module
from workers.model.chunk_work import ChunkCut
from workers.model.rank import Rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig(
    "qwen3", 128, 192, 3, 6, 2, head_dim=64, vocab_size=300, max_position_embeddings=512, has_qk_norm=True
)
FAMILIES = {
    "qwen3": CONFIG,
    "windows, caps and post norms": replace(
        CONFIG,
        num_layers=4,
        windows=(24, 0, 24, 0),
        rope_kinds=("local", "global", "local", "global"),
        activation="gelu_tanh",
        attention_soft_cap=30.0,
        logit_soft_cap=20.0,
        embedding_scale=11.3,
        has_offset_norms=True,
        has_post_norms=True,
    ),
    "experts": replace(CONFIG, experts=Experts(8, 2, 96, has_normed_weights=True, dense_layers=(0,))),
    "biases": replace(CONFIG, head_dim=80, has_qk_norm=False, has_qkv_bias=True, has_out_bias=True),
    "a rotated part": replace(CONFIG, has_qk_norm=False, rotary_dim=32),
}
PROMPTS = [[1, 2, 3], [4] * 20, list(range(290)), [9]]


@pytest.fixture(autouse=True)
def one_set_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's generator draws other numbers than the CPU's: take the CPU's weights on both."""
    cpu = torch.device("cpu")
    opened = rank_module.open_source

    def open_source(files, load_format, *args):
        return (
            tensor_source.DummySource(3, cpu) if load_format == "dummy" else opened(files, load_format, *args)
        )

    monkeypatch.setattr(rank_module, "open_source", open_source)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_equal_the_cpus(make_rank, plan_driver, family: str, enforce_eager: bool) -> None:
    params = [
        ChoiceParams(max_tokens=99, seed=s, top_p=0.9, top_k=40, presence_penalty=0.3) for s in range(4)
    ]
    params += [ChoiceParams(max_tokens=99, temperature=0.0), ChoiceParams(max_tokens=99, seed=5, min_p=0.02)]
    fields = tiny(FAMILIES[family], enforce_eager=enforce_eager)

    on_cpu, on_gpu = (
        plan_driver.PlanDriver(make_rank(device=device, **fields), 64).generate(
            [*PROMPTS, [7] * 40, [3, 2, 1]], 20, params, chunk=100, is_ahead=True
        )[0]
        for device in ("cpu", "cuda")
    )

    assert on_gpu == on_cpu


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_stay_as_they_are_where_contexts_are_cut_into_pieces(
    make_rank, plan_driver, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    cuts: list[bool] = []

    def pays(way: ChunkCut, starts, context_lens) -> bool:
        cuts.append(way.cut(starts, context_lens, int(starts[-1])) is not None)
        return True

    monkeypatch.setattr(ChunkCut, "pays", pays)
    monkeypatch.setattr(cuda_rank, "can_attend", lambda *_: True)
    params = [ChoiceParams(max_tokens=99, seed=s, top_p=0.9) for s in range(4)]

    on_cpu, on_gpu = (
        plan_driver.PlanDriver(make_rank(device=device, **tiny(FAMILIES[family])), 64).generate(
            PROMPTS, 20, params, chunk=70, is_ahead=True
        )[0]
        for device in ("cpu", "cuda")
    )

    assert on_gpu == on_cpu
    assert sum(cuts) >= 4


def test_goldens_in_float32(make_rank, demo_model: ModelFiles, all_goldens, plan_driver) -> None:
    rank = make_rank(num_blocks=1200, files=demo_model, max_model_len=512, device="cuda", dtype="float32")

    outputs, _ = plan_driver.PlanDriver(rank, 1200).generate(
        [c["prompt_token_ids"] for c in all_goldens], 64, is_ahead=True
    )

    assert len(outputs) > 20
    assert outputs == [case["output_token_ids"] for case in all_goldens]


def test_bfloat16_departs_only_where_the_choice_is_close(
    make_rank, demo_model: ModelFiles, all_goldens, plan_driver
) -> None:
    rank = make_rank(num_blocks=1200, files=demo_model, max_model_len=512, device="cuda")

    outputs, _ = plan_driver.PlanDriver(rank, 1200).generate([c["prompt_token_ids"] for c in all_goldens], 64)

    for case, tokens in zip(all_goldens, outputs, strict=True):
        pairs = zip(tokens, case["output_token_ids"], case["margins"], strict=True)
        first_margin = next((margin for got, want, margin in pairs if got != want), 0.0)
        # bfloat16 keeps 8 bits: logits near 20 carry errors of some tenths.
        assert first_margin < 0.6, case["name"]


def test_vectors_of_prompts_equal_the_cpus(make_rank) -> None:
    params = [ChoiceParams(max_tokens=1, pooling=kind) for kind in ("mean", "last")]
    rows = [NewRow(row, PROMPTS[2 - row], len(PROMPTS[2 - row]), one) for row, one in enumerate(params)]
    lengths = [len(row.token_ids) for row in rows]
    plan = StepPlan(0, rows, [0, 1], [0, 0], lengths, [True, True], [list(range(20)), list(range(20, 24))])

    results = [run(make_rank(device=device, **tiny(CONFIG)), plan)[0] for device in ("cpu", "cuda")]

    vectors = [[torch.frombuffer(bytearray(one), dtype=torch.float32) for one in r.pooled] for r in results]
    for on_cpu, on_gpu in zip(*vectors, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=1e-4, rtol=1e-4)


def test_log_probabilities_of_prompts_equal_the_cpus(make_rank) -> None:
    params = ChoiceParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=3, num_logprobs=2)
    row = NewRow(0, PROMPTS[2], len(PROMPTS[2]), params)
    first = StepPlan(0, [row], [0], [0], [100], [False], [list(range(19))])
    second = StepPlan(1, [], [0], [100], [190], [True], [[]])

    results = [run(make_rank(device=device, **tiny(CONFIG)), first, second)[1] for device in ("cpu", "cuda")]

    for scored in zip(*(result.prompt_logprobs[0] + result.logprobs for result in results), strict=True):
        assert scored[0].top_token_ids == scored[1].top_token_ids
        values = [torch.tensor([one.sampled, *one.top_logprobs]) for one in scored]
        torch.testing.assert_close(*values, atol=1e-4, rtol=1e-4)
    assert len(results[1].prompt_logprobs[0]) == 289


def test_masks_allow_on_a_gpu_what_they_allow_on_the_cpu(make_rank) -> None:
    params = [ChoiceParams(max_tokens=9, seed=seed) for seed in range(3)]
    rows = [NewRow(row, [5 + row] * 20, 20, one) for row, one in enumerate(params)]
    early, late, later = (
        TokenMask(place, bytes(byte if i == n else 0 for i in range(38)))
        for place, n, byte in ((1, 3, 0b1000), (0, 7, 0b11), (0, 9, 0b110000))
    )
    tables = [[2 * row, 2 * row + 1] for row in range(3)]
    plans = [
        StepPlan(0, rows, [0, 1, 2], [0] * 3, [20] * 3, [True] * 3, tables, masks=[early], deferred=[0]),
        StepPlan(1, [], [1, 2], [20] * 2, [1] * 2, [True] * 2, [[], []]),
        StepPlan(2, [], [0], [20], [1], [True], [[]], deferred=[0], late_masks=LateMasks(0, [late])),
        StepPlan(3, [], [], [], [], [], [], late_masks=LateMasks(2, [later])),
    ]

    on_cpu, on_gpu = (
        [result.token_ids for result in run(make_rank(device=device, **tiny(CONFIG)), *plans)]
        for device in ("cpu", "cuda")
    )

    assert on_gpu == on_cpu
    assert on_gpu[0][0] in (56, 57)
    assert on_gpu[0][1] == 27
    assert on_gpu[2][0] in (76, 77)


def tiny(config: ModelConfig, **fields: object) -> dict[str, object]:
    return {"load_format": "dummy", "model_config": config, "dtype": "float32", **fields}


def run(rank: Rank, *plans: StepPlan) -> list[StepResult]:
    """Launch all, then collect all."""
    for plan in plans:
        rank.launch(plan)
    return [rank.collect() for _ in plans]
