"""Runs the all-reduce kernel in Triton's interpreter, each rank a process; prints each case's largest error as JSON.

Memory that all processes map stands in for that of GPUs. Exchanges of different numbers of rows follow each other, so
that places are used again at different turns; half of the ranks come late to each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time

os.environ["TRITON_INTERPRET"] = "1"

import torch

from kernels import all_reduce

WIDTH, MAX_ROWS = 24, 5
NUM_ROWS = (1, 5, 3, 5, 1, 0, 2, 5)
EPS = 1e-5


def parts_of(turn: int, num_ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank brings to an exchange."""
    generator = torch.Generator().manual_seed(turn)
    return [torch.randn(NUM_ROWS[turn], WIDTH, generator=generator).to(dtype) for _ in range(num_ranks)]


def run_rank(rank: int, memories: list[torch.Tensor], dtype: torch.dtype, is_flagged: bool, pipe) -> None:
    """Take part in all exchanges; send the sums, the normalised rows and the plain all-reduces."""
    torch.set_num_threads(1)
    peers = all_reduce.PeerMemory(
        rank,
        memories[rank],
        torch.tensor([memory.data_ptr() for memory in memories]),
        torch.zeros(MAX_ROWS, dtype=torch.int32),
        WIDTH,
        dtype,
        is_flagged,
    )
    weight = torch.linspace(0.5, 1.5, WIDTH).to(dtype)
    found = []
    for turn, num_rows in enumerate(NUM_ROWS):
        time.sleep(0.01 * ((turn + rank) % 2))
        part = parts_of(turn, len(memories), dtype)[rank]
        residual = torch.full((num_rows, WIDTH), 0.25, dtype=dtype)
        normed = all_reduce.reduce_add_rms_norm(part.clone(), residual, weight, EPS, peers)
        found.append((normed.float().tolist(), residual.float().tolist()))
        found.append((all_reduce.all_reduce(part.clone(), peers).float().tolist(), []))
        # A part that is itself a sum: halves add up to it without rounding.
        residual = torch.full((num_rows, WIDTH), 0.25, dtype=dtype)
        halves = torch.stack([part.float() / 2] * 2)
        summed = all_reduce.reduce_add_rms_norm_of_parts(halves, residual, weight, EPS, peers)
        assert summed.float().tolist() == found[-2][0], "a sum of halves is not the whole"
    pipe.send(found)


def largest_error(num_ranks: int, dtype: torch.dtype, is_flagged: bool) -> float:
    """Run one group; ranks must agree on every bit."""
    num_bytes = all_reduce.peer_memory_bytes(num_ranks, MAX_ROWS, WIDTH, dtype, is_flagged)
    memories = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(num_ranks)]
    context = multiprocessing.get_context("fork")  # so that all map the memory at one address
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = [
        context.Process(target=run_rank, args=(rank, memories, dtype, is_flagged, pipes[rank][1]))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    found = [receiver.recv() for receiver, _ in pipes]
    for process in ranks:
        process.join()
    assert all(one == found[0] for one in found), "ranks hold different bits"
    error = 0.0
    weight = torch.linspace(0.5, 1.5, WIDTH).to(dtype)
    for turn, num_rows in enumerate(NUM_ROWS):
        parts = parts_of(turn, num_ranks, dtype)
        residual = torch.full((num_rows, WIDTH), 0.25, dtype=dtype)
        normed = all_reduce.reduce_add_rms_norm_ref(parts, residual, weight, EPS)
        plain = torch.zeros(num_rows, WIDTH, dtype=dtype)
        all_reduce.reduce_add_rms_norm_ref(parts, plain, None, 0.0)
        for got, want in zip(
            (found[0][2 * turn][0], found[0][2 * turn][1], found[0][2 * turn + 1][0]),
            (normed, residual, plain),
            strict=True,
        ):
            if num_rows:
                error = max(error, (torch.tensor(got) - want.float()).abs().max().item())
    return error


def main() -> None:
    """Print ``{case: error}``."""
    errors = {}
    for num_ranks, dtype, is_flagged in (
        (2, torch.float32, True),
        (2, torch.float16, False),
        (3, torch.float16, True),
        (4, torch.float32, False),
    ):
        name = (
            f"{num_ranks} ranks, {'flagged' if is_flagged else 'staged'}.{str(dtype).removeprefix('torch.')}"
        )
        errors[name] = largest_error(num_ranks, dtype, is_flagged)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
