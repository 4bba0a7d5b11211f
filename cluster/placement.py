"""Where the ranks of a replica go: bundles of its placement group, or what the cluster lacks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.errors import ShoalError

WORKER_GROUP_LABEL = "shoal-worker-group"
"""Ray node label that ties a model to one kind of nodes."""


class Infeasible(ShoalError):
    """The cluster has not got what a replica needs; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What one node has in all."""

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """Bundles of one replica: the first also holds the replica itself, which claims nothing."""

    bundles: list[dict[str, float]]
    strategy: str
    worker_group: str | None = None
    """Only nodes that carry this name in the Ray label ``shoal-worker-group``; None: any."""

    @property
    def label_selectors(self) -> list[dict[str, str]]:
        """What Ray asks of each bundle's node."""
        if self.worker_group is None:
            return [{} for _ in self.bundles]
        return [{WORKER_GROUP_LABEL: self.worker_group} for _ in self.bundles]


def plan_group(tensor_parallel_size: int, uses_gpu: bool, nodes: Sequence[NodeResources]) -> GroupPlacement:
    """One bundle a rank; all on one node where one is large enough, else spread over as few as possible.

    Raises:
        Infeasible: no choice of nodes holds the group, now or after waiting.
    """
    size = tensor_parallel_size
    amounts = {"GPU": [int(node.num_gpus) for node in nodes]} if uses_gpu else {}
    amounts["CPU"] = [int(node.num_cpus) for node in nodes]
    for kind, amount in amounts.items():
        if sum(amount) < size:
            raise Infeasible(
                f"a replica with --tensor-parallel-size {size} needs {size} {kind}s, the cluster has "
                f"{sum(amount)} (at most {max(amount, default=0)} on one node): lower it or add nodes"
            )
    # A rank takes one of each, on one node.
    ranks = [min(counts) for counts in zip(*amounts.values(), strict=True)]
    if sum(ranks) < size:
        raise Infeasible(
            f"a replica with --tensor-parallel-size {size} needs {size} GPUs with a CPU each on their node, the "
            f"nodes (GPUs, CPUs) have {', '.join(f'({node.num_gpus:g}, {node.num_cpus:g})' for node in nodes)}: "
            "start Ray there with more --num-cpus, or lower it"
        )
    return _placement(size, uses_gpu, max(ranks))


def place_on_nodes_to_come(
    tensor_parallel_size: int, uses_gpu: bool, ranks_per_node: int, worker_group: str | None = None
) -> GroupPlacement:
    """The same for nodes that an autoscaler may still have to add, each with room for ``ranks_per_node``."""
    return _placement(tensor_parallel_size, uses_gpu, ranks_per_node, worker_group)


def _placement(
    size: int, uses_gpu: bool, ranks_per_node: int, worker_group: str | None = None
) -> GroupPlacement:
    bundle: dict[str, float] = {"CPU": 1.0, "GPU": 1.0} if uses_gpu else {"CPU": 1.0}
    strategy = "STRICT_PACK" if ranks_per_node >= size else "PACK"
    return GroupPlacement([dict(bundle) for _ in range(size)], strategy, worker_group)
