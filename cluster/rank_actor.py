"""One rank as a Ray actor: loads its share of the model, then obeys the step channel until it closes.

Ray places and supervises; no Ray call is made per step. The actor belongs to its replica and dies with it.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from workers.calibration import measure_cost
from workers.channel.serve import serve_steps
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.model.rank_config import RANK_ENVIRONMENT, BlockCounts, RankConfig

if TYPE_CHECKING:
    from workers.model.rank import Rank


@ray.remote(max_restarts=0, max_task_retries=0)
class RankActor:
    """One of the ``tp_size`` ranks of a replica group."""

    def __init__(self, config: RankConfig) -> None:
        os.environ.update(RANK_ENVIRONMENT)
        self._config = config
        self._rank: Rank | None = None

    def pid(self) -> int:
        """The process to kill when the group must end at once."""
        return os.getpid()

    def rendezvous_address(self, host: str) -> str:
        """Where the ranks of a group can meet (asked of rank 0).

        On loopback a file: torch's TCP store would listen on every interface, whatever address it is given.
        """
        if host.startswith("127.") or host in ("localhost", "::1"):
            return f"file://{tempfile.gettempdir()}/shoal-rendezvous-{secrets.token_hex(8)}"
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def load(self, rendezvous: str | None) -> BlockCounts:
        """Join the group, load the weights and measure the memory.

        Returns:
            KV blocks that fit this rank's memory.

        Raises:
            RuntimeError: the ranks did not meet, or a CUDA device has too little memory.
        """
        # torch: only ranks need it, and it costs 300 MB and 3 s
        from workers.model.cuda_rank import make_rank

        self._rank = make_rank(replace(self._config, rendezvous=rendezvous))
        self._rank.load()
        return self._rank.block_counts()

    def allocate(self, engine_config: EngineConfig) -> CostModel:
        """Take the KV pool, the same size on every rank, run what must be compiled or packed, and time some steps.

        Returns:
            What steps cost here.
        """
        assert self._rank is not None, "load comes first"
        self._rank.allocate(engine_config.num_blocks, engine_config.num_host_blocks)
        self._rank.warm_up()
        return measure_cost(self._rank, engine_config, time.perf_counter)

    def serve_steps(self, endpoint: str) -> None:
        """Run plans from the step channel until the brain closes it. Returns only then."""
        assert self._rank is not None, "load comes first"
        serve_steps(self._rank, endpoint, self._config.tp_rank)
