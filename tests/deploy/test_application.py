"""What a model's Serve application asks of the cluster."""

from __future__ import annotations

from pathlib import Path

from cluster.config import ReplicaConfig
from cluster.placement import NodeResources, plan_group
from deploy.application import build_ingress_application, build_model_application
from router.config import IngressConfig
from workers.checkpoint.source import ModelSource


def test_the_replica_itself_claims_nothing_of_its_first_bundle() -> None:
    placement = plan_group(2, True, [NodeResources(8, 2)])
    config = ReplicaConfig("model", "model", ModelSource(Path()), tensor_parallel_size=2, device="cuda")

    built = build_model_application(config, placement, 1).application

    (replica,) = built._bound_deployment.init_args
    deployment = replica._bound_deployment
    assert deployment.ray_actor_options["num_gpus"] == deployment.ray_actor_options["num_cpus"] == 0
    assert deployment._replica_config.placement_group_bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2


def test_a_new_ingress_process_does_not_wait_until_the_old_one_has_drained() -> None:
    """Which takes as long as its longest stream; the endpoint would answer nobody meanwhile."""
    built = build_ingress_application(IngressConfig(()), num_replicas=1, drain_timeout_s=600)

    assert built._bound_deployment._deployment_config.max_surge_percent > 0
