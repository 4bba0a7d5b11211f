"""An ordered set of block ids with O(1) take, append and removal from the middle.

The links live in two lists indexed by block id (one slot more for the sentinel), so a block on the list costs
no object of its own. Knows nothing of what a block is.
"""

from __future__ import annotations

from collections.abc import Iterator

_ABSENT = -1


class FreeList:
    """Ids ``0 .. capacity`` in a circle through a sentinel; the front is handed out first."""

    __slots__ = ("_next", "_prev", "_sentinel", "_size")

    def __init__(self, capacity: int) -> None:
        """Start with all ids on the list, in ascending order."""
        self._sentinel = capacity
        self._next = [*range(1, capacity + 1), 0]
        self._prev = [capacity, *range(capacity)]
        self._size = capacity

    def __len__(self) -> int:
        return self._size

    def __contains__(self, item: int) -> bool:
        return self._next[item] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        item = self._next[self._sentinel]
        while item != self._sentinel:
            yield item
            item = self._next[item]

    def pop(self) -> int:
        """Take the front id off. The list must not be empty."""
        item = self._next[self._sentinel]
        self.remove(item)
        return item

    def append(self, item: int) -> None:
        """Put an absent id at the back: it is handed out last."""
        self._link(self._prev[self._sentinel], item, self._sentinel)

    def push(self, item: int) -> None:
        """Put an absent id at the front: it is handed out next."""
        self._link(self._sentinel, item, self._next[self._sentinel])

    def remove(self, item: int) -> None:
        """Take a present id off, wherever it stands."""
        before, after = self._prev[item], self._next[item]
        assert after != _ABSENT, f"id {item} is not on the free list"
        self._next[before] = after
        self._prev[after] = before
        self._next[item] = _ABSENT
        self._size -= 1

    def check(self) -> None:
        """Raise ``AssertionError`` if the circle is broken or its length is not the count."""
        num_seen, item = 0, self._sentinel
        while True:
            after = self._next[item]
            assert after != _ABSENT, f"id {item} links to nothing"
            assert self._prev[after] == item, f"links around id {item} disagree"
            if after == self._sentinel:
                break
            num_seen, item = num_seen + 1, after
            assert num_seen <= self._size, "the free list holds more ids than it counts"
        assert num_seen == self._size, "the free list holds fewer ids than it counts"

    def _link(self, before: int, item: int, after: int) -> None:
        assert self._next[item] == _ABSENT, f"id {item} is on the free list twice"
        self._next[before] = self._prev[after] = item
        self._prev[item], self._next[item] = before, after
        self._size += 1
