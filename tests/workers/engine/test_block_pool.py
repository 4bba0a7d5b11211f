from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.engine.block_pool import BlockPool
from workers.engine.cache_log import CacheLog
from workers.engine.errors import OutOfBlocks
from workers.engine.free_list import FreeList


def test_taking_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(1)

    with pytest.raises(OutOfBlocks, match="asked for 3 blocks, 2 free"):
        pool.take(3)

    assert pool.num_free == 2
    pool.check()


def test_a_free_block_keeps_its_content_until_it_is_handed_out_anew() -> None:
    pool = BlockPool(2)
    [block_id] = pool.take(1)
    pool.register(block_id, b"content")
    pool.release([block_id])

    assert pool.find(b"content") == block_id
    pool.take(1)  # the other one, which holds nothing
    assert pool.find(b"content") == block_id
    pool.take(1)
    assert pool.find(b"content") is None


def test_a_found_block_is_held_again_and_leaves_the_free_list_from_the_middle() -> None:
    pool = BlockPool(3)
    block_ids = pool.take(3)
    for block_id in block_ids:
        pool.register(block_id, b"%d" % block_id)
    pool.release(block_ids)

    pool.hold([block_ids[1]])

    assert pool.num_free == 2
    assert block_ids[1] not in pool.take(2)
    pool.check(Counter(block_ids))


def test_the_least_recently_released_content_goes_first_and_of_a_chain_the_tail() -> None:
    pool = BlockPool(4)
    old, new = pool.take(2), pool.take(2)
    for block_id in old + new:
        pool.register(block_id, b"%d" % block_id)

    pool.release(old)
    pool.release(new)

    assert pool.take(4) == [old[1], old[0], new[1], new[0]]


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.register(first, b"same")
    pool.register(second, b"same")

    assert pool.find(b"same") == first
    pool.check()


def test_a_block_released_too_often_is_an_error_in_the_engine() -> None:
    pool = BlockPool(1)
    block_ids = pool.take(1)
    pool.release(block_ids)

    with pytest.raises(AssertionError, match="more often than it was held"):
        pool.release(block_ids)


def test_an_id_cannot_be_removed_twice_from_the_free_list() -> None:
    free = FreeList(2)
    free.remove(0)

    with pytest.raises(AssertionError, match="not on the free list"):
        free.remove(0)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model of plain lists: the order of the free ones, holders, contents."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.log = CacheLog()
        self.pool = BlockPool(num_blocks, self.log)
        self.free = list(range(num_blocks))
        self.holders: Counter[int] = Counter()
        self.contents: dict[int, bytes] = {}
        self.heard: set[bytes] = set()

    @rule(num_blocks=st.integers(0, 9))
    def take(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.take(num_blocks)
            return
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert self.pool.take(num_blocks) == taken
        for block_id in taken:
            self.holders[block_id] = 1
            self.contents.pop(block_id, None)

    @precondition(lambda self: +self.holders)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(+self.holders)))
        content = b"%d" % data.draw(st.integers(0, 5))
        if block_id not in self.contents:
            self.pool.register(block_id, content)
            if content not in self.contents.values():
                self.contents[block_id] = content

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.contents)))
        found = self.pool.find(self.contents[block_id])
        assert found == block_id
        self.pool.hold([block_id])
        if block_id in self.free:
            self.free.remove(block_id)
        self.holders[block_id] += 1

    @precondition(lambda self: +self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chain = data.draw(st.lists(st.sampled_from(sorted(+self.holders)), unique=True, min_size=1))
        self.pool.release(chain)
        for block_id in reversed(chain):
            self.holders[block_id] -= 1
            if self.holders[block_id] == 0:
                self.free.insert(len(self.free) if block_id in self.contents else 0, block_id)

    @rule()
    def listen(self) -> None:
        events = self.log.drain()
        if events is not None:
            self.heard |= set(events.stored)
            self.heard -= set(events.evicted)
        assert self.heard == set(self.contents.values())

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.holders)
            assert self.pool.num_free == len(self.free)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
