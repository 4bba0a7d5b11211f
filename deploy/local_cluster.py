"""A whole Shoal cluster on this machine: Ray, replicas, ingress; up when it answers, gone when stopped."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

import httpx

from cluster.config import INGRESS_APPLICATION, ReplicaConfig
from cluster.placement import NodeResources, plan_group
from deploy.console import counted, stage
from deploy.ingress_drain import drain_ingresses
from deploy.ports import check_ports, claim_ports
from deploy.preflight import check_cluster
from deploy.ray_cluster import RayCluster, StartError, end_leftovers, last_line, start_ray
from deploy.runtime import Runtime
from deploy.served_model import served_model_config
from deploy.settings import ServeSettings
from deploy.tls import tls_files
from router.config import IngressConfig, Limits, RpcConfig, Timeouts
from router.tenancy.key_source import read_keys
from router.tenancy.keys import KeyRing, ring_of_keys
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import ModelFiles, resolve_model
from workers.engine.errors import InvalidRequest

_POLL_S = 0.2
_READY_TIMEOUT_S = 600.0


@dataclass(slots=True)
class LocalCluster:
    """A running cluster; ``url`` answers the OpenAI API."""

    settings: ServeSettings
    model_name: str
    ray: RayCluster
    _claims: list[socket.socket]

    @property
    def url(self) -> str:
        """Where it listens."""
        return base_url(self.settings)

    def drain(self, timeout_s: float) -> int:
        """Let nobody in any more, and wait until running requests are done, ``timeout_s`` at most.

        Safe to call again with less time while a call before it has been interrupted.

        Returns:
            How many were not; their clients have been told by an error.
        """
        return drain_ingresses(self.ray.runtime.folder, timeout_s)

    def stop(self) -> None:
        """End everything. Safe to call twice."""
        self.ray.stop()
        for claim in self._claims:
            claim.close()


def base_url(settings: ServeSettings) -> str:
    """The endpoint as a client on this machine reaches it."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "localhost") else settings.host
    scheme = "https" if settings.ssl_certfile is not None else "http"
    return f"{scheme}://[{host}]:{settings.port}" if ":" in host else f"{scheme}://{host}:{settings.port}"


def start_local_cluster(settings: ServeSettings) -> LocalCluster:
    """Start a cluster and wait until it answers.

    Raises:
        UserError: a port is taken, the model is unknown or a setting does not fit it; nothing was started.
        StartError, Infeasible: the machine cannot run it; nothing is left behind.
    """
    claims = claim_ports(settings)
    end_leftovers()
    check_ports(settings)
    tls = tls_files(settings)
    with stage("Model") as current:
        files = resolve_model(settings.model, settings.source, current.update)
        replica, ingress = _configs(settings, files)
    with stage("Ray and Ray Serve"):
        cluster = start_ray(
            host=settings.host,
            port=settings.port,
            num_cpus=(settings.max_replicas or settings.replicas) * settings.tensor_parallel_size + 1,
            haproxy=settings.haproxy,
            tls=tls,
        )
    try:
        _deploy(settings, replica, ingress)
    except BaseException:
        cluster.stop(grace_s=0.0)
        raise
    return LocalCluster(settings, replica.served_name, cluster, claims)


def _configs(settings: ServeSettings, files: ModelFiles) -> tuple[ReplicaConfig, IngressConfig]:
    keys = key_ring(settings)  # before what takes seconds
    trace_folder = settings.record_trace and settings.record_trace.absolute()
    if trace_folder is not None:
        _check_writable(trace_folder)
    model = read_model_config(files, settings.model_impl)
    check_cluster(settings, files, model)
    replica = replace(
        settings.replica_config(str(files.path), files.name),
        stopping_file=Runtime.of_port(settings.port).stopping,
    )
    served = served_model_config(settings, files, model)
    ingress = IngressConfig(
        models=(served,),
        policy=settings.policy,
        limits=Limits(max_body_bytes=settings.max_body_bytes, max_logprobs=settings.max_logprobs),
        timeouts=Timeouts(replica_wait_s=settings.replica_wait_s, stall_s=settings.stall_timeout_s),
        trace_folder=trace_folder,
        allowed_origins=settings.allowed_origins,
        keys=keys,
        rpc=_rpc_config(settings),
        key_file=settings.api_keys and settings.api_keys.absolute(),
        observability=settings.observability,
    )
    return replica, ingress


