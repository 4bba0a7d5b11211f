"""Fixtures of the whole suite: the demo model on disk, and one running cluster for the session."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from deploy.served_cluster import ServedCluster
from deploy.settings import ServeSettings
from workers.checkpoint.source import ModelFiles, resolve_model

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Under nohup, and as a script's job in the background, they are ignored, here and in all processes that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How long one example takes is a matter of what else the machine does.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


@functools.cache
def is_on_cluster(path: Path) -> bool:
    """Whether a file has tests of the running cluster."""
    return "pytest.mark.cluster" in path.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of the running cluster, which take longest."""
    items.sort(key=lambda item: not is_on_cluster(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give one worker all files of the running cluster: two clusters would collide."""
    from xdist.scheduler import LoadFileScheduling  # only where pytest-xdist is

    class OneWorkerHasTheCluster(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "cluster" if is_on_cluster(config.rootpath / file) else file

    return OneWorkerHasTheCluster(config, log)


@pytest.fixture(scope="session")
def demo_model() -> ModelFiles:
    """SmolLM2-135M-Instruct, fetched once into the user's cache."""
    return resolve_model(None, ServeSettings().source)


@pytest.fixture(scope="session")
def start_cluster() -> Iterator[Callable[..., ServedCluster]]:
    """Start clusters that are gone when the session ends, whatever a test does."""
    started: list[ServedCluster] = []

    def start(*flags: str) -> ServedCluster:
        started.append(ServedCluster(*flags))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.stop()


@pytest.fixture(scope="session")
def cluster(start_cluster: Callable[..., ServedCluster], demo_model: ModelFiles) -> ServedCluster:
    """The session's cluster: two replicas of the demo model behind HAProxy."""
    served = start_cluster(
        *("--replicas", "2", "--max-model-len", "1024", "--kv-cache-gib", "0.25", "--cpu-threads", "1")
    )
    served.wait_until_up()
    return served
