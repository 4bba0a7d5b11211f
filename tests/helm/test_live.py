"""The chart's own ``serveConfigV2``, put on a Ray of this machine as the operator does, answers requests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
import yaml

from deploy.child_process import ROOT
from deploy.ray_head import RayHead
from deploy.runtime import find_free_ports
from router.rpc.proto import inference_pb2 as pb
from router.rpc.proto import inference_pb2_grpc
from workers.checkpoint.source import ModelFiles

if TYPE_CHECKING:
    from conftest import Helm

DEPLOY = """
import json, sys
from deploy.deploy_command import connect, wait_for_applications
api, config = connect(sys.argv[1]), json.load(sys.stdin)
api.deploy_applications(config)
wait_for_applications(api, [one["name"] for one in config["applications"]], 200)
"""
VALUES = Path(__file__).resolve().parents[2] / "helm/ci/cpu-demo-values.yaml"


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    found = RayHead(worker_group="cpu")
    yield found
    found.stop()


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_what_the_chart_renders_serves_the_demo_model_over_http_and_grpc(
    helm4: Helm, head: RayHead, demo_model: ModelFiles
) -> None:
    (grpc_port,) = find_free_ports("127.0.0.1", 1, 22000 + os.getpid() % 1000)
    documents = helm4.render(
        "-f", str(VALUES), "--set", "models[0].replicas=1", "--set", f"ray.ports.grpc={grpc_port}"
    )
    (service,) = [one for one in documents if one["kind"] == "RayService"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    config["http_options"] = {
        "host": "127.0.0.1",
        "port": head.port,
    }  # other clusters may run on this machine

    # A process of its own: Ray reads its environment once, when the first test of this one imports it.
    subprocess.run(
        [sys.executable, "-c", DEPLOY, head.dashboard],
        input=json.dumps(config),
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **head.environment},
    )

    subprocess.run(
        [sys.executable, "-m", "deploy.smoke_test", "--url", head.url, "--model", "SmolLM2-135M-Instruct"],
        check=True,
        cwd=ROOT,
    )
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = httpx.post(f"{head.url}/v1/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["text"]
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answers = stub.Generate(pb.GenerateRequest(**body), timeout=60)
        assert "Paris" in "".join(one.text for one in answers)


@pytest.mark.slow
@pytest.mark.cluster
def test_every_metric_that_dashboards_and_alerts_read_is_told_by_a_live_node(
    helm4: Helm, head: RayHead, demo_model: ModelFiles
) -> None:
    test_what_the_chart_renders_serves_the_demo_model_over_http_and_grpc(helm4, head, demo_model)
    used: set[str] = set()
    for path in [*(VALUES.parents[1] / "dashboards").glob("*.json"), VALUES.parents[1] / "rules/alerts.yaml"]:
        used |= set(re.findall(r"\b(?:shoal|ray|haproxy)_\w+", path.read_text()))
    told: set[str] = set()
    deadline = time.monotonic() + 60  # Ray tells its own some seconds late
    while not used <= told and time.monotonic() < deadline:
        for url in head.metrics_pages():
            told |= set(re.findall(r"^(\w+)[{ ]", httpx.get(url, timeout=10).text, re.MULTILINE))

    assert used - told == set()
