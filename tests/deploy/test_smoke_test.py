"""What `helm test` asks of an endpoint, here of the session's cluster."""

from __future__ import annotations

import pytest

from deploy.runtime import find_free_ports
from deploy.served_cluster import ServedCluster
from deploy.smoke_test import complaint


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_served_model_passes_and_another_is_missed(cluster: ServedCluster) -> None:
    assert complaint(cluster.url, [cluster.model], None) is None
    assert "nobody is not listed" in (complaint(cluster.url, ["nobody"], None) or "")


def test_an_endpoint_that_is_not_there_is_told() -> None:
    (port,) = find_free_ports("127.0.0.1", 1, 24000)

    assert "cannot be reached" in (complaint(f"http://127.0.0.1:{port}", ["a"], None) or "")
