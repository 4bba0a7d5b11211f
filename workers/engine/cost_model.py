"""Seconds of work: the one unit of admission, scheduling, placement and scaling.

A step takes a fixed part, a part for each decoding request and prefill token, and parts for the KV that its
attention reads. A copy between the tiers takes a fixed part and one for each block. Coefficients start from a guess
or a measurement (`workers.calibration`) and follow the measured steps (`CostFit`).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass, replace

_MEMORY = 0.98
"""Weight of a step after the next one: fifty steps count, so that the model follows what the machine does now."""
_INERTIA = 0.02
"""Weight, beside a step's 1, of staying where a coefficient is: those that the last steps did not use stay."""
_SWEEPS = 2
"""Passes over the coefficients a step; a step changes little, and the next goes on from there."""
_ERRORS_BETWEEN = 10
"""Steps between two looks at the median error: sorting takes a few us, and everyone is told after every step."""
_LEAST_AMPLE = 256
"""Prompt tokens of a step that are never ample: a fit may find no fixed part at all."""
_COPY_RATE = 0.2
"""Share by which one batch of copies moves their price."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does, in the units of the cost model."""

    num_decodes: int = 0
    num_prefill_tokens: int = 0
    num_context_tokens: int = 0
    """KV tokens that the decoding requests read."""
    num_attended: int = 0
    """Pairs of a prefill token and a KV token that it reads."""


