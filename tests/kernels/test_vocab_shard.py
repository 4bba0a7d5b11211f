"""Ranks that share a vocabulary draw, and tell of, what one rank with all of it would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.filters import Filters
from kernels.philox import Streams
from kernels.sampler import likeliest, log_probabilities, sample
from kernels.vocab_shard import STRETCH

VOCAB = 9 * STRETCH - 100
NUM_ROWS = 200


class ThreadShard:
    """A shard whose ranks are threads."""

    def __init__(self, parts: list[range], rank: int, told: list[Tensor], barrier: threading.Barrier) -> None:
        self._parts, self._rank, self._told, self._barrier = parts, rank, told, barrier
        self.own, self.size = parts[rank], parts[-1].stop

    def highest(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchange(values)).amax(0)

    def side_by_side(self, columns: Tensor) -> Tensor:
        return torch.cat(self._exchange(columns), dim=1)

    def whole(self, columns: Tensor) -> Tensor:
        return self.side_by_side(columns)

    def _exchange(self, own: Tensor) -> list[Tensor]:
        self._told[self._rank] = own
        self._barrier.wait(30)
        told = list(self._told)
        self._barrier.wait(30)
        return told


def on_each_rank(parts: list[range], run: Callable[[ThreadShard], object]) -> list[object]:
    told, barrier = [torch.empty(0)] * len(parts), threading.Barrier(len(parts))
    shards = [ThreadShard(parts, rank, told, barrier) for rank in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, shards))


def cut(*ends: int) -> list[range]:
    starts = [0, *ends]
    return [range(a * STRETCH, min(b * STRETCH, VOCAB)) for a, b in zip(starts, [*ends, 9], strict=True)]


def random_logits() -> Tensor:
    return torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(4)) * 3


PARTS = [cut(5), cut(1), cut(2, 4, 6), cut(*range(1, 9))]


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (300, 0.9, 0.01)])
def test_the_same_tokens_are_drawn(parts: list[range], filters: tuple[int, float, float]) -> None:
    logits = random_logits()
    logits[3, : 8 * STRETCH] = float("-inf")  # nothing that most ranks have may be drawn
    top_k, top_p, min_p = filters
    temperatures = torch.linspace(0, 2, NUM_ROWS)

    def run(shard: ThreadShard | None) -> Tensor:
        own = shard.own if shard is not None else range(VOCAB)
        return sample(
            logits[:, own.start : own.stop],
            temperatures,
            Streams(torch.full((NUM_ROWS,), 5), torch.zeros(NUM_ROWS).long(), torch.arange(NUM_ROWS)),
            Filters(
                torch.full((NUM_ROWS,), min_p),
                torch.full((NUM_ROWS,), top_k, dtype=torch.int32),
                torch.full((NUM_ROWS,), top_p),
            ),
            shard,
        )

    alone = run(None)

    assert all(torch.equal(tokens, alone) for tokens in on_each_rank(parts, run))
    assert alone[3] >= 8 * STRETCH
    assert len(alone.unique()) > 50


def test_only_rows_with_filters_are_told_whole() -> None:
    logits, filtered, told = random_logits(), torch.tensor([1, 5, 6]), []
    temperatures = torch.full((NUM_ROWS,), 0.7)
    streams = Streams(torch.full((NUM_ROWS,), 5), torch.zeros(NUM_ROWS).long(), torch.arange(NUM_ROWS))
    top_p = torch.ones(NUM_ROWS)
    top_p[filtered] = 0.3
    off, off_k = torch.zeros(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.int32)

    def run(shard: ThreadShard) -> Tensor:
        whole = shard.whole
        shard.whole = lambda columns: told.append(len(columns)) or whole(columns)
        own = logits[:, shard.own.start : shard.own.stop]
        filters = Filters(off[filtered], off_k[filtered], top_p[filtered])
        return sample(own, temperatures, streams, filters, shard, filtered)

    wanted = sample(logits, temperatures, streams, Filters(off, off_k, top_p))

    assert all(torch.equal(tokens, wanted) for tokens in on_each_rank(cut(5), run))
    assert told == [3, 3]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_first_of_equal_tokens_is_the_likeliest(parts: list[range]) -> None:
    logits = random_logits()
    logits[0, [100, 700, 2000]] = 50.0

    found = on_each_rank(parts, lambda shard: likeliest(logits[:, shard.own.start : shard.own.stop], shard))

    assert all(torch.equal(tokens, logits.argmax(-1)) for tokens in found)
    assert found[0][0] == 100


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("num_top", [0, 5, 400])
def test_log_probabilities_are_those_of_the_whole_vocabulary(parts: list[range], num_top: int) -> None:
    logits = random_logits()
    tokens = torch.arange(NUM_ROWS) * 11
    want = logits.log_softmax(-1)

    found = on_each_rank(
        parts,
        lambda shard: log_probabilities(logits[:, shard.own.start : shard.own.stop], tokens, num_top, shard),
    )

    for own, ids, values, ranks in [*found, log_probabilities(logits, tokens, num_top)]:
        torch.testing.assert_close(own, want.gather(1, tokens[:, None]).squeeze(1), atol=1e-5, rtol=0)
        assert torch.equal(logits.gather(1, ids), logits.topk(num_top, dim=-1).values)
        torch.testing.assert_close(values, want.gather(1, ids), atol=1e-5, rtol=0)
        order = logits.argsort(-1, descending=True)
        assert torch.equal(order.gather(1, ranks[:, None] - 1).squeeze(1), tokens)
