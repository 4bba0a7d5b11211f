"""What the brain needs to know about its model and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Frozen: a resolved value is a new object."""

    max_model_len: int
    """Most tokens of one request, prompt and output together."""
    num_blocks: int
    """Device blocks in the pool."""
    block_size: int = 16
    """Tokens a block."""
    max_num_seqs: int = 64
    """Rows of the batch."""
    max_num_batched_tokens: int = 1024
    """Token budget of a step."""
    max_step_growth: float | None = None
    """By how many times its own duration a step of decoding requests may grow for prompts beside it, by the cost model;
    None: as ``max_num_batched_tokens`` lets it."""
    max_prefill_overhead: float = 0.04
    """Of a step with prompts, the share that its fixed part may take where more of them wait: with less, steps are
    longer, and first tokens, and those of requests beside them, come later."""
    enable_prefix_caching: bool = True
    eos_token_ids: tuple[int, ...] = ()
    hash_root: bytes = b"shoal"
    """Start of the chain of block hashes: covers model, weight version, KV dtype and block size."""
    max_preemptions: int = 3
    """A request preempted this often is not chosen again: it comes back when blocks for all it may need are free."""
    run_ahead: int = 1
    """Steps launched beyond the one whose result is awaited; 0 waits for each."""
    num_host_blocks: int = 0
    """Blocks of the host tier; 0: there is none."""
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    """What becomes of the blocks of a preempted request. "swap" computes nothing again that the host tier has, or
    has room for; "auto" does what takes less time."""
    kv_host_fraction: float = 0.5
    """Share of the host tier that preempted requests leave to cached prefixes."""
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """Who is served first."""
    replays_outputs: bool = False
    """Output tokens are computed one a step even where they are known, as when they were sampled, and only blocks of
    prompts are cached: what was preempted or found then changes no bit, though prompts have kernels of their own."""
    vocab_size: int | None = None
    """Token ids at or past it are refused; None: any id is taken."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.run_ahead < 0 or self.max_preemptions < 0:
            raise ValueError("run_ahead and max_preemptions must not be negative")
        if self.max_step_growth is not None and self.max_step_growth <= 0:
            raise ValueError(f"max_step_growth must be above 0, got {self.max_step_growth}")
        if not 0 < self.max_prefill_overhead <= 1:
            raise ValueError(
                f"max_prefill_overhead must be above 0 and at most 1, got {self.max_prefill_overhead}"
            )
        if self.num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must not be negative, got {self.num_host_blocks}")
        if not 0 <= self.kv_host_fraction <= 1:
            raise ValueError(f"kv_host_fraction must be from 0 to 1, got {self.kv_host_fraction}")

    @property
    def num_slots(self) -> int:
        """Tokens that the pool can hold."""
        return self.num_blocks * self.block_size

    @property
    def num_watermark_blocks(self) -> int:
        """Blocks left free when a request is admitted beside others, so that those have room to grow.

        1 % of the pool, as vLLM has it.
        """
        return self.num_blocks // 100 + 1
