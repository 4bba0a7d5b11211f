"""What stands before each request that waits: for routers that ask whether it would start sooner elsewhere."""

from __future__ import annotations

from workers.engine.outputs import Load, Queued
from workers.engine.queues import Queues


def list_queued(
    queues: Queues, load: Load, max_num_seqs: int, prefix: str, least_wait_s: float, most: int
) -> list[Queued]:
    """The first ``most`` requests in line that have not begun and will wait for at least ``least_wait_s``.

    Args:
        queues: of which the one that waits is read.
        load: the engine's, as of now.
        max_num_seqs: seats of a batch.
        prefix: only requests whose ids begin so are told of.
        least_wait_s: of computing what is ahead; who waits for a seat too is told of in any case.
        most: to be told of.
    """
    # What is queued there and does not wait has begun, or is on its way from the host: all of it is ahead.
    num_tokens = load.num_queued_tokens - queues.work.num_tokens
    num_attended = load.num_queued_attended - queues.work.num_attended
    num_requests = len(queues.running) + len(queues.loading)
    found: list[Queued] = []
    for request in queues.waiting:
        if len(found) == most:
            break
        if request.request_id.startswith(prefix) and not request.has_begun:
            waits = load.cost.queue_s(num_tokens, num_attended) >= least_wait_s
            if waits or num_requests >= max_num_seqs:
                found.append(
                    Queued(
                        request.request_id,
                        request.num_uncached_estimate,
                        num_tokens,
                        num_attended,
                        num_requests,
                    )
                )
        num_tokens += request.num_uncached_estimate
        num_attended += request.num_attended_estimate
        num_requests += 1
    return found
