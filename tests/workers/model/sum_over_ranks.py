"""One rank of a group that adds rows by every way there is; prints the largest error, relative, of each as JSON."""

from __future__ import annotations

import json
import os
import sys

from workers.model.rank_config import RANK_ENVIRONMENT

os.environ.update(RANK_ENVIRONMENT)

import torch

from kernels.all_reduce import reduce_add_rms_norm_ref
from workers.model.peer_copies import MAX_UNDER_WAY, PeerCopies, copies_bytes
from workers.model.symmetric_memory import open_symmetric_memory
from workers.model.tensor_parallel import TensorParallelGroup

WIDTH, EPS = 4096, 1e-5
NUM_ROWS = (1, 256, 3, 64, 2048, 1, 700, 256)


def main(rank: str, size: str, rendezvous: str) -> None:
    """Take part in sums of many sizes, in turn by each way, also from a graph that is replayed."""
    index, num_ranks = int(rank), int(size)
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = TensorParallelGroup(index, num_ranks, rendezvous, device)
    found = {str(dtype): errors_of(group, dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(json.dumps(found))
    group.close()


def errors_of(group: TensorParallelGroup, dtype: torch.dtype) -> dict[str, float]:
    """By way of adding."""
    index, num_ranks = group.rank, group.size
    device = torch.device("cuda", torch.cuda.current_device())
    group.prepare(WIDTH, dtype, max(NUM_ROWS))
    exchange = group._exchange
    assert exchange is not None, "two devices of one host reach each other"
    ways = {"nccl": None, "flagged": exchange._flagged, "staged": exchange._staged}
    errors = dict.fromkeys([*ways, "copies"], 0.0)
    memory = open_symmetric_memory(num_ranks, copies_bytes(max(NUM_ROWS), WIDTH, dtype))
    assert memory is not None, "two devices of one host reach each other"
    copies = PeerCopies(index, memory, max(NUM_ROWS), WIDTH, dtype)
    weight = torch.linspace(0.5, 1.5, WIDTH, device=device).to(dtype)
    for turn, num_rows in enumerate(NUM_ROWS * 3):
        generator = torch.Generator(device).manual_seed(turn)
        parts = [
            torch.randn(num_rows, WIDTH, generator=generator, device=device).to(dtype)
            for _ in range(num_ranks)
        ]
        want_sum = torch.full_like(parts[0], 0.25)
        want = reduce_add_rms_norm_ref(parts, want_sum, weight, EPS)
        for name, peers in ways.items():
            if peers is not None and num_rows > peers.max_rows:
                continue
            residual = torch.full_like(parts[0], 0.25)
            got = group._add_rms_norm_by(parts[index].clone(), residual, weight, peers, EPS)
            errors[name] = max(errors[name], _error(got, want), _error(residual, want_sum))
        # As many as may be at once, each with rows of its own.
        residuals = [torch.full_like(parts[0], 0.25) for _ in range(MAX_UNDER_WAY)]
        sums = [
            copies.start(parts[index] * (place + 1), residual, weight, EPS)
            for place, residual in enumerate(residuals)
        ]
        for place, (one, residual) in enumerate(zip(sums, residuals, strict=True)):
            wanted_sum = torch.full_like(parts[0], 0.25)
            wanted = reduce_add_rms_norm_ref([part * (place + 1) for part in parts], wanted_sum, weight, EPS)
            errors["copies"] = max(errors["copies"], _error(one(), wanted), _error(residual, wanted_sum))
    x, stream = torch.zeros(5, WIDTH, device=device, dtype=dtype), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        group.all_reduce(x)
        group.all_reduce(x)
    for turn in range(50):
        x.fill_(turn + index)
        graph.replay()
        want_value = num_ranks * sum(turn + other for other in range(num_ranks))
        assert bool((x == want_value).all()), f"replay {turn} gave {x[0, 0].item()}, not {want_value}"
    return errors


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


if __name__ == "__main__":
    main(*sys.argv[1:])
