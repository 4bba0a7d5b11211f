"""Measures the prefix index: lookups, a large snapshot, memory.

.venv/bin/python tests/router/measure_prefix_index.py
"""

from __future__ import annotations

import os
import time

import psutil

from router.placement.prefix_index import PrefixIndex


def lookup_s(num_blocks: int, num_replicas: int) -> float:
    """One chain looked up in all replicas, each of which holds another length of it (the worst case)."""
    chain = [os.urandom(16) for _ in range(num_blocks)]
    index = PrefixIndex()
    for replica in range(num_replicas):
        held = chain[: num_blocks * (replica + 1) // num_replicas]
        others = os.urandom(16 * 2000)
        for _ in index.load_snapshot(f"r{replica}", 0, b"".join(held) + others):
            pass
    asked = [bytes(bytearray(block_hash)) for block_hash in chain]
    best_s = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for replica in range(num_replicas):
            index.match(f"r{replica}", asked)
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


def main() -> None:
    """Print all figures."""
    hashes = os.urandom(16 * 1_000_000)
    before = psutil.Process().memory_info().rss
    index, longest_s, start = PrefixIndex(), 0.0, time.perf_counter()
    part_start = start
    for _ in index.load_snapshot("big", 0, hashes):
        longest_s = max(longest_s, time.perf_counter() - part_start)
        part_start = time.perf_counter()
    elapsed_s = time.perf_counter() - start
    grown = psutil.Process().memory_info().rss - before
    print(f"snapshot of a million blocks: {elapsed_s:.2f} s, longest part {longest_s * 1e3:.1f} ms")
    print(f"memory: {grown / 1e6:.0f} bytes a block")
    for num_blocks, num_replicas in ((64, 8), (512, 8), (8000, 256)):
        seconds = lookup_s(num_blocks, num_replicas)
        print(f"{num_blocks} blocks over {num_replicas} replicas: {seconds * 1e6:.0f} us")


if __name__ == "__main__":
    main()
