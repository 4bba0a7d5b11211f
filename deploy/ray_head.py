"""A Ray head with Serve and a dashboard in a process of its own, and further nodes beside it on this machine.

For tests and benchmarks that deploy onto a running cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from tempfile import TemporaryFile

import psutil

from cluster.placement import WORKER_GROUP_LABEL
from deploy.child_process import start_child
from deploy.own_cluster import own_cluster
from deploy.ports import choose_ports
from deploy.processes import processes_of
from deploy.runtime import Runtime
from workers.engine.errors import ShoalError

_LAST_CHARS = 2000
_STOP_TIMEOUT_S = 60.0


class RayHead:
    """A head in a process of its own, with HAProxy on ``port`` and Ray's dashboard on ``dashboard_port``."""

    def __init__(self, num_cpus: int = 4, worker_group: str = "workers") -> None:
        self._chosen = choose_ports(3, 19000 + os.getpid() * 3 % 3000)
        self.port, self.dashboard_port, self.metrics_port = self._chosen.ports
        self.token = os.urandom(32).hex()
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "SHOAL_METRICS_PORT": str(self.metrics_port),
        }
        # What Ray reports of processes that are killed on purpose is not for who watches a benchmark.
        self._log = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - as long as the process
        self.process = start_child(
            *("deploy.ray_head", str(self.port), str(self.dashboard_port), str(num_cpus), worker_group),
            environment=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            self._wait_until_up()
        except BaseException:
            self.process.terminate()
            self.process.wait(_STOP_TIMEOUT_S)
            self._chosen.release()
            raise

    @property
    def url(self) -> str:
        """The endpoint, once an ingress is deployed."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        """What ``--address`` takes."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def runtime(self) -> Runtime:
        """Its folder and mark."""
        return Runtime.of_process(self.port, self.process.pid)

    def metrics_pages(self) -> list[str]:
        """Where Prometheus would scrape this node: Shoal's processes, HAProxy, and Ray itself."""
        targets = json.loads((self.runtime.folder / "ray/prom_metrics_service_discovery.json").read_text())
        haproxy = next(
            environment["RAY_SERVE_HAPROXY_METRICS_PORT"]
            for process in self.runtime.processes()
            if "RAY_SERVE_HAPROXY_METRICS_PORT" in (environment := process.environ())
        )
        own = [f"127.0.0.1:{self.metrics_port}", f"127.0.0.1:{haproxy}"]
        return [
            f"http://{one}/metrics" for one in (*own, *(t for group in targets for t in group["targets"]))
        ]

    def pids(self, word: str) -> set[int]:
        """Processes of this cluster with ``word`` in their title."""
        return {process.pid for process in processes_of(self.runtime, word)}

    def add_node(self, num_cpus: int) -> psutil.Process:
        """Start another Ray node on this machine; return its raylet, without which it is no node."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{num_cpus}\n")
        self.process.stdin.flush()
        told = self.process.stdout.readline()
        assert told, "the node did not start"
        return psutil.Process(int(told))

    def stop(self) -> None:
        """End it and all it started. Safe to call twice."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(_STOP_TIMEOUT_S)
        self._log.close()
        self._chosen.release()

    def _wait_until_up(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "up\n":
            self.process.wait()
            self._log.seek(0)
            raise ShoalError(f"Ray's head did not start: {self._log.read()[-_LAST_CHARS:].strip()}")


@own_cluster()
def main() -> None:
    """Start, say so, add a node for each line of the input, and stop at its end."""
    from deploy.ray_cluster import start_ray

    # Ray prints what other processes log whenever it likes: the pipe is for answers alone.
    answers, sys.stdout = sys.stdout, sys.stderr
    port, dashboard_port, num_cpus = map(int, sys.argv[1:4])
    cluster = start_ray(
        host="127.0.0.1",
        port=port,
        num_cpus=num_cpus,
        haproxy=True,
        dashboard_port=dashboard_port,
        node_labels={WORKER_GROUP_LABEL: sys.argv[4]},
    )
    print("up", file=answers, flush=True)
    for line in sys.stdin:
        print(_start_node(int(line)), file=answers, flush=True)
    cluster.stop()


def _start_node(num_cpus: int) -> int:
    """One that carries the cluster's mark and token, as this process does; the pid of its raylet.

    By Ray's own means for tests: ``ray start`` refuses a second node where the head's address is loopback.
    """
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.head_node = ray._private.worker._global_node
    node = cluster.add_node(wait=False, num_cpus=num_cpus, node_ip_address="127.0.0.1")
    raylet = node.all_processes["raylet"][0].process
    # Processes of a node end with its raylet, once it is reaped.
    threading.Thread(target=raylet.wait, daemon=True).start()
    return int(raylet.pid)


if __name__ == "__main__":
    main()
