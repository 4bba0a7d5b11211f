"""A replica whose two ranks are on two Ray nodes, served, then bereft of a node; prints what happened as JSON.

The nodes are raylets of this machine. A program of its own: Ray reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

import httpx
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deploy import local_cluster
from deploy.runtime import find_free_ports
from deploy.settings import make_settings
from workers.checkpoint.source import resolve_model

PROMPT = "Once upon a time there was a"


def nodes_of(kind: str) -> set[str]:
    """Nodes where actors of a class live."""
    actors = ray._private.state.actors().values()
    return {
        one["Address"]["NodeID"]
        for one in actors
        if one["State"] == "ALIVE" and one["ActorClassName"] == kind
    }


def rank_nodes() -> set[str]:
    return nodes_of("RankActor")


def placement_groups() -> list[str]:
    """States of those that are there."""
    groups = ray.util.placement_group_table().values()
    return [group["state"] for group in groups if group["state"] != "REMOVED"]


def stop_the_far_rank() -> float:
    """SIGSTOP the rank that is not on the replica's node; return after how many seconds it and the replica are gone."""
    family = psutil.Process().children(recursive=True)
    (replica,) = (one for one in family if "ServeReplica:model" in " ".join(one.cmdline()))
    ranks = [one for one in family if "RankActor" in " ".join(one.cmdline())]
    (far,) = (rank for rank in ranks if rank.parent() != replica.parent())
    stopped_s = time.monotonic()
    far.suspend()
    _, left = psutil.wait_procs([replica, *ranks], timeout=60, callback=lambda one: note(one.pid, stopped_s))
    assert not left, left
    return time.monotonic() - stopped_s


def note(pid: int, since_s: float) -> None:
    print(f"process {pid} has ended after {time.monotonic() - since_s:.2f} s", file=sys.stderr)


def main() -> None:
    """Serve, stop a rank, kill the node of one, and ask again each time."""
    (port,) = find_free_ports("127.0.0.1", 1, 19000 + os.getpid() % 1000)
    settings = make_settings(
        port=port, replicas=1, tensor_parallel_size=2, max_model_len=256, kv_cache_gib=0.1, cpu_threads=1,
        haproxy=False,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    body = {"model": "SmolLM2-135M-Instruct", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}

    def answer() -> str:
        done = httpx.post(f"{url}/v1/completions", json=body, timeout=150)
        done.raise_for_status()
        return str(done.json()["choices"][0]["text"])

    cluster = Cluster()
    cluster.add_node(num_cpus=0, include_dashboard=False)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        replica, ingress = local_cluster._configs(settings, resolve_model(None, settings.source))
        started_s = time.monotonic()
        local_cluster._deploy(settings, replica, ingress)
        found = {
            "start_s": time.monotonic() - started_s,
            "texts": [answer()],
            "num_nodes": [len(rank_nodes())],
        }
        found["stopped_rank_gone_s"] = stop_the_far_rank()
        found["texts"].append(answer())
        struck = rank_nodes() - nodes_of(
            "ServeReplica:shoal-ingress:ingress"
        )  # whose requests would end with it
        victim = next(node for node in nodes if node.node_id in struck)
        lost_s = time.monotonic()
        cluster.remove_node(victim, allow_graceful=False)
        found["texts"].append(answer())
        found["healed_s"] = time.monotonic() - lost_s
        found["num_nodes"].append(len(rank_nodes()))
        found["is_elsewhere"] = victim.node_id not in rank_nodes()
        found["groups"] = placement_groups()
        serve.shutdown()
        found["groups_left"] = placement_groups()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
