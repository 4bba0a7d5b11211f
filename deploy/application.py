"""The Serve applications of a cluster: one for each model, one for the HTTP ingress.

Changing one model leaves the others' processes and streams alone. The ingress classes are pickled by value,
so that nothing here may hold state at module level.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from cluster.autoscaling import ScaleBounds
from cluster.config import INGRESS_DEPLOYMENT, REPLICA_DEPLOYMENT, ReplicaConfig
from cluster.placement import GroupPlacement
from cluster.replica import Replica
from router.config import IngressConfig, ServedModelConfig

if TYPE_CHECKING:
    from deploy.model_spec import ModelSpec
    from router.tenancy.gate import Share

# Nothing but Serve's own health calls passes through a replica's Serve queue.
_MAX_ONGOING = 100_000


@dataclass(frozen=True, slots=True)
class ModelApplication:
    """One model's application and its name in Serve."""

    name: str
    application: Application


def build_model_application(
    config: ReplicaConfig, placement: GroupPlacement, scale: int | ScaleBounds
) -> ModelApplication:
    """``scale`` replica groups of one model, or as many as its load needs within bounds."""
    name = config.application_name
    deployment: Any = serve.deployment(
        Replica,
        name=REPLICA_DEPLOYMENT,
        **_scale_options(scale),
        ray_actor_options={"num_cpus": 0, "num_gpus": 0},
        placement_group_bundles=placement.bundles,
        placement_group_strategy=placement.strategy,
        placement_group_bundle_label_selector=placement.label_selectors,
        logging_config=_logging(config.log_format),
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


def _logging(form: str) -> dict[str, Any]:
    """For what Serve writes before our constructors run, which set up the rest: only what went wrong, since its JSON
    has other keys than ours."""
    return {"encoding": "JSON" if form == "json" else "TEXT", "log_level": "WARNING"}


def _scale_options(scale: int | ScaleBounds) -> dict[str, Any]:
    if isinstance(scale, int):
        return {"num_replicas": scale}
    return {"num_replicas": "auto", "autoscaling_config": scale.serve_options()}


def build_ingress_application(
    config: IngressConfig, num_replicas: int, drain_timeout_s: float, num_cpus: float = 0
) -> Application:
    """The OpenAI endpoint before the applications of ``config.models``, and of those in its ``user_config``."""
    deployment: Any = serve.deployment(
        serve.ingress()(HttpIngress),
        name=INGRESS_DEPLOYMENT,
        num_replicas=num_replicas,
        # A process that is replaced drains for as long as its longest stream: the next one must not wait for that.
        max_surge_percent=50,
        ray_actor_options={"num_cpus": num_cpus},
        logging_config=_logging(config.observability.log_format),
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=drain_timeout_s + 10.0,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return deployment.bind(config)


class Anchor:
    """First deployment of a model's application; has no replicas and answers nothing."""

    def __init__(self, replicas: object) -> None:
        """Take the handle that ties the replicas to the application."""


class HttpIngress:
    """One ingress process: the router's ASGI app under Serve, which starts and stops it."""

    async def __init__(self, config: IngressConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the ingress with the models of ``config``."""
        import gc
        import os
        from pathlib import Path

        from cluster.logs import set_up_logs
        from cluster.node_exporter import NodeExporter, metrics_folder
        from deploy.ingress_drain import listen_for_drain
        from deploy.runtime import RUNTIME_DIR_VARIABLE
        from deploy.tracing import make_traces
        from router import membership
        from router.app import build_app
        from router.ingress import Ingress
        from router.rpc.server import start_rpc_server

        set_up_logs(config.observability.log_format, f"ingress-{os.getpid()}")
        self._specs: list[ModelSpec] = []
        self._served: list[ServedModelConfig] = []
        self._handles: dict[str, Any] = {}
        self._follow(config.models)
        self._wakers: dict[str, asyncio.Task[None]] = {}
        self._ingress = Ingress(config, wake=self._wake)
        self._ingress.traces = make_traces(config.observability)
        self._ingress.gate.read_share = _share
        await self._ingress.start(membership.shared())
        self._app = build_app(self._ingress, sends_request_id=False)
        self._rpc: Any = None
        if config.rpc is not None:
            state = self._app.state
            self._rpc, _ = await start_rpc_server(config.rpc, self._ingress, state.metrics, state.keys)
        folder = os.environ.get(RUNTIME_DIR_VARIABLE)
        if folder is not None:
            self._drain_server = await listen_for_drain(Path(folder), self._ingress.drain)
        self._exporter: NodeExporter | None = None
        port = config.observability.metrics_port
        if port is not None:
            self._exporter = NodeExporter(
                f"ingress-{os.getpid()}",
                self._app.state.metrics.render_own,
                metrics_folder(port),
                config.observability.host,
                port,
            )
        gc.freeze()  # a full collection of what is here by now takes 0.14 s, in which no token passes

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve the models of ``user_config["models"]`` (``ModelSpec``) from now on, without a restart.

        ``user_config["min_replicas"]``, by model's name, is told by the endpoint's health; what it lacks, is not.
        Models whose text side is the same as before are left alone, streams and all.
        """
        import gc
        from dataclasses import replace

        from deploy.model_spec import ModelSpec

        specs = [ModelSpec.model_validate(one) for one in user_config["models"]]
        added = [spec for spec in specs if spec not in self._specs]
        # Files, or the hub, are asked for what is new alone: a number of replicas must be able to change without them.
        found = await asyncio.gather(*(asyncio.to_thread(spec.served_model) for spec in added))
        known = [*zip(self._specs, self._served, strict=True), *zip(added, found, strict=True)]
        served = [next(model for one, model in known if one == spec) for spec in specs]
        self._specs, self._served = specs, served
        least = user_config.get("min_replicas", {})
        models = [
            replace(model, min_replicas=least.get(spec.name))
            for spec, model in zip(specs, served, strict=True)
        ]
        self._follow(models)
        await self._ingress.set_models(models)
        gc.freeze()

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def __del__(self) -> None:
        rpc = self._ingress.config.rpc
        if self._rpc is not None and rpc is not None:
            await self._rpc.stop(rpc.grace_s)
        await self._ingress.stop()
        if self._exporter is not None:
            self._exporter.stop()

    def _wake(self, group: str) -> None:
        """Have Serve start a replica of a model that has none: a call that waits for one is what it counts."""
        waker = self._wakers.get(group)
        if waker is None or waker.done():
            self._wakers[group] = asyncio.create_task(_hold_a_call(self._handles[group]))

    def _follow(self, models: Sequence[ServedModelConfig]) -> None:
        """Have Serve tell the membership of these models' replicas."""
        groups = [model.group for model in models]
        # options() makes the handle's request router, which listens to Serve's controller from then on.
        self._handles = {
            group: self._handles.get(group)
            or serve.get_deployment_handle(REPLICA_DEPLOYMENT, app_name=group).options()
            for group in groups
        }


def _share() -> Share:
    """This process's part of callers' limits. Serve changes the context behind it only after ``reconfigure``."""
    from router.tenancy.gate import Share

    context = serve.get_replica_context()
    return Share(context.rank.rank, max(1, context.world_size))


async def _hold_a_call(handle: Any) -> None:
    """Wait until a replica could take a call, and take it back. One at a time: several at once hang."""
    async with handle.choose_replica():
        pass
