"""Frameworks that people put on top, unchanged but for their ``base_url``.

They want versions of their own of what Shoal wants, so they live in an environment of their own::

    python -m venv clients && clients/bin/pip install PACKAGES   # those of the extra `clients` in pyproject.toml
    SHOAL_CLIENTS_PYTHON=clients/bin/python make test ARGS="-m slow tests/clients"
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.served_cluster import ServedCluster

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = os.environ.get("SHOAL_CLIENTS_PYTHON", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SHOAL_CLIENTS_PYTHON names no interpreter with the clients"),
]


def run(*arguments: str, **variables: str) -> None:
    """Run a program of the clients' environment; its output is the failure's message."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-m", *arguments], env={**environment, **variables}, capture_output=True, text=True, check=False,
        cwd=HERE, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def run_tests(file: str, **variables: str) -> None:
    """Run a file of tests in the clients' environment, without the configuration of this one."""
    own = ("-c", os.devnull, "-o", "asyncio_mode=auto", "--rootdir", str(HERE), "--confcutdir", str(HERE))
    run("pytest", "-q", "-p", "no:cacheprovider", "--tb", "short", *own, file, **variables)


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["test_langchain.py", "test_others.py"])
def test_clients_work_unchanged(cluster: ServedCluster, file: str) -> None:
    run_tests(file, SHOAL_URL=cluster.url, SHOAL_MODEL=cluster.model)


@pytest.fixture
def edge_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The API of a program in ``tests/router``."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "router" / request.param)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.communicate("", timeout=30)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("edge_url", ["obedient_server.py"], indirect=True)
def test_langchain_calls_tools_and_gets_forms(edge_url: str) -> None:
    run_tests("test_langchain.py::TestChat", SHOAL_URL=edge_url, SHOAL_MODEL="tiny", SHOAL_OBEYS="yes")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("edge_url", ["edge_server.py"], indirect=True)
def test_schemathesis_finds_nothing(edge_url: str) -> None:
    # What fits the schema may still be refused: models have lengths, and some fields need others.
    run(
        "schemathesis.cli", "run", f"{edge_url}/openapi.json", "-n", "20", "--phases", "examples,coverage,fuzzing",
        "--exclude-checks", "positive_data_acceptance", "--request-timeout", "30", "--no-color", "--seed", "1",
    )  # fmt: skip
