"""A Ray head with Serve and a dashboard in a process of its own, for tests that deploy onto a running cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from deploy.runtime import Runtime, find_free_ports

ROOT = Path(__file__).resolve().parents[1]


class RayHead:
    """A head in a process of its own, with HAProxy on ``port`` and Ray's dashboard on ``dashboard_port``."""

    def __init__(self, num_cpus: int = 4) -> None:
        self.port, self.dashboard_port = find_free_ports("127.0.0.1", 2, 19000 + os.getpid() % 1000)
        self.token = os.urandom(32).hex()
        self.environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "deploy.ray_head",
                str(self.port),
                str(self.dashboard_port),
                str(num_cpus),
            ],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n", "the head did not start"

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

    def pids(self, word: str) -> set[int]:
        """Processes of this cluster with ``word`` in their title."""
        return {p.pid for p in self.runtime.processes() if word in " ".join(p.cmdline())}

    def stop(self) -> None:
        """End it and all it started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    """Start, say so, and stop at the end of the input."""
    from deploy.ray_cluster import start_ray

    port, dashboard_port, num_cpus = map(int, sys.argv[1:])
    cluster = start_ray(
        host="127.0.0.1", port=port, num_cpus=num_cpus, haproxy=True, dashboard_port=dashboard_port
    )
    print("up", flush=True)
    sys.stdin.read()
    cluster.stop()


if __name__ == "__main__":
    main()
