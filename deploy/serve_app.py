"""What Serve configurations name as ``import_path``: the applications of a cluster, built from plain arguments.

``deploy.serve_app:build_model`` makes a model's application from a ``ModelSpec``,
``deploy.serve_app:build_ingress`` the HTTP endpoint from an ``IngressSpec``. The numbers of replicas and the
ingress's list of models belong in the configuration's ``deployments`` instead (``num_replicas``,
``user_config``): Serve restarts every process of an application whose arguments change, and none for those.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from cluster.placement import GroupPlacement, NodeResources, place_on_nodes_to_come, plan_group
from deploy.application import build_ingress_application, build_model_application
from deploy.ingress_spec import IngressSpec
from deploy.model_spec import ModelSpec
from deploy.settings import make_settings
from router.config import IngressConfig, Limits, RpcConfig, Timeouts


def build_model(args: dict[str, Any]) -> Application:
    """A model's application; ``args`` is a ``ModelSpec``."""
    spec = ModelSpec.model_validate(args)
    nodes = _nodes()
    device = spec.device
    if device == "auto":
        device = "cuda" if any(node.num_gpus for node in nodes) else "cpu"
    config = spec.replica_config(device)
    return build_model_application(config, _placement(spec, device == "cuda", nodes), 1).application


def build_ingress(args: dict[str, Any]) -> Application:
    """The endpoint's application; ``args`` is an ``IngressSpec``, its models come by ``user_config``."""
    spec = IngressSpec.model_validate(args)
    settings = make_settings()  # of this node's environment, which is every node's
    rpc = None
    if spec.grpc_port is not None:
        rpc = RpcConfig(settings.host, spec.grpc_port, grace_s=spec.drain_timeout_s)
    config = IngressConfig(
        models=(),
        policy=spec.policy,
        limits=Limits(max_body_bytes=spec.max_body_bytes),
        timeouts=Timeouts(replica_wait_s=spec.replica_wait_s, stall_s=spec.stall_timeout_s),
        key_file=spec.api_keys_file,
        rpc=rpc,
        observability=settings.observability,
    )
    return build_ingress_application(config, 1, spec.drain_timeout_s, spec.num_cpus)


def _placement(spec: ModelSpec, uses_gpu: bool, nodes: list[NodeResources]) -> GroupPlacement:
    size = spec.settings.tensor_parallel_size
    if spec.ranks_per_node is not None:
        return place_on_nodes_to_come(size, uses_gpu, spec.ranks_per_node, spec.worker_group)
    found = plan_group(size, uses_gpu, nodes)
    return GroupPlacement(found.bundles, found.strategy, spec.worker_group)


def _nodes() -> list[NodeResources]:
    import ray

    return [
        NodeResources(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    ]
