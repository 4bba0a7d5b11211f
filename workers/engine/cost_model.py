"""Seconds of work: the one unit of admission, scheduling, placement and scaling.

A step takes ``base_s`` plus ``per_sequence_s`` for each decoding request, ``per_token_s`` for each prefill
token and ``per_context_token_s`` for each KV token that is read. The coefficients start from a guess and are
fitted to the measured steps (`CostModel.observe`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
        """Move the coefficients that dominated this step towards what it took (rate 0.1)."""
        if elapsed_s <= 0 or (num_decodes == 0 and num_prefill_tokens == 0):
            return self
        predicted = self.step_s(num_decodes, num_prefill_tokens, num_context_tokens)
        scale = 1 + 0.1 * (min(max(elapsed_s / predicted, 0.1), 10.0) - 1)
        decode_s = self.base_s + self.per_sequence_s * num_decodes
        if self.per_token_s * num_prefill_tokens > decode_s:
            return replace(self, per_token_s=self.per_token_s * scale)
        return replace(self, base_s=self.base_s * scale, per_sequence_s=self.per_sequence_s * scale)
