"""The KV pool is what the utilization leaves beside all else, and serving takes no memory from CUDA."""

from __future__ import annotations

import pytest
import torch

from workers.checkpoint.model_config import ModelConfig
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.errors import UserError
from workers.engine.request import ChoiceParams, EngineRequest
from workers.model.cuda_rank import make_rank
from workers.model.memory_account import used_bytes
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig(
    "llama", 1024, 2816, 4, 16, 4, head_dim=64, vocab_size=32_000, max_position_embeddings=4096
)
UTILIZATION = 0.3
MOST_UNUSED_BYTES = 512 << 20


def load_rank(**fields: object) -> Rank:
    settings = {
        "load_format": "dummy",
        "model_config": CONFIG,
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 160,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": UTILIZATION,
    }
    rank = make_rank(RankConfig(**{**settings, **fields}))
    rank.load()
    return rank


def mixed_requests() -> list[EngineRequest]:
    """Prompts of many lengths; every option of sampling on some of them."""
    params = [
        ChoiceParams(max_tokens=40),
        ChoiceParams(max_tokens=30, temperature=0.0, num_logprobs=5),
        ChoiceParams(max_tokens=50, top_k=40, top_p=0.9),
        ChoiceParams(max_tokens=20, min_p=0.05, repetition_penalty=1.1, num_logprobs=20),
        ChoiceParams(max_tokens=5, num_prompt_logprobs=4),
        ChoiceParams(max_tokens=1, pooling="mean"),
        ChoiceParams(max_tokens=25, logit_bias={3: 2.0}, allowed_token_ids=tuple(range(3000))),
    ]
    lengths = [1, 7, 130, 513, 2048, 3900, 64, 1000, 31]
    return [
        EngineRequest(
            str(number),
            [(31 * number + i * i) % 32_000 for i in range(lengths[number % len(lengths)])],
            params[number % len(params)],
        )
        for number in range(400)
    ]


def test_the_pool_takes_what_is_left_and_serving_takes_nothing_more() -> None:
    rank = load_rank()
    counts = rank.block_counts()
    rank.allocate(counts.device)
    rank.warm_up()
    before_serving = torch.cuda.memory_stats()
    limit = UTILIZATION * torch.cuda.mem_get_info()[1]
    config = EngineConfig(
        max_model_len=4096, num_blocks=counts.device, max_num_seqs=160, max_num_batched_tokens=4096
    )
    engine = Engine(config)
    for request in mixed_requests():
        engine.add(request, 0.0)

    num_outputs, waste = 0, []
    while engine.has_work:
        while (plan := engine.plan(0.0)) is not None:
            rank.launch(plan)
        num_outputs += len(engine.apply(rank.collect(), 0.0))
        waste.append(engine.load().kv_waste)

    assert num_outputs > 400
    stats = torch.cuda.memory_stats()
    names = ("num_device_alloc", "reserved_bytes.small_pool.current", "reserved_bytes.large_pool.current")
    assert [stats[name] for name in names] == [before_serving[name] for name in names]
    used = used_bytes(torch.device("cuda"))
    assert sum(waste) / len(waste) < 0.04
    assert limit - MOST_UNUSED_BYTES < used <= limit


def test_too_little_memory_for_the_longest_request_names_what_would_do() -> None:
    rank = load_rank(kv_cache_bytes=1 << 20)
    with pytest.raises(UserError, match=r"KV memory holds 256 tokens.*max_model_len 256 or kv_cache_gib"):
        rank.block_counts()

    rank = load_rank(gpu_memory_utilization=0.002)
    with pytest.raises(UserError, match="gpu_memory_utilization 0"):
        rank.block_counts()
