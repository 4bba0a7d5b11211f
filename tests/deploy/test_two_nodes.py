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
@pytest.mark.timeout(400)
def test_a_group_over_two_nodes_heals_when_one_is_killed(demo_model: ModelFiles) -> None:
    program = Path(__file__).with_name("two_nodes.py")

    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=390)

    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(f"start {found['start_s']:.1f} s, healed after {found['healed_s']:.1f} s")
    assert found["num_nodes"] == [2, 2]
    assert found["is_elsewhere"]
    assert found["texts"][0] == found["texts"][1] != ""
    assert found["groups_left"] == []
