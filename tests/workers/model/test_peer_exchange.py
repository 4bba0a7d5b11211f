"""How much memory ranks keep for each other's rows."""

from __future__ import annotations

import pytest
import torch

from kernels.all_reduce import peer_memory_bytes
from workers.model.peer_exchange import FLAGGED_ROWS, STAGED_ROWS, num_rows_of


def test_two_ranks_of_an_8b_model_have_room_for_every_graph() -> None:
    assert num_rows_of(2, 4096, torch.bfloat16, is_flagged=True) == FLAGGED_ROWS
    assert num_rows_of(2, 4096, torch.bfloat16, is_flagged=False) == STAGED_ROWS


@pytest.mark.parametrize("is_flagged", [True, False])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("width", [48, 2048, 16384])
def test_memory_stays_within_its_bound_and_aligned(size: int, width: int, is_flagged: bool) -> None:
    num_rows = num_rows_of(size, width, torch.bfloat16, is_flagged)

    num_bytes = peer_memory_bytes(size, num_rows, width, torch.bfloat16, is_flagged)
    assert num_rows >= 16
    assert num_bytes <= 128 << 20
    assert num_bytes % 16 == 0
