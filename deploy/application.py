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
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

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


def build_model_application(
    config: ReplicaConfig, placement: GroupPlacement, num_replicas: int
) -> ModelApplication:
    """``num_replicas`` replica groups of one model."""
    name = config.application_name
    deployment: Any = serve.deployment(
        Replica,
        name=_REPLICA_DEPLOYMENT,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": 0, "num_gpus": 0},
        placement_group_bundles=placement.bundles,
        placement_group_strategy=placement.strategy,
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=config.drain_timeout_s + 10.0,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class="router.serve_adapter:MembershipRequestRouter",  # type: ignore[arg-type]
            request_router_kwargs={"group": name},
        ),
    )
    # Serve allows no request router of our own on an application's first deployment when HAProxy is on, since HTTP
    # would bypass it. So a deployment that never has a replica stands first, and costs nothing.
    anchor: Any = serve.deployment(
        Anchor,
        name="anchor",
        autoscaling_config=AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1),
    )
    return ModelApplication(name, anchor.bind(deployment.bind(config)))


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


class Anchor:
    """First deployment of a model's application; has no replicas and answers nothing."""

    def __init__(self, replicas: object) -> None:
        """Take the handle that ties the replicas to the application."""


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
        self._app = build_app(self._ingress, sends_request_id=False)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def __del__(self) -> None:
        await self._ingress.stop()
