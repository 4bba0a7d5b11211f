"""``shoal deploy``: several models on a running Ray cluster, each changed without the others' noticing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.child_process import ROOT
from deploy.ray_head import RayHead

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    found = RayHead()
    yield found
    found.stop()


def model(name: str, **changes: Any) -> dict[str, Any]:
    engine = {"scripted": True, "scripted_step_s": 0.02, "max_model_len": 4096, **changes.pop("engine", {})}
    return {"name": name, "device": "cpu", "engine": engine, **changes}


def deploy(head: RayHead, folder: Path, *models: dict[str, Any]) -> None:
    path = folder / "cluster.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "models": list(models),
                "ingress": {"num_cpus": 0, "drain_timeout_s": 30},
                "http": {"host": "127.0.0.1", "port": head.port},
            }
        )
    )
    subprocess.run(
        [sys.executable, "-m", "shoal", "deploy", str(path), "--address", head.dashboard, "--wait-s", "120"],
        check=True,
        cwd=ROOT,
        env=head.environment,
    )


def complete(head: RayHead, name: str, max_tokens: int = 8) -> httpx.Response:
    body = {"model": name, "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{head.url}/v1/completions", json=body, timeout=60)


class Stream(threading.Thread):
    """Reads one long stream to its end."""

    def __init__(self, head: RayHead, name: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._body = f"{head.url}/v1/completions", {
            "model": name, "prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        self.events: list[str] = []
        self.has_begun = threading.Event()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])
                    self.has_begun.set()

    def num_tokens(self) -> int:
        """As the last chunk but ``[DONE]`` counts them."""
        return int(json.loads(self.events[-2])["usage"]["completion_tokens"])


def test_changing_one_model_leaves_the_others_processes_and_streams_alone(
    head: RayHead, tmp_path: Path
) -> None:
    deploy(head, tmp_path, model("a"), model("b"))
    a, b, ingress = head.pids("model-a"), head.pids("model-b"), head.pids("ServeReplica:shoal-ingress")
    assert len(a) == len(b) == len(ingress) == 1
    stream = Stream(head, "b", num_tokens=1500)  # 30 s
    stream.start()
    assert stream.has_begun.wait(30)

    # a change of settings: a new process for this model, the others stay
    deploy(head, tmp_path, model("a", engine={"max_num_seqs": 8}), model("b"))
    assert head.pids("model-a").isdisjoint(a)
    assert head.pids("model-b") == b
    assert complete(head, "a").status_code == 200

    # more replicas: those that run stay
    deploy(head, tmp_path, model("a", engine={"max_num_seqs": 8}), model("b", replicas=2))
    assert len(head.pids("model-b")) == 2
    assert b < head.pids("model-b")
    told = httpx.get(f"{head.url}/health").json()["models"]
    assert {name: state["min_replicas"] for name, state in told.items()} == {"a": 1, "b": 2}

    # another model: the ingress learns of it without a restart
    deploy(head, tmp_path, model("b", replicas=2), model("modèle c"))
    assert complete(head, "modèle c").status_code == 200
    assert complete(head, "a").status_code == 404
    assert head.pids("ServeReplica:shoal-ingress") == ingress

    stream.join(60)
    assert stream.events[-1] == "[DONE]"
    assert stream.num_tokens() == 1500


def test_a_model_that_cannot_start_is_named_with_the_reason(head: RayHead, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        deploy(head, tmp_path, model("b", replicas=1), {"name": "lost", "source": "/no/such/folder"})
