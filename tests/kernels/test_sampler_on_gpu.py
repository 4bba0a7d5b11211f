"""A GPU draws the CPU's tokens: the same numbers, the same filters, the same penalties."""

from __future__ import annotations

import pytest
import torch

from kernels.filters import Filters, filter_floors, filter_floors_ref
from kernels.penalties import apply_penalties
from kernels.philox import Streams, exponentials
from kernels.sampler import log_probabilities, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_samples_are_those_of_the_cpu() -> None:
    num_rows = 64
    rows = torch.arange(num_rows)
    logits = torch.randn(num_rows, 5000) * 3
    counters = [rows - 9, rows % 3, rows * 7]
    filters = [
        torch.linspace(0.0, 0.1, num_rows),
        (rows % 50).to(torch.int32),
        torch.linspace(0.3, 1.0, num_rows),
    ]
    temperatures = torch.linspace(0.0, 2.0, num_rows)
    streams, on_gpu = Streams(*counters), Streams(*(x.cuda() for x in counters))

    got = sample(logits.cuda(), temperatures.cuda(), on_gpu, Filters(*(x.cuda() for x in filters)))

    for on_device, on_cpu in zip(
        exponentials(on_gpu, (20, 250)), exponentials(streams, (20, 250)), strict=True
    ):
        torch.testing.assert_close(on_device.cpu(), on_cpu, rtol=1e-12, atol=0.0)
    want = sample(logits, temperatures, streams, Filters(*filters))
    # A weight within rounding of a filter's bound may fall on its other side.
    assert (got.cpu() == want).sum() >= num_rows - 1


@pytest.mark.parametrize("vocab", [37, 5001, 151_936])
def test_log_probabilities_of_a_row_are_the_same_to_the_bit_beside_any_others(vocab: int) -> None:
    logits = (torch.randn(257, vocab, device="cuda") * 3).bfloat16().float()  # with equal ones
    token_ids = torch.randint(0, vocab, (257,), device="cuda")

    together = log_probabilities(logits, token_ids, 5)

    for rows in (slice(0, 1), slice(7, 8), slice(255, 257), slice(3, 67)):
        for some, all_rows in zip(log_probabilities(logits[rows], token_ids[rows], 5), together, strict=True):
            assert torch.equal(some, all_rows[rows])
    want = logits.cpu().double().log_softmax(-1).gather(1, token_ids.cpu()[:, None]).squeeze(1)
    torch.testing.assert_close(together[0].cpu().double(), want, rtol=1e-5, atol=2e-6)


def test_penalties_are_those_of_the_cpu() -> None:
    logits = torch.randn(3, 100)
    token_ids = torch.randint(0, 100, (3, 40), dtype=torch.int32)
    args = [torch.tensor([5, 0, 20]), torch.tensor([40, 10, 20])]
    args += [torch.tensor([1.2, 1.0, 0.5]), torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0.3, 0.0, 0.1])]

    got = apply_penalties(logits.cuda(), token_ids.cuda(), *(x.cuda() for x in args))

    torch.testing.assert_close(got.cpu(), apply_penalties(logits, token_ids, *args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [37, 5000, 151_936])
def test_filters_keep_the_tokens_that_the_cpu_keeps(dtype: torch.dtype, vocab: int) -> None:
    num_rows = 40
    rows = torch.arange(num_rows)
    logits = (torch.randn(num_rows, vocab) * 3).to(dtype)
    logits[7] *= 0.01  # nearly all of it is the nucleus
    logits[8, 5:] = float("-inf")
    temperatures = torch.linspace(0.0, 2.0, num_rows)
    filters = Filters(
        torch.where(rows % 3 == 0, 0.05, 0.0),
        torch.where(rows % 2 == 0, 1 + rows * 9, 0).to(torch.int32),
        torch.where(rows % 4 < 3, 0.6 + rows / 100, 1.0),
    )

    got = filter_floors(
        logits.cuda(),
        temperatures.cuda(),
        Filters(filters.min_p.cuda(), filters.top_k.cuda(), filters.top_p.cuda()),
    ).cpu()

    kept = logits.float() >= got[:, None]
    wanted = logits.float() >= filter_floors_ref(logits, temperatures, filters)[:, None]
    # What is never drawn may be left out, and of a mass the last bits may differ: then one token more or less.
    scaled = (logits.float() - logits.float().amax(-1, keepdim=True)) / temperatures.clamp(min=1e-30)[:, None]
    differs = (kept != wanted) & (scaled > -60)
    assert (differs.sum(-1) > 0).sum() <= 1
