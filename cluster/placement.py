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
    needs = f"a replica with --tensor-parallel-size {size} needs {size}"
    cpus = [int(node.num_cpus) for node in nodes]
    gpus = [int(node.num_gpus) for node in nodes]
    if uses_gpu and sum(gpus) < size:
        raise Infeasible(f"{needs} GPUs, the cluster has {_in_all(gpus)}: lower it or add nodes")
    # A rank takes one of each, on one node.
    ranks = [min(counts) for counts in zip(gpus, cpus, strict=True)] if uses_gpu else cpus
    if sum(ranks) < size:
        has = f"CPUs, the cluster has {_in_all(cpus)}"
        if uses_gpu:
            found = ", ".join(f"({node.num_gpus:g}, {node.num_cpus:g})" for node in nodes)
            has = f"GPUs with a CPU each on their node, the nodes (GPUs, CPUs) have {found}"
        raise Infeasible(
            f"{needs} {has}: start Ray there with more --num-cpus, which may be more than the cores, lower it "
            "or add nodes"
        )
    return _placement(size, uses_gpu, max(ranks))


def place_on_nodes_to_come(
    tensor_parallel_size: int, uses_gpu: bool, ranks_per_node: int, worker_group: str | None = None
) -> GroupPlacement:
    """The same for nodes that an autoscaler may still have to add, each with room for ``ranks_per_node``."""
    return _placement(tensor_parallel_size, uses_gpu, ranks_per_node, worker_group)


def _in_all(amounts: Sequence[int]) -> str:
    return f"{sum(amounts)} (at most {max(amounts, default=0)} on one node)"


def _placement(
    size: int, uses_gpu: bool, ranks_per_node: int, worker_group: str | None = None
) -> GroupPlacement:
    bundle: dict[str, float] = {"CPU": 1.0, "GPU": 1.0} if uses_gpu else {"CPU": 1.0}
    strategy = "STRICT_PACK" if ranks_per_node >= size else "PACK"
    return GroupPlacement([dict(bundle) for _ in range(size)], strategy, worker_group)
