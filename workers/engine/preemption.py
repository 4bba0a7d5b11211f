"""Who gives way when blocks run dry, and what is copied to the host and back instead of computed again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.kv_cache import Prefix, SwapOut
from workers.engine.request_state import RequestState

_OTHERS_WAIT = 3.0
"""Seconds that a request's own copies may take for each second that all would compute for it. Over 50 cases in virtual
time (``deploy.bench.virtual_pressure``) 1 gets 98.6 % of the better of the two ways, 2 99.6 and 3 99.9."""


def choose_victim(
    last_to_first: Iterable[RequestState], request: RequestState, step_id: int, config: EngineConfig
) -> RequestState | None:
    """The last in turn behind ``request`` that may be preempted in the plan of ``step_id``; None: wait.

    Spared are requests that this plan has scheduled and those preempted ``max_preemptions`` times. One that has
    come back and not yet filled a block is taken only where there is no other, so that none is swapped back and
    forth without getting on. The beams of a search come and go together.
    """
    without_progress: RequestState | None = None
    for victim in last_to_first:
        if victim.turn <= request.turn:
            break
        if victim.group is not None and (
            victim.group is request.group or victim.group.last_step_id == step_id
        ):
            continue
        if victim.last_step_id == step_id or victim.num_preemptions >= config.max_preemptions:
            continue
        if victim.is_exhausted:
            return None  # it ends with the next result, and gives back its blocks by itself
        num_gained = len(victim.token_ids) + victim.num_in_flight - victim.num_known_at_start
        if victim.num_preemptions and num_gained < config.block_size:
            without_progress = without_progress or victim
            continue
        return victim
    return without_progress


def prefers_swap(
    victim: RequestState, swap: SwapOut, num_copies_ahead: int, cost: CostModel, config: EngineConfig
) -> bool:
    """True if moving the victim's blocks to the host and back costs less than computing them again.

    The two ways are separate links that work beside the steps: the victim alone waits for its copies, while all wait
    for what is computed again. What counts is the way that has more to do, which is back, since what the host has
    already need not go out; copies that are queued before it count in full, since others wait for those.

    Args:
        victim: a request about to be preempted.
        swap: what would be copied out; all of its blocks are copied back.
        num_copies_ahead: blocks whose copies are under way before it.
        cost: measured rates.
        config: may prefer one or the other whatever it takes.
    """
    if config.preemption_mode != "auto":
        return config.preemption_mode == "swap"
    num_own = math.ceil(len(swap.found) / _OTHERS_WAIT)
    return cost.copy_s(num_copies_ahead + num_own) < cost.prefill_s(victim.num_computed)


def worth_keeping(num_blocks: int, cost: CostModel, config: EngineConfig) -> bool:
    """True where a prompt of so many blocks comes back from the host sooner than it is computed; see ``worth_loading``.

    Where it does not, a copy on the host is of no use, and would have its block handed out before others.
    """
    is_wanted = config.preemption_mode == "swap"
    return is_wanted or cost.copy_s(num_blocks) < cost.prefill_s(num_blocks * config.block_size)


def worth_loading(
    request: RequestState, prefix: Prefix, num_copies_ahead: int, cost: CostModel, config: EngineConfig
) -> Prefix:
    """The prefix, without its host part where computing that takes less time than copying it.

    What a preempted request left on the host was worth a copy out, and is worth one back.
    """
    is_wanted = request.swapped is not None or config.preemption_mode == "swap"
    if not prefix.host or is_wanted:
        return prefix
    num_device_tokens = len(prefix.device) * config.block_size
    num_host_tokens = prefix.num_tokens - num_device_tokens
    if cost.copy_s(num_copies_ahead + len(prefix.host)) < cost.prefill_s(num_host_tokens, num_device_tokens):
        return prefix
    return Prefix(prefix.device, [], num_device_tokens)