def attended(num_tokens: int, num_context_tokens: int) -> int:
    """Pairs of one of ``num_tokens`` tokens and a KV token that it reads, where they follow ``num_context_tokens``."""
    return num_tokens * (num_context_tokens + num_tokens // 2)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds. Immutable: ``CostFit`` makes better ones."""

    base_s: float = 0.008
    per_sequence_s: float = 0.0001
    per_token_s: float = 1 / 15000
    per_context_token_s: float = 0.0
    per_attended_s: float = 0.0
    copy_base_s: float = 20e-6
    """Of a batch of copies, whatever its size."""
    copy_block_s: float = 40e-6
    """2 MiB, a block of an 8B model, at 50 GB/s."""

    def step_s(
        self,
        num_decodes: int,
        num_prefill_tokens: int = 0,
        num_context_tokens: int = 0,
        num_attended: int = 0,
    ) -> float:
        """Predicted duration of one step; the arguments are those of ``StepWork``."""
        return (
            self.base_s
            + self.per_sequence_s * num_decodes
            + self.per_token_s * num_prefill_tokens
            + self.per_context_token_s * num_context_tokens
            + self.per_attended_s * num_attended
        )

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Predicted time to compute ``num_tokens`` tokens that follow ``num_context_tokens`` computed ones."""
        return self.queue_s(num_tokens, attended(num_tokens, num_context_tokens))

    def queue_s(self, num_tokens: int, num_attended: int) -> float:
        """Predicted time to compute prompt tokens of several requests, which attend to KV in so many pairs."""
        return self.per_token_s * num_tokens + self.per_attended_s * num_attended

    def prefill_tokens(self, seconds: float, num_context_tokens: int = 0) -> int:
        """How many tokens ``prefill_s`` says can be computed in ``seconds``."""
        token_s = self.per_token_s + self.per_attended_s * num_context_tokens
        if self.per_attended_s == 0:
            return int(seconds / token_s) if token_s else sys.maxsize
        # per_attended_s / 2 * n^2 + token_s * n = seconds
        root = math.sqrt(token_s**2 + 2 * self.per_attended_s * max(seconds, 0.0))
        return int((root - token_s) / self.per_attended_s)

    def ample_prefill_tokens(self, max_overhead: float) -> float:
        """Prompt tokens beside which a step's fixed part is ``max_overhead`` of it: more only wait for each other."""
        return (
            max(_LEAST_AMPLE, self.base_s / max_overhead / self.per_token_s) if self.per_token_s else math.inf
        )

    def copy_s(self, num_blocks: int) -> float:
        """Predicted time to move ``num_blocks`` blocks one way between the tiers."""
        return self.copy_base_s + self.copy_block_s * num_blocks if num_blocks else 0.0


class CostFit:
    """Keeps a cost model close to what steps take: least squares over the last steps, none below zero.

    The sums of products of the normal equations are kept, older steps fading, and solved by coordinate descent from
    the last solution (Franc, Hlaváč & Navara 2005, "Sequential coordinate-wise algorithm for the non-negative least
    squares problem"). Each step counts relative to what it took, so that short and long ones teach alike and one
    outlier, a page fault or a graph capture, next to nothing.
    """

    def __init__(self, cost: CostModel) -> None:
        """Start from ``cost``; a coefficient of 0 is taken as small beside that of a prefill token."""
        self._cost = cost
        start = (
            cost.base_s,
            cost.per_sequence_s,
            cost.per_token_s,
            cost.per_context_token_s,
            cost.per_attended_s,
        )
        self._scales = [
            max(cost.base_s, 1e-7),
            max(cost.per_sequence_s, 1e-3 * cost.base_s, 1e-9),
            max(cost.per_token_s, 1e-9),
            # Orders of magnitude: an H200 and two CPU cores lie within 5 times of both.
            max(cost.per_context_token_s, 1e-3 * cost.per_token_s, 1e-12),
            max(cost.per_attended_s, 3e-5 * cost.per_token_s, 1e-14),
        ]
        self._weights = [value / scale for value, scale in zip(start, self._scales, strict=True)]
        size = len(self._scales)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._importance = 1.0
        """Of the last step in the sums."""
        self._errors: deque[float] = deque(maxlen=100)
        self._num_errors = 0
        self._step_error_p50 = 0.0
        # The start counts as one typical step, so that the first one measured does not decide alone.
        typical = StepWork(num_decodes=16)
        self._note(self._parts(typical), max(cost.step_s(typical.num_decodes), 1e-6))

    @property
    def cost(self) -> CostModel:
        """The model as it stands."""
        return self._cost

    @property
    def step_error_p50(self) -> float:
        """Median error of the predictions for about the last hundred steps, relative to what they took."""
        return self._step_error_p50

    def observe_step(self, elapsed_s: float, work: StepWork) -> None:
        """Learn from one step; one without time or work says nothing."""
        if elapsed_s <= 0 or not (work.num_decodes or work.num_prefill_tokens):
            return
        weights, parts = self._weights, self._parts(work)
        predicted_s = sum(weights[index] * part for index, part in parts)
        self._errors.append(abs(predicted_s - elapsed_s) / elapsed_s)
        self._num_errors += 1
        if self._num_errors % _ERRORS_BETWEEN == 1:
            self._step_error_p50 = sorted(self._errors)[len(self._errors) // 2]
        self._note(parts, elapsed_s)
        products, targets = self._products, self._targets
        inertia = _INERTIA * self._importance / elapsed_s**2
        for _ in range(_SWEEPS):
            for index, part in parts:
                row = products[index]
                excess = targets[index]
                for product, weight in zip(row, weights, strict=True):
                    excess -= product * weight
                weights[index] = max(0.0, weights[index] + excess / (row[index] + inertia * part * part))
        base_s, per_sequence_s, per_token_s, per_context_token_s, per_attended_s = (
            weight * scale for weight, scale in zip(weights, self._scales, strict=True)
        )
        cost = self._cost
        self._cost = CostModel(
            base_s,
            per_sequence_s,
            per_token_s,
            per_context_token_s,
            per_attended_s,
            cost.copy_base_s,
            cost.copy_block_s,
        )

    def observe_copies(self, elapsed_s: float, num_blocks: int) -> None:
        """Learn from copies of ``num_blocks`` blocks that took ``elapsed_s`` together."""
        if elapsed_s <= 0 or num_blocks <= 0:
            return
        cost = self._cost
        measured_s = max(elapsed_s - cost.copy_base_s, 0.1 * elapsed_s) / num_blocks
        copy_block_s = cost.copy_block_s + _COPY_RATE * (measured_s - cost.copy_block_s)
        self._cost = replace(cost, copy_block_s=copy_block_s)

    def _parts(self, work: StepWork) -> list[tuple[int, float]]:
        """What the step would take if all weights were 1, by coefficient; those that it uses."""
        amounts = (1, work.num_decodes, work.num_prefill_tokens, work.num_context_tokens, work.num_attended)
        return [(index, amount * self._scales[index]) for index, amount in enumerate(amounts) if amount]

    def _note(self, parts: list[tuple[int, float]], elapsed_s: float) -> None:
        """Add a step, relative to what it took, to the sums: later steps count more instead of earlier ones less."""
        self._importance /= _MEMORY
        if self._importance > 1e9:
            self._products = [[product / self._importance for product in row] for row in self._products]
            self._targets = [target / self._importance for target in self._targets]
            self._importance = 1.0
        factor = self._importance / elapsed_s**2
        for index, part in parts:
            row = self._products[index]
            weighted = factor * part
            for other, other_part in parts:
                row[other] += weighted * other_part
            self._targets[index] += weighted * elapsed_s
