"""One model on a Ray cluster of its own, changed while it serves as its operator would: ``shoal deploy``.

For benchmarks and tests: replicas and ingress processes come and go, the ingress is rolled out anew, and nodes are
added and lost, all of it on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import yaml

from cluster.config import INGRESS_APPLICATION, INGRESS_DEPLOYMENT, REPLICA_DEPLOYMENT, application_name
from deploy.child_process import ROOT
from deploy.processes import busiest, processes_of
from deploy.ray_head import RayHead
from workers.engine.errors import ShoalError

_CHANGE_TIMEOUT_S = 240.0
_POLL_S = 0.1


class DeployedCluster:
    """``num_replicas`` of one model and ``num_ingresses`` before them. Every change is a deploy of the whole file."""

    def __init__(
        self,
        engine: dict[str, Any],
        num_replicas: int,
        num_ingresses: int = 2,
        model: str = "chaos",
        source: str | None = None,
    ) -> None:
        """Returns once it answers. ``source`` is the model's path or hub id, None for the demo model."""
        self.model = model
        self.num_replicas = num_replicas
        self._num_ingresses = num_ingresses
        self._engine = engine
        self._source = source
        self._num_rollouts = 0
        self._num_model_rollouts = 0
        self._num_cpus_each = int(engine.get("tensor_parallel_size", 1))
        self._node: psutil.Process | None = None
        self.head = RayHead(num_cpus=num_replicas * self._num_cpus_each)
        self._folder = TemporaryDirectory(prefix="shoal-deployed-")
        try:
            self._deploy(num_replicas, num_ingresses, wait_s=_CHANGE_TIMEOUT_S)
            self.scale(num_replicas)
            self.scale_ingress(num_ingresses)
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """The endpoint, through HAProxy."""
        return self.head.url

    def busiest(self, word: str) -> psutil.Process:
        """Of the processes with ``word`` in their title, the one that is at work for a stream."""
        return busiest(self.head.runtime, word)

    def processes(self, word: str) -> list[psutil.Process]:
        """Its processes with ``word`` in their command line or title."""
        return processes_of(self.head.runtime, word)

    def stop(self) -> None:
        """End everything. Safe to call twice."""
        self.head.stop()
        self._folder.cleanup()

    # -- changes -------------------------------------------------------------------------------------------

    def scale(self, num_replicas: int, wait: bool = True) -> None:
        """Have so many replicas of the model."""
        self._deploy(num_replicas, self._num_ingresses)
        if wait:
            self._until(lambda: len(self._replicas()) == num_replicas, f"{num_replicas} replicas run")

    def scale_ingress(self, num_ingresses: int) -> None:
        """Have so many ingress processes; HAProxy loads a new configuration for it."""
        self._num_ingresses = num_ingresses
        self._deploy(len(self._replicas()) or self.num_replicas, num_ingresses)
        self._until(lambda: len(self._ingresses()) == num_ingresses, f"{num_ingresses} ingresses run")

    def roll_ingress(self) -> None:
        """Replace every ingress process by a new one, for a setting that does not change without."""
        old = self._ingresses()
        self._num_rollouts += 1
        self._deploy(len(self._replicas()), self._num_ingresses)
        self._until(
            lambda: len(self._ingresses() - old) == self._num_ingresses and not self._ingresses() & old,
            "every ingress is a new one",
        )

    def roll_model(self) -> None:
        """Replace every replica by a new one, as for other weights or a setting that does not change without."""
        old = self._replicas()
        self._num_model_rollouts += 1
        self._deploy(len(old), self._num_ingresses)
        self._until(
            lambda: len(self._replicas() - old) == len(old) and not self._replicas() & old,
            "every replica is a new one",
        )

    def add_node(self) -> None:
        """Add a node with room for one more replica, and the replica on it."""
        self._node = self.head.add_node(self._num_cpus_each)
        self.scale(self.num_replicas + 1)

    def kill_node(self) -> None:
        """SIGKILL the raylet of the node that was added."""
        assert self._node is not None, "no node has been added"
        self._node.kill()
        self._node = None

    # -- how -----------------------------------------------------------------------------------------------

    def _deploy(self, num_replicas: int, num_ingresses: int, wait_s: float = 0.0) -> None:
        path = os.path.join(self._folder.name, "cluster.yaml")
        config = {
            "models": [
                {
                    "name": self.model,
                    "source": self._source,
                    "replicas": num_replicas,
                    "engine": self._engine | {"seed": self._num_model_rollouts},
                }
            ],
            "ingress": {
                "num_cpus": 0,
                "replicas": num_ingresses,
                "max_body_bytes": (8 << 20) + self._num_rollouts,
            },
            "http": {"host": "127.0.0.1", "port": self.head.port},
        }
        with open(path, "w") as file:
            yaml.safe_dump(config, file)
        command = [sys.executable, "-m", "shoal", "deploy", path, "--address", self.head.dashboard]
        done = subprocess.run(
            [*command, "--wait-s", f"{wait_s:g}"],
            check=False,
            cwd=ROOT,
            env=self.head.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ShoalError(f"shoal deploy failed: {done.stderr.strip()[-500:]}")

    def _replicas(self) -> set[str]:
        return self._running(application_name(self.model), REPLICA_DEPLOYMENT)

    def _ingresses(self) -> set[str]:
        return self._running(INGRESS_APPLICATION, INGRESS_DEPLOYMENT)

    def _running(self, application: str, deployment: str) -> set[str]:
        """Ids of what takes requests, as Serve sees it; one that drains does not."""
        answer = httpx.get(
            f"{self.head.dashboard}/api/serve/applications/",
            headers={"Authorization": f"Bearer {self.head.token}"},
            timeout=30.0,
        )
        answer.raise_for_status()
        details = answer.json()["applications"].get(application, {}).get("deployments", {})
        replicas = details.get(deployment, {}).get("replicas", [])
        return {one["replica_id"] for one in replicas if one["state"] == "RUNNING"}

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _CHANGE_TIMEOUT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise ShoalError(f"not within {_CHANGE_TIMEOUT_S:g} s: {what}")
            time.sleep(_POLL_S)
