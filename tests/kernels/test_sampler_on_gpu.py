"""A GPU draws the CPU's tokens: the same numbers, the same filters, the same penalties."""

from __future__ import annotations

import pytest
import torch

from kernels.penalties import apply_penalties
from kernels.philox import Streams, exponentials
from kernels.sampler import sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_samples_are_those_of_the_cpu() -> None:
    num_rows = 64
    rows = torch.arange(num_rows)
    logits = torch.randn(num_rows, 5000) * 3
    counters = [rows - 9, rows % 3, rows * 7]
    filters = [rows % 50, torch.linspace(0.3, 1.0, num_rows), torch.linspace(0.0, 0.1, num_rows)]
    temperatures = torch.linspace(0.0, 2.0, num_rows)
    streams, on_gpu = Streams(*counters), Streams(*(x.cuda() for x in counters))

    got = sample(logits.cuda(), temperatures.cuda(), on_gpu, *(x.cuda() for x in filters), max_top_k=49)

    for on_device, on_cpu in zip(
        exponentials(on_gpu, (20, 250)), exponentials(streams, (20, 250)), strict=True
    ):
        torch.testing.assert_close(on_device.cpu(), on_cpu, rtol=1e-12, atol=0.0)
    want = sample(logits, temperatures, streams, *filters, max_top_k=49)
    # A weight within rounding of a filter's bound may fall on its other side.
    assert (got.cpu() == want).sum() >= num_rows - 1


def test_penalties_are_those_of_the_cpu() -> None:
    logits = torch.randn(3, 100)
    token_ids = torch.randint(0, 100, (3, 40), dtype=torch.int32)
    args = [torch.tensor([5, 0, 20]), torch.tensor([40, 10, 20])]
    args += [torch.tensor([1.2, 1.0, 0.5]), torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0.3, 0.0, 0.1])]

    got = apply_penalties(logits.cuda(), token_ids.cuda(), *(x.cuda() for x in args))

    torch.testing.assert_close(got.cpu(), apply_penalties(logits, token_ids, *args))