def key_ring(settings: ServeSettings) -> KeyRing | None:
    """The keys that flags give; None where they give none.

    Raises:
        InvalidRequest: a key is empty, or the key file is not to be understood.
    """
    if settings.api_keys is not None:
        try:
            read_keys(settings.api_keys)
        except InvalidRequest as error:
            raise InvalidRequest(f"--api-keys: {error.message}", "api_keys") from None
    return ring_of_keys(settings.api_key) if settings.api_key else None


def _rpc_config(settings: ServeSettings) -> RpcConfig | None:
    if settings.grpc_port is None:
        return None
    tls = tls_files(settings)
    return RpcConfig(
        settings.host,
        settings.grpc_port,
        tls.key if tls else None,
        tls.certificate if tls else None,
        settings.drain_timeout_s,
    )


def _check_writable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InvalidRequest(
            f"--record-trace {folder} is a file, it must be a folder: name one, or what is to become one",
            "record_trace",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidRequest(
            f"--record-trace {folder} cannot be written to ({error.strerror}): name another folder",
            "record_trace",
        ) from error


def _deploy(settings: ServeSettings, replica: ReplicaConfig, ingress: IngressConfig) -> None:
    import ray
    from ray import serve

    from deploy.application import build_ingress_application, build_model_application

    nodes = [
        NodeResources(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    ]
    placement = plan_group(settings.tensor_parallel_size, replica.device == "cuda", nodes)
    model = build_model_application(replica, placement, settings.scale_bounds or settings.replicas)
    http = build_ingress_application(ingress, settings.ingress_replicas, settings.drain_timeout_s)
    with stage(
        f"{counted(settings.replicas, 'replica')} of {replica.served_name}, {settings.ingress_replicas} ingress"
    ) as current:
        # The ingress starts beside the replicas, which take longer; it finds them when they are ready.
        _run_watched(
            {
                model.name: lambda: serve.run(model.application, name=model.name, route_prefix=None),
                INGRESS_APPLICATION: lambda: serve.run(http, name=INGRESS_APPLICATION, route_prefix="/"),
            },
            lambda ready: current.update(f"{ready} of {settings.replicas + settings.ingress_replicas} ready"),
        )
    with stage("First answer"):
        _wait_until_it_answers(settings)


def _run_watched(deploys: dict[str, Callable[[], object]], on_ready: Callable[[int], None]) -> None:
    """Run blocking deploys, each in a thread, and report ready replicas meanwhile.

    Raises:
        StartError: one failed, or was not ready in time.
    """
    from ray import serve
    from ray.serve._private.common import ReplicaState

    errors: dict[str, BaseException] = {}

    def run(name: str, deploy: Callable[[], object]) -> None:
        try:
            deploy()
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread below
            errors[name] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in deploys.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while any(thread.is_alive() for thread in threads):
        time.sleep(_POLL_S)
        for name, error in errors.items():
            raise StartError(f"{name} did not start: {_why(name) or last_line(error)}") from error
        applications = serve.status().applications
        deployments = [
            one for name in deploys if name in applications for one in applications[name].deployments.values()
        ]
        on_ready(sum(one.replica_states.get(ReplicaState.RUNNING, 0) for one in deployments))
        if time.monotonic() > deadline:
            late = [name for name, thread in zip(deploys, threads, strict=True) if thread.is_alive()]
            raise StartError(f"{late[0]} was not ready after {_READY_TIMEOUT_S:.0f} s: {_why(late[0])}")
    for name, error in errors.items():
        raise StartError(f"{name} did not start: {_why(name) or last_line(error)}") from error


def _why(application: str) -> str:
    """The last line of the traceback that Serve reports, which names the error."""
    from ray import serve

    status = serve.status().applications.get(application)
    messages = [one.message for one in status.deployments.values() if one.message] if status else []
    return last_line(messages[0]) if messages else ""


def _wait_until_it_answers(settings: ServeSettings) -> None:
    url = f"{base_url(settings)}/health"
    deadline = time.monotonic() + _READY_TIMEOUT_S
    last = "no answer"
    while time.monotonic() < deadline:
        try:
            # Our own certificate need not be in the system's store; that the handshake succeeds is what counts.
            answer = httpx.get(url, timeout=5.0, verify=False)
        except httpx.HTTPError as error:
            last = str(error)
        else:
            if answer.status_code == 200:
                return
            last = answer.text
        time.sleep(0.1)
    raise StartError(f"{url} does not answer: {last}")
