"""What a replica asks of the autoscaler: its load now, and the work that it has been doing lately."""

from __future__ import annotations

from math import exp

from cluster.autoscaling import ReplicaDemand
from workers.brain_messages import Load

HORIZON_S = 10.0
"""Age at which work counts a third: as long as a decision may take."""


class DemandMeter:
    """Turns successive loads into demands; time comes in as an argument.

    Work is counted at the price of the cost model: uncached prompt tokens, and output tokens with the context that
    they read. The constant part of steps is left out, since a fuller batch shares it: a replica with one slow stream
    is not at its limit.
    """

    def __init__(self, load: Load, now_s: float, max_num_seqs: int, block_size: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._load = load
        self._now_s = now_s
        self._prefill_share = 0.0
        self._decode_share = 0.0

    def measure(self, load: Load, now_s: float, num_held_tokens: int = 0) -> ReplicaDemand:
        """The demand at ``now_s``, the work since the last call averaged into what came before.

        ``num_held_tokens`` are prompt tokens that wait at ingresses until replicas have room.
        """
        elapsed_s = now_s - self._now_s
        if elapsed_s > 0:
            keep = exp(-elapsed_s / HORIZON_S)
            prefill_s, decode_s = self._work_s(load)
            self._prefill_share = keep * self._prefill_share + (1 - keep) * prefill_s / elapsed_s
            self._decode_share = keep * self._decode_share + (1 - keep) * decode_s / elapsed_s
            self._load, self._now_s = load, now_s
        cost = load.cost
        return ReplicaDemand(
            queued_work_s=load.queued_work_s + cost.per_token_s * num_held_tokens,
            step_s=cost.step_s(load.num_running, 0, load.num_context_tokens),
            step_base_s=cost.base_s,
            work_share=self._prefill_share + self._decode_share,
            prefill_share=self._prefill_share,
            room_share=self._room_share(load),
            num_requests=load.num_running + load.num_waiting,
        )

    def _room_share(self, load: Load) -> float:
        seats = (load.num_running + load.num_waiting) / self._max_num_seqs
        if not load.num_blocks:
            return seats
        num_wanted = load.num_queued_tokens / self._block_size if load.num_waiting else 0.0
        return max(seats, (load.num_blocks - load.num_free_blocks + num_wanted) / load.num_blocks)

    def _work_s(self, load: Load) -> tuple[float, float]:
        """Seconds of prefill and of decoding done since the last load."""
        before, cost = self._load, load.cost
        num_computed = (load.num_prompt_tokens - load.num_cached_tokens) - (
            before.num_prompt_tokens - before.num_cached_tokens
        )
        num_outputs = load.num_output_tokens - before.num_output_tokens
        num_context = load.num_context_tokens / max(1, load.num_running)
        per_output_s = cost.per_sequence_s + cost.per_context_token_s * num_context
        return max(0, num_computed) * cost.per_token_s, max(0, num_outputs) * per_output_s
