"""Seconds of work: the one unit of admission, scheduling, placement and scaling.

A step takes ``base_s`` plus ``per_sequence_s`` for each decoding request, ``per_token_s`` for each prefill
token and ``per_context_token_s`` for each KV token that is read. The coefficients start from a guess and are
fitted to the measured steps (`CostModel.observe`).
"""

from __future__ import annotations

from dataclasses import dataclass

_RATE = 0.1


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds. Immutable: ``observe`` returns a better one."""

    base_s: float = 0.008
    per_sequence_s: float = 0.0001
    per_token_s: float = 1 / 15000
    per_context_token_s: float = 0.0

    def step_s(self, num_decodes: int, num_prefill_tokens: int = 0, num_context_tokens: int = 0) -> float:
        """Predicted duration of one step."""
        return (
            self.base_s
            + self.per_sequence_s * num_decodes
            + self.per_token_s * num_prefill_tokens
            + self.per_context_token_s * num_context_tokens
        )

    def prefill_s(self, num_tokens: int) -> float:
        """Predicted time to compute ``num_tokens`` uncached prompt tokens."""
        return self.per_token_s * num_tokens

    def observe(
        self, elapsed_s: float, num_decodes: int, num_prefill_tokens: int, num_context_tokens: int = 0
    ) -> CostModel:
        """Move each coefficient towards what this step took, by its share of the prediction.

        Multiplicative updates (exponentiated gradient, Kivinen & Warmuth 1997) at a rate of 0.1: coefficients
        stay positive, and a step teaches most about what it consisted of. A coefficient of 0 stays 0.
        """
        if elapsed_s <= 0 or (num_decodes == 0 and num_prefill_tokens == 0):
            return self
        predicted_s = self.step_s(num_decodes, num_prefill_tokens, num_context_tokens)
        # One outlier, a page fault or a graph capture, must not spoil what many steps have taught.
        error = _RATE * (min(max(elapsed_s / predicted_s, 0.1), 10.0) - 1) / predicted_s
        return CostModel(
            self.base_s * (1 + error * self.base_s),
            self.per_sequence_s * (1 + error * self.per_sequence_s * num_decodes),
            self.per_token_s * (1 + error * self.per_token_s * num_prefill_tokens),
            self.per_context_token_s * (1 + error * self.per_context_token_s * num_context_tokens),
        )
