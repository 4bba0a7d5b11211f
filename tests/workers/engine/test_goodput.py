"""In virtual time: with less memory than is needed, the choice by cost does no worse than either way by itself."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.bench.virtual_pressure import MODELS, MODES, run_pools

H200, SMALL, CPU = MODELS.values()


def check_choice(mix: str, pressure: float, copy_block_s: float, model: Any) -> dict[str, tuple[int, int]]:
    """How many requests gave way by swapping and by recomputing, by mode."""
    found = {mode: run_pools(mix, mode, copy_block_s, pressure, model) for mode in MODES}
    print(*found.values(), sep="\n")

    best = max(found["swap"].output_tokens_per_s, found["recompute"].output_tokens_per_s)
    assert found["auto"].output_tokens_per_s >= 0.97 * best
    return {mode: (one.num_swapped, one.num_recomputed) for mode, one in found.items()}


@pytest.mark.parametrize("pressure", [2.0, 4.0])
@pytest.mark.parametrize(
    ("mix", "copy_block_s"),
    [
        ("long-in", 150e-6),
        *((mix, copy_s) for mix in ("long-out", "mixed") for copy_s in (40e-6, 150e-6, 2e-3)),
    ],
)
def test_the_choice_is_no_worse_than_swapping_or_recomputing(
    mix: str, pressure: float, copy_block_s: float
) -> None:
    check_choice(mix, pressure, copy_block_s, H200)


@pytest.mark.parametrize(
    ("mix", "copy_block_s"), [("mixed", 0.15e-3), ("mixed", 40e-3), ("long-out", 200e-3)]
)
def test_the_choice_holds_on_the_costs_of_a_cpu(mix: str, copy_block_s: float) -> None:
    check_choice(mix, 4.0, copy_block_s, CPU)


@pytest.mark.parametrize(("mix", "pressure"), [("long-out", 2.0), ("mixed", 4.0)])
def test_where_both_take_about_the_same_time_some_are_swapped_and_some_recomputed(
    mix: str, pressure: float
) -> None:
    num_swapped, num_recomputed = check_choice(mix, pressure, 100e-6, SMALL)["auto"]

    assert min(num_swapped, num_recomputed) > 0
