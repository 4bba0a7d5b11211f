"""Fixtures of the whole suite: the demo model on disk, and one Ray cluster for the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.runtime import find_free_ports
from deploy.settings import ServeSettings, make_settings
from workers.checkpoint.source import ModelFiles, resolve_model

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def demo_model() -> ModelFiles:
    """SmolLM2-135M-Instruct, fetched once into the user's cache."""
    return resolve_model(None, ServeSettings().source)


@pytest.fixture(scope="session")
def cluster_settings() -> ServeSettings:
    """Two replicas of the demo model on ports that nothing else uses."""
    (port,) = find_free_ports("127.0.0.1", 1, 18000 + os.getpid() % 1000)
    return make_settings(
        port=port,
        replicas=2,
        max_model_len=1024,
        max_num_seqs=32,
        kv_cache_gib=0.25,
        cpu_threads=1,
        stall_timeout_s=20.0,
        drain_timeout_s=20.0,
    )


@pytest.fixture(scope="session")
def cluster(cluster_settings: ServeSettings, demo_model: ModelFiles) -> Iterator[object]:
    """A real cluster: Ray, Serve, HAProxy, ingress, replicas. Slow to start, so one for all tests."""
    from deploy.local_cluster import start_local_cluster

    running = start_local_cluster(cluster_settings)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """An empty cache."""
    return tmp_path / "cache"
