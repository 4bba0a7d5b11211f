"""Samples follow the distribution that was asked for, and depend on nothing but their own row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.filters import Filters
from kernels.penalties import apply_penalties
from kernels.philox import Streams, exponentials, philox_4x32
from kernels.sampler import NO_TOKEN, likeliest, log_probabilities, sample

NUM_DRAWS = 10_000


def draw(
    logits: Tensor, num_draws: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Draw from one row of logits many times, at positions 0, 1, ..."""
    streams = Streams(
        torch.full((num_draws,), 7), torch.zeros(num_draws, dtype=torch.int64), torch.arange(num_draws)
    )
    return sample(
        logits.expand(num_draws, -1),
        torch.full((num_draws,), temperature),
        streams,
        Filters(
            torch.full((num_draws,), min_p),
            torch.full((num_draws,), top_k, dtype=torch.int32),
            torch.full((num_draws,), top_p),
        ),
    )


def exact_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Filter one row by the definitions, in float64 and one token at a time."""
    p = (logits.double() / temperature).softmax(-1)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    order = p.argsort(descending=True).tolist()
    if top_k:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            p[token] = 0.0
        mass += float(p[token])
    return p / p.sum()


def test_philox_gives_the_published_numbers() -> None:
    def words(*values: int) -> tuple[Tensor, ...]:
        return tuple(torch.tensor([value]) for value in values)

    ones = 0xFFFFFFFF
    cases = [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones), (ones, ones, ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]

    for key, counter, want in cases:
        assert tuple(int(word) for word in philox_4x32(words(*key), words(*counter))) == want


def streams_of(num_rows: int) -> Streams:
    return Streams(
        torch.full((num_rows,), -3), torch.full((num_rows,), 2, dtype=torch.int64), torch.arange(num_rows)
    )


def test_waiting_times_are_exponential_and_independent() -> None:
    times, others = exponentials(streams_of(1000), (101, 101))

    assert times.shape == (1000, 101)
    assert times.min() > 0.0
    shares = 1.0 - (-times.flatten()).exp()
    counts = shares.mul(100).long().bincount(minlength=100).double()
    assert float(((counts - 1010).square() / 1010).sum()) < 190  # chi-square of 99, beyond five deviations
    assert len(times.unique()) > 100_990
    for first, second in ((times[:, 0], times[:, 1]), (times[:-1, 0], times[1:, 0]), (times[0], others[0])):
        assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 0.35


def test_logits_that_differ_in_their_last_bits_give_the_same_draws() -> None:
    num_rows = 3000
    logits = torch.randn(num_rows, 1000, generator=torch.Generator().manual_seed(5)) * 3
    others = logits * (1 + 2e-7 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(6)))
    assert (others != logits).any()

    first, second = (sample(x, torch.ones(num_rows), streams_of(num_rows)) for x in (logits, others))

    assert torch.equal(first, second)


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.05)],
)
def test_samples_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 2
    expected = exact_distribution(logits, temperature, top_k, top_p, min_p) * NUM_DRAWS

    counts = draw(logits, NUM_DRAWS, temperature, top_k, top_p, min_p).bincount(minlength=300).double()

    assert counts[expected == 0].sum() == 0
    # Cells with few expected draws are taken together, as the chi-square test asks.
    is_common = expected >= 10
    cells = torch.cat((counts[is_common], counts[~is_common].sum()[None]))
    wanted = torch.cat((expected[is_common], expected[~is_common].sum()[None]))
    cells, wanted = cells[wanted >= 5], wanted[wanted >= 5]
    chi_square = float(((cells - wanted).square() / wanted).sum())
    freedom = len(cells) - 1
    # Wilson and Hilferty's bound at five standard deviations.
    bound = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert chi_square <= bound


def test_the_nucleus_of_a_flat_distribution_is_wide() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(2)) * 0.1
    expected = exact_distribution(logits, 1.0, 0, 0.9, 0.0)
    assert (expected > 0).sum() > 1024

    tokens = draw(logits, 2000, 1.0, top_p=0.9)

    assert (expected[tokens] > 0).all()
    assert len(tokens.unique()) > 1024


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 1000)
    seeds, choices, positions = (
        torch.tensor([1, 1, 1, 2, -5, 2**62]),
        torch.arange(6) % 2,
        torch.arange(6) // 3,
    )
    temperatures = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0])
    min_p, top_p = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.01, 0.0]), torch.tensor([0.9, 1.0, 1.0, 0.5, 0.9, 1.0])
    top_k = torch.tensor([0, 5, 3, 0, 40, 0], dtype=torch.int32)
    together = sample(logits, temperatures, Streams(seeds, choices, positions), Filters(min_p, top_k, top_p))

    for row in range(6):
        one = slice(row, row + 1)
        streams = Streams(seeds[one], choices[one], positions[one])
        alone = sample(logits[one], temperatures[one], streams, Filters(min_p[one], top_k[one], top_p[one]))
        assert alone == together[row]


def test_zero_temperature_takes_the_likeliest_and_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((2, 700), float("-inf"))
    logits[:, 650] = -3.0
    logits[1, 3] = -2.0

    drawn = sample(logits, torch.tensor([1.0, 0.0]), streams_of(2))

    assert drawn.tolist() == [650, 3]


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    logits = torch.tensor([[50.0, 51.0, -9.0]])

    drawn = sample(logits, torch.tensor([1e-38]), streams_of(1))

    assert drawn.tolist() == [1]


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0]])
    token_ids = torch.tensor(
        [[0, 1, 2, 2, 4]], dtype=torch.int32
    )  # prompt 0 1, output 2 2, and one stale entry

    got = apply_penalties(
        logits,
        token_ids,
        num_prompt_tokens=torch.tensor([2]),
        num_tokens=torch.tensor([4]),
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.25]),
        frequency=torch.tensor([0.125]),
    )

    torch.testing.assert_close(got, torch.tensor([[1.0, -4.0, 0.5 - 0.25 - 2 * 0.125, 0.5, 3.0]]))


def test_log_probabilities_are_those_of_the_whole_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])

    sampled, ids, values, ranks = log_probabilities(logits, torch.tensor([1]), num_top=2)

    want = logits.log_softmax(-1)[0]
    assert sampled.item() == pytest.approx(want[1].item())
    assert ids.tolist() == [[3, 2]]
    assert ranks.tolist() == [3]
    torch.testing.assert_close(values[0], want[[3, 2]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5, "top_p": 0.8, "min_p": 0.01}], ids=["plain", "filtered"]
)
def test_rows_that_are_no_numbers_have_no_token_and_leave_others_alone(
    temperature: float, filters: dict[str, float]
) -> None:
    torch.manual_seed(0)
    healthy = torch.randn(700)
    nan, infinite, nothing, masked = (healthy.clone() for _ in range(4))
    nan[650] = math.nan
    infinite[3] = math.inf
    nothing[:] = -math.inf
    masked[5:] = -math.inf

    wanted = [int(draw(one, 1, temperature, **filters)) for one in (healthy, masked)]  # type: ignore[arg-type]

    for one in (nan, infinite, nothing, torch.full((700,), math.nan)):
        assert draw(one, 3, temperature, **filters).tolist() == [NO_TOKEN] * 3  # type: ignore[arg-type]
    assert min(wanted) >= 0
    assert likeliest(torch.stack([nan, healthy, infinite, nothing, masked])).tolist() == [
        NO_TOKEN, int(healthy.argmax()), NO_TOKEN, NO_TOKEN, int(masked.argmax())
    ]  # fmt: skip
