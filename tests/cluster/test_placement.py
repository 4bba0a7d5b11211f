"""A group that cannot be placed is refused with what is missing."""

from __future__ import annotations

import pytest

from cluster.placement import Infeasible, NodeResources, plan_group


def test_a_group_that_fits_one_node_is_packed_strictly() -> None:
    placement = plan_group(4, True, [NodeResources(8, 8), NodeResources(8, 2)])

    assert placement.strategy == "STRICT_PACK"
    assert placement.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 4


def test_a_group_larger_than_any_node_is_spread() -> None:
    assert plan_group(4, True, [NodeResources(8, 2), NodeResources(8, 2)]).strategy == "PACK"


def test_a_group_that_can_never_be_placed_names_what_is_missing() -> None:
    with pytest.raises(
        Infeasible, match=r"needs 4 GPUs, the cluster has 3 \(at most 2 on one node\): lower it or"
    ):
        plan_group(4, True, [NodeResources(8, 2), NodeResources(8, 1)])


def test_a_node_whose_cpus_are_fewer_than_its_gpus_holds_as_many_ranks_as_cpus() -> None:
    assert plan_group(4, True, [NodeResources(2, 8), NodeResources(4, 4)]).strategy == "STRICT_PACK"
    assert plan_group(4, True, [NodeResources(2, 8), NodeResources(2, 4)]).strategy == "PACK"


def test_gpus_without_cpus_beside_them_are_no_place_for_ranks() -> None:
    with pytest.raises(Infeasible, match=r"with a CPU each .* have \(4, 0\), \(0, 8\)"):
        plan_group(2, True, [NodeResources(0, 4), NodeResources(8, 0)])


def test_a_group_without_gpus_counts_cpus() -> None:
    with pytest.raises(
        Infeasible, match=r"needs 4 CPUs, the cluster has 3 \(at most 2 on one node\): start Ray"
    ):
        plan_group(4, False, [NodeResources(2, 8), NodeResources(1, 8)])


@pytest.mark.parametrize(
    ("size", "num_gpus", "num_cpus", "says"),
    [
        (4, 8, 2, r"needs 4 GPUs with a CPU each .* have \(8, 2\): start Ray there with more --num-cpus"),
        (4, 0, 2, r"needs 4 CPUs, the cluster has 2 .*: start Ray there with more --num-cpus"),
        (4, 2, 2, r"needs 4 GPUs, the cluster has 2 .*: lower it or add nodes"),
    ],
)
def test_what_is_refused_says_what_would_help(size: int, num_gpus: int, num_cpus: int, says: str) -> None:
    with pytest.raises(Infeasible, match=says):
        plan_group(size, num_gpus > 0, [NodeResources(num_cpus, num_gpus)])


def test_a_cluster_without_nodes_holds_no_group() -> None:
    for uses_gpu in (False, True):
        with pytest.raises(Infeasible, match=r"the cluster has 0 \(at most 0 on one node\)"):
            plan_group(1, uses_gpu, [])
