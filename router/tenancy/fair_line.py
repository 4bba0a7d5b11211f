"""Whose request goes to a replica next, where several callers want more than the replicas take. No clock, no asyncio.

Replicas serve what they have in their own order, so that who has sent a thousand requests there is ahead of whoever
comes next, at every replica. Hence requests of callers in contention wait here instead, and leave as replicas have
room: always one of the caller who has been served the fewest tokens, prompts and four times outputs. A caller who comes
back starts from the least count of those that wait, so none saves up; first come, first served within a caller.
Source: Sheng et al. 2024, "Fairness in serving large language models" (virtual token counters).
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

OUTPUT_PRICE = 4.0
"""Of an output token beside a prompt token's 1, as the engine's fair policy has it."""
MEMORY_S = 600.0
"""So long after its last request a caller still counts: a flood in between must not have filled the replicas."""

T = TypeVar("T")


class FairLine(Generic[T]):
    """Waiting items by caller, and what each caller has been served."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        """Callers with something waiting; who was served longest ago stands first."""
        self._served: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self._looked_s = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def num_callers(self) -> int:
        """Callers with something waiting."""
        return len(self._waiting)

    @property
    def num_known(self) -> int:
        """Callers whose count is kept."""
        return len(self._served)

    def num_of(self, caller: str) -> int:
        """What waits for one caller."""
        return len(self._waiting.get(caller, ()))

    def see(self, caller: str, now_s: float) -> bool:
        """Note that ``caller`` has a request; True if there have been others lately."""
        if now_s - self._looked_s > MEMORY_S / 10:
            self._looked_s = now_s
            self._forget(now_s)
        self._seen_s[caller] = now_s
        return len(self._seen_s) > 1

    def join(self, caller: str, item: T) -> None:
        """Wait at the end of the caller's own queue."""
        if caller not in self._waiting:
            least = min((self._served.get(one, 0.0) for one in self._waiting), default=0.0)
            self._served[caller] = max(self._served.get(caller, 0.0), least)
            # Among equals the newcomer is first: it has been served longest ago.
            self._waiting = {caller: deque(), **self._waiting}
        self._waiting[caller].append(item)

    def pop(self) -> T:
        """Take the next one out; ``charge`` its caller."""
        caller = min(self._waiting, key=lambda one: self._served[one])
        queue = self._waiting.pop(caller)
        item = queue.popleft()
        if queue:
            self._waiting[caller] = queue  # at the end: it has just been served
        return item

    def leave(self, caller: str, item: T) -> bool:
        """Take an item out that no longer wants to go; False if it has gone already."""
        queue = self._waiting.get(caller)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._waiting[caller]
        return True

    def charge(self, caller: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count what a caller is served."""
        price = num_prompt_tokens + OUTPUT_PRICE * num_output_tokens
        self._served[caller] = self._served.get(caller, 0.0) + price

    def check(self) -> None:
        """Raise ``AssertionError`` if a caller without anything waiting stands in line."""
        assert all(self._waiting.values()), "a caller with nothing waiting stands in line"
        assert self._waiting.keys() <= self._served.keys(), "a caller's count is lost"

    def _forget(self, now_s: float) -> None:
        gone = [one for one, seen_s in self._seen_s.items() if now_s - seen_s > MEMORY_S]
        for caller in gone:
            if caller not in self._waiting:
                del self._seen_s[caller]
                self._served.pop(caller, None)
