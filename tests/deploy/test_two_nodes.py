"""A tensor-parallel group over several nodes answers as on one, and outlives a node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers.checkpoint.source import ModelFiles


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_group_over_two_nodes_heals_when_a_rank_is_stopped_and_when_a_node_is_killed(
    demo_model: ModelFiles,
) -> None:
    program = Path(__file__).with_name("two_nodes.py")

    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=590)

    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print({name: round(found[name], 1) for name in ("start_s", "stopped_rank_gone_s", "healed_s")})
    assert found["num_nodes"] == [2, 2]
    assert found["is_elsewhere"]
    assert found["texts"] == found["texts"][:1] * 3
    assert found["texts"][0]
    assert found["stopped_rank_gone_s"] < 2.0 + 1.5  # the goal, and time for a loaded machine to notice
    assert found["groups"] == ["CREATED"]  # nothing of the two that are lost
    assert found["groups_left"] == []
