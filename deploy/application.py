"""The Serve applications of a cluster: one for each model, one for the HTTP ingress.

Changing one model leaves the others' processes and streams alone. The ingress classes are pickled by value,
so that nothing here may hold state at module level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.config import ReplicaConfig
from cluster.placement import GroupPlacement
from cluster.replica import Replica
from router.config import IngressConfig

INGRESS_APPLICATION = "shoal-ingress"
_REPLICA_DEPLOYMENT = "replica"
# Nothing but Serve's own health calls passes through a replica's Serve queue.
_MAX_ONGOING = 100_000


@dataclass(frozen=True, slots=True)
class ModelApplication:
    """One model's application and its name in Serve."""

    name: str
    application: Application


def application_name(served_name: str) -> str:
    """Name of a model's Serve application, also of its membership group; Serve allows no slashes."""
    return "model-" + served_name.replace("/", "--")


def build_model_application(
    config: ReplicaConfig, placement: GroupPlacement, num_replicas: int
) -> ModelApplication:
    """``num_replicas`` replica groups of one model."""
    name = application_name(config.served_name)
    deployment: Any = serve.deployment(
        Replica,
        name=_REPLICA_DEPLOYMENT,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": 0, "num_gpus": 0},
        placement_group_bundles=placement.bundles,
        placement_group_strategy=placement.strategy,
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=config.drain_timeout_s + 10.0,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class="router.serve_adapter:MembershipRequestRouter",  # type: ignore[arg-type]
            request_router_kwargs={"group": name},
        ),
    )
    return ModelApplication(name, deployment.bind(config))


def build_ingress_application(
    config: IngressConfig, model_applications: Sequence[str], num_replicas: int, drain_timeout_s: float
) -> Application:
    """The OpenAI endpoint before the given models' applications."""
    deployment: Any = serve.deployment(
        serve.ingress()(HttpIngress),
        name="ingress",
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=drain_timeout_s + 10.0,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return deployment.bind(config, list(model_applications))


class HttpIngress:
    """One ingress process: the router's ASGI app under Serve, which starts and stops it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: IngressConfig, model_applications: list[str]
    ) -> None:
        """Start the routers of all models, so that membership flows, and the ingress itself."""
        from router import membership
        from router.app import build_app
        from router.ingress import Ingress

        self._handles = []
        for name in model_applications:
            # options() makes the handle's request router, which listens to Serve's controller from then on.
            self._handles.append(serve.get_deployment_handle(_REPLICA_DEPLOYMENT, app_name=name).options())
        self._ingress = Ingress(config)
        await self._ingress.start(membership.shared())
        self._app = build_app(self._ingress)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def __del__(self) -> None:
        await self._ingress.stop()
