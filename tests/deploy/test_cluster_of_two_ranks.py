"""A replica of two ranks through real Ray: the same tokens, and an end in common."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from deploy.served_cluster import ServedCluster
from workers.checkpoint.source import ModelFiles

PROMPT = "Once upon a time there was a"


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_two_ranks_answer_as_one_and_end_together(
    start_cluster: Callable[..., ServedCluster], demo_model: ModelFiles
) -> None:
    def answer(served: ServedCluster) -> str:
        body = {"model": served.model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
        done = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120)
        return str(done.json()["choices"][0]["text"])

    texts = []
    for size in (1, 2):
        served = start_cluster(
            *(
                "--replicas",
                "1",
                "--tensor-parallel-size",
                str(size),
                "--max-model-len",
                "512",
                "--cpu-threads",
                "1",
            )
        )
        served.wait_until_up()
        assert len(served.processes("RankActor")) == size
        texts.append(answer(served))
        if size == 2:
            first, second = served.processes("RankActor")
            first.kill()
            second.wait(20)  # its group is no use without the other
            texts.append(answer(served))  # from the replica that took its place
        assert served.stop() == 0
        assert served.runtime.processes() == []

    assert texts[1:] == texts[:1] * 2
