"""Seconds of work: the one unit of admission, scheduling, placement and scaling.

A step takes a fixed part, a part for each decoding request and prefill token, and parts for the KV that its
attention reads. A copy between the tiers takes a fixed part and one for each block. Coefficients start from a guess
or a measurement (`workers.calibration`) and follow the measured steps (`CostFit`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

_DRIFT = 1e-4
"""Variance that a coefficient, relative to its start, gains with each step: about 10 % in a hundred steps."""
_NOISE = 0.01
"""Variance of a step's time relative to its prediction: steps scatter by about 10 %."""
_START_VARIANCE = 4.0
"""Of coefficients before the first step: they may well be twice what was guessed."""
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
        num_attended = num_tokens * (num_context_tokens + num_tokens / 2)
        return self.per_token_s * num_tokens + self.per_attended_s * num_attended

    def copy_s(self, num_blocks: int) -> float:
        """Predicted time to move ``num_blocks`` blocks one way between the tiers."""
        return self.copy_base_s + self.copy_block_s * num_blocks if num_blocks else 0.0


class CostFit:
    """Keeps a cost model close to what steps take: a Kalman filter over its coefficients.

    Kalman 1960, "A new approach to linear filtering and prediction problems", for a state that drifts at random. Each
    coefficient counts relative to where it started, each step relative to what it took, so that short and long steps
    teach alike. A coefficient never turns negative.
    """

    def __init__(self, cost: CostModel) -> None:
        """Start from ``cost``; a coefficient of 0 is taken as small beside that of a prefill token."""
        self._cost = cost
        self._scales = [
            max(cost.base_s, 1e-7),
            max(cost.per_sequence_s, 1e-3 * cost.base_s, 1e-9),
            max(cost.per_token_s, 1e-9),
            # Orders of magnitude: an H200 and two CPU cores lie within 5 times of both.
            max(cost.per_context_token_s, 1e-3 * cost.per_token_s),
            max(cost.per_attended_s, 3e-5 * cost.per_token_s),
        ]
        start = (
            cost.base_s,
            cost.per_sequence_s,
            cost.per_token_s,
            cost.per_context_token_s,
            cost.per_attended_s,
        )
        self._weights = [value / scale for value, scale in zip(start, self._scales, strict=True)]
        size = len(self._scales)
        self._errors: deque[float] = deque(maxlen=100)
        self._variances = [[_START_VARIANCE * (i == j) for j in range(size)] for i in range(size)]

    @property
    def cost(self) -> CostModel:
        """The model as it stands."""
        return self._cost

    @property
    def step_error_p50(self) -> float:
        """Median error of the predictions for the last hundred steps, relative to what they took."""
        return sorted(self._errors)[len(self._errors) // 2] if self._errors else 0.0

    def observe_step(self, elapsed_s: float, work: StepWork) -> None:
        """Learn from one step; one without time or work says nothing."""
        if elapsed_s <= 0 or not (work.num_decodes or work.num_prefill_tokens):
            return
        amounts = (1, work.num_decodes, work.num_prefill_tokens, work.num_context_tokens, work.num_attended)
        parts = [amount * scale for amount, scale in zip(amounts, self._scales, strict=True)]
        weights, variances = self._weights, self._variances
        predicted_s = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        self._errors.append(abs(predicted_s - elapsed_s) / elapsed_s)
        # A step that was far too short to be true must not weigh more than a good one.
        elapsed_s = max(elapsed_s, 0.1 * predicted_s)
        features = [part / elapsed_s for part in parts]
        gains = [sum(one * feature for one, feature in zip(row, features, strict=True)) for row in variances]
        spread = _NOISE + sum(gain * feature for gain, feature in zip(gains, features, strict=True))
        error = (1 - predicted_s / elapsed_s) / spread
        for index, gain in enumerate(gains):
            weights[index] = max(0.0, weights[index] + gain * error)
            row, share = variances[index], gain / spread
            for other, other_gain in enumerate(gains):
                row[other] -= share * other_gain
            row[index] = min(row[index] + _DRIFT, _START_VARIANCE)
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
