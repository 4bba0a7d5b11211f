"""One rank as a Ray actor: loads its share of the model, then obeys the step channel until it closes.

Ray places and supervises; no Ray call is made per step. The actor belongs to its replica and dies with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil
import ray

from cluster.actor_process import ActorProcess
from workers.calibration import measure_cost
from workers.channel.serve import serve_steps
from workers.checkpoint.source import ModelSource, resolve_model
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.model.rank_config import LOOPBACK_ENVIRONMENT, RANK_ENVIRONMENT, BlockCounts, RankConfig
from workers.model.rendezvous import forget_rendezvous, is_of_one_host, new_rendezvous
from workers.process_state import end_once_stopped

if TYPE_CHECKING:
    from workers.model.rank import Rank


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs."""

    node_id: str
    node_address: str
    pid: int


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"signs": 1})  # type: ignore[call-overload]
class RankActor:
    """One of the ``tp_size`` ranks of a replica group."""

    def __init__(
        self,
        config: RankConfig,
        model: str | None,
        source: ModelSource,
        replica: ActorProcess,
        replica_stop_s: float,
    ) -> None:
        """Take what to load, and begin to watch the replica, if this is rank 0, which runs on its node.

        Args:
            config: of this rank.
            model: with ``source``: finds the model again on another host than the replica's.
            source: see ``model``.
            replica: is ended once it has been stopped for ``replica_stop_s``, while the group loads and later.
            replica_stop_s: see ``replica``.
        """
        os.environ.update(RANK_ENVIRONMENT)
        self._config = config
        self._model = model
        self._source = source
        self._rank: Rank | None = None
        if config.tp_rank == 0 and replica.node_id == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends the actors of one that has ended
                end_once_stopped(replica.pid, replica_stop_s)

    def place(self) -> RankPlace:
        """The node and the process, to be killed when the group must end at once."""
        context = ray.get_runtime_context()
        return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    @ray.method(concurrency_group="signs")
    def is_there(self) -> bool:
        """Answer, whatever the rank computes: a process that is stopped does not."""
        return True

    def rendezvous_address(self, address: str | None) -> str:
        """Where the ranks of a group can meet (asked of rank 0).

        Without a socket where ``address`` is None, for ranks of one host.
        """
        if address is None:
            return new_rendezvous()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def load(self, rendezvous: str | None) -> BlockCounts:
        """Join the group, load the weights and measure the memory.

        Returns:
            KV blocks that fit this rank's memory.

        Raises:
            RuntimeError: the ranks did not meet, or a CUDA device has too little memory.
        """
        if rendezvous is not None and is_of_one_host(rendezvous) and sys.platform == "linux":
            os.environ.update(LOOPBACK_ENVIRONMENT)
        # torch: only ranks need it, and it costs 300 MB and 3 s
        from workers.model.cuda_rank import make_rank

        config = self._config = replace(self._config, rendezvous=rendezvous)
        if config.files is not None and not config.files.path.exists():
            config = replace(config, files=resolve_model(self._model, self._source))
        self._rank = make_rank(config)
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
        try:
            serve_steps(self._rank, endpoint, self._config.tp_rank)
        finally:
            forget_rendezvous(self._config.rendezvous)  # the replica may have been killed
