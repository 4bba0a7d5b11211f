"""``shoal serve`` is told to stop while it answers: SIGTERM, a short drain, last words, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from deploy.served_cluster import ServedCluster
from workers.checkpoint.source import ModelFiles

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCHEMA = {"time", "level", "process", "logger", "message"}
SCRIPTED = ("--scripted", "--scripted-step-s", "0.02", "--replicas", "1")


def stream_events(cluster: ServedCluster, max_tokens: int, on_event: Callable[[], None]) -> list[str]:
    body: dict[str, Any] = {
        "model": cluster.model, "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        events = []
        for line in answer.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
                on_event()
        return events


def test_sigterm_lets_streams_end_and_tells_those_that_do_not(
    start_cluster: Callable[..., ServedCluster], demo_model: ModelFiles
) -> None:
    """Its console is JSON, line by line."""
    cluster = start_cluster(*SCRIPTED, "--drain-timeout-s", "5", "--log-format", "json")
    cluster.wait_until_up()
    begun: set[int] = set()
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(stream_events, cluster, 75, lambda: begun.add(1))
        long = pool.submit(stream_events, cluster, 5000, lambda: begun.add(2))
        deadline = time.monotonic() + 30
        while len(begun) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        runtime = cluster.runtime
        assert cluster.stop(signal.SIGTERM) == 0

    assert short.result()[-1] == "[DONE]"
    assert json.loads(short.result()[-2])["usage"]["completion_tokens"] == 75
    assert json.loads(long.result()[-1])["error"]["code"] == "shutting_down"
    assert runtime.processes() == []
    lines = [json.loads(line) for line in cluster.log]
    assert {"generation ended", "Stopped; no process is left."} <= {line.get("message") for line in lines}
    assert [line for line in lines if not line.keys() >= SCHEMA] == []
    assert [line for line in lines if line["level"] not in ("INFO", "WARNING")] == []


@pytest.mark.slow
def test_when_its_terminal_goes_streams_still_end(
    start_cluster: Callable[..., ServedCluster], demo_model: ModelFiles
) -> None:
    """Its group hears that twice, from the shell and from the kernel."""
    cluster = start_cluster(*SCRIPTED, "--drain-timeout-s", "30")
    cluster.wait_until_up()
    begun: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(stream_events, cluster, 150, lambda: begun.add(1))
        deadline = time.monotonic() + 30
        while not begun and time.monotonic() < deadline:
            time.sleep(0.05)
        runtime = cluster.runtime
        os.killpg(cluster.process.pid, signal.SIGHUP)
        while not any("running requests end first" in line for line in cluster.log):
            time.sleep(0.05)
        os.killpg(cluster.process.pid, signal.SIGHUP)
        assert cluster.process.wait(60) == 0

    assert stream.result()[-1] == "[DONE]"
    assert json.loads(stream.result()[-2])["usage"]["completion_tokens"] == 150
    assert runtime.processes() == []


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once_and_streams_are_told(
    start_cluster: Callable[..., ServedCluster], demo_model: ModelFiles
) -> None:
    cluster = start_cluster(*SCRIPTED, "--drain-timeout-s", "120")
    cluster.wait_until_up()
    begun: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(stream_events, cluster, 8000, lambda: begun.add(1))
        deadline = time.monotonic() + 30
        while not begun and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(cluster.process.pid, signal.SIGINT)  # as a terminal does
        while not any("running requests end first" in line for line in cluster.log):
            time.sleep(0.05)
        started_s = time.monotonic()
        runtime = cluster.runtime
        assert cluster.stop(signal.SIGINT) == 0

    assert json.loads(stream.result()[-1])["error"]["code"] == "shutting_down"
    assert time.monotonic() - started_s < 20
    assert runtime.processes() == []
