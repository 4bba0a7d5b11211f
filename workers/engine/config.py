"""What the brain needs to know about its model and its memory."""

from __future__ import annotations

from dataclasses import dataclass


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
    enable_prefix_caching: bool = True
    eos_token_ids: tuple[int, ...] = ()
    hash_root: bytes = b"shoal"
    """Start of the chain of block hashes: covers model, weight version, KV dtype and block size."""
    max_preemptions: int = 3
    """A request preempted this often is not chosen again while another can be."""
    run_ahead: int = 1
    """Steps launched beyond the one whose result is awaited; 0 waits for each."""
