"""A rank's process whose host memory is damaged on rank 1, in one way after another; run by a test instead of the own.

Each copy out is damaged: its bytes change, it lands in the block of another, or it is taken for one that was made
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

from deploy.offline.executor import _run_rank
from workers.engine.plan import BlockCopy
from workers.model.block_copies import HostBlocks
from workers.model.rank_config import RankConfig

WAYS = ("flipped", "in another's place", "out of order")


def run_damaged(config: RankConfig, pipe: Connection, endpoint: str) -> None:
    """Body of a rank's process."""
    if config.tp_rank == 1:
        _damage()
    _run_rank(config, pipe, endpoint)


def _damage() -> None:
    write, seal = HostBlocks.write, HostBlocks.seal
    sealed: list[int] = []

    def write_in_order(host: HostBlocks, copies: Sequence[BlockCopy]) -> None:
        first = len(sealed)
        write(host, [copy for i, copy in enumerate(copies, first) if way_of(i) != "out of order"])

    def seal_and_damage(host: HostBlocks, copies: Sequence[BlockCopy]) -> None:
        seal(host, copies)
        bytes_ = host._bytes
        assert bytes_ is not None, "the test asks for checksums"
        for copy in copies:
            way = way_of(len(sealed))
            if way == "flipped":
                bytes_[copy.host, -1] ^= 1
            elif way == "in another's place":
                bytes_[[copy.host, sealed[-1]]] = bytes_[[sealed[-1], copy.host]]
            sealed.append(copy.host)

    HostBlocks.write, HostBlocks.seal = write_in_order, seal_and_damage  # type: ignore[method-assign]


def way_of(number: int) -> str:
    """How copy out ``number`` is damaged."""
    return WAYS[number % len(WAYS)]
