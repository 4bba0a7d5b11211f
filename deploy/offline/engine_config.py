"""The engine of offline generation, from settings and what the ranks have room for."""

from __future__ import annotations

from deploy.settings import ServeSettings
from workers.checkpoint.model_config import ModelConfig
from workers.engine.config import EngineConfig
from workers.model.rank_config import BlockCounts

_MAX_PREFILL_OVERHEAD = 0.01
"""Nobody waits for a first token, all for the last."""


def engine_config(
    settings: ServeSettings, max_model_len: int, counts: BlockCounts, model_config: ModelConfig
) -> EngineConfig:
    """What the brain is told of its model, its memory and its limits."""
    max_num_seqs, max_num_batched_tokens = settings.step_limits
    return EngineConfig(
        max_model_len=max_model_len,
        num_blocks=counts.device,
        num_host_blocks=counts.host,
        policy=settings.scheduling_policy,
        preemption_mode=settings.preemption_mode,
        kv_host_fraction=settings.kv_host_fraction,
        block_size=settings.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        eos_token_ids=model_config.eos_token_ids,
        vocab_size=model_config.vocab_size,
        max_step_growth=settings.max_step_growth,
        max_prefill_overhead=_MAX_PREFILL_OVERHEAD,
        replays_outputs=settings.deterministic and settings.device_name == "cuda",
        run_ahead=1 if settings.device_name == "cuda" else 0,
    )
