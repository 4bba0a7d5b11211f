"""One prompt's vector being awaited, and the numbers in it."""

from __future__ import annotations

import math
from array import array
from typing import Literal

from deploy.offline.outputs import RequestOutput
from workers.engine.errors import InvalidRequest
from workers.engine.outputs import TokenOutput
from workers.engine.request import ChoiceParams

Pooling = Literal["mean", "last"]


class PooledChoice:
    """Waits for the only output of a pooled request."""

    def __init__(self, request: RequestOutput) -> None:
        self.request = request
        self.vector: array[float] = array("f")
        """Empty until it has come."""

    def take(self, new: TokenOutput) -> bool:
        """Keep the vector; always the end."""
        assert new.pooled is not None, "a pooled request ends with its vector"
        self.vector = array("f", new.pooled)
        self.request.finished = True
        return True


def pooled_params(pooling: str) -> ChoiceParams:
    """What the engine is asked for.

    Raises:
        InvalidRequest: an unknown way to pool.
    """
    if pooling not in ("mean", "last"):
        raise InvalidRequest(f"pooling is {pooling!r}, it must be 'mean' or 'last'", "pooling")
    kind: Pooling = "mean" if pooling == "mean" else "last"
    return ChoiceParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=kind)


def unit(vector: array[float]) -> list[float]:
    """The vector brought to length 1."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return [value / length for value in vector] if length else vector.tolist()
