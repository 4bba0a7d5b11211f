"""The benchmark of a noisy caller: keys that the cluster takes, and sums over the right callers."""

from __future__ import annotations

from pathlib import Path

from deploy.bench.fairness import NOISY, FairnessPlan, FairnessResult, key_file, key_of, phase_of
from deploy.bench.http_load import StreamTimes
from router.tenancy.key_source import read_keys

PLAN = FairnessPlan(num_quiet=4, quiet_per_s=2.0, share_per_s=5.0, factor=10.0, phase_s=60.0)


def answered(first_s: float) -> StreamTimes:
    return StreamTimes(100.0, [100.0 + first_s, 101.0], is_done=True)


def test_every_caller_has_a_key_that_a_cluster_takes(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file(PLAN))

    ring = read_keys(path)

    for name in PLAN.paces(1.0):
        tenant = ring.find(key_of(name))
        assert tenant is not None
        assert tenant.name == name


def test_only_the_noisy_caller_changes_its_pace() -> None:
    before, after = PLAN.paces(1.0), PLAN.paces(PLAN.factor)

    assert before[NOISY] == 5.0
    assert after[NOISY] == 50.0
    assert {name: pace for name, pace in before.items() if name != NOISY} == {
        name: pace for name, pace in after.items() if name != NOISY
    }


def test_the_quiet_callers_wait_is_theirs_alone() -> None:
    times = {
        "quiet-0": [answered(0.1), StreamTimes(100.0)],
        "quiet-1": [answered(0.2)],
        NOISY: [answered(9.0), StreamTimes(100.0)],
    }

    phase = phase_of(times, 5.0, wall_s=2.0)

    assert (phase.quiet_ttft_p99_ms, phase.num_quiet, phase.num_quiet_failed) == (200.0, 3, 1)
    assert (phase.num_noisy, phase.num_noisy_unanswered, phase.done_per_s) == (2, 1, 1.5)
    assert FairnessResult(phase, phase).ratio == 1.0
