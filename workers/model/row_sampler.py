"""Samples the next token of each row as its request asked: which filters and penalties are needed is decided here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kernels.filters import Filters
from kernels.penalties import apply_penalties
from kernels.philox import Streams
from kernels.sampler import NO_TOKEN, likeliest, log_probabilities, sample
from kernels.vocab_shard import VocabShard
from workers.engine.plan import NOT_FINITE, Branch, NewRow, TokenLogprobs
from workers.engine.request import ChoiceParams
from workers.model.batch import Batch

SAMPLED_AT_ONCE = 128
"""Rows of which the sampler holds some copies of the logits, in float32, at a time."""
_NO_MASKS: Mapping[int, bytes] = {}
_MASKS_KEPT = 16
_BITS = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One sampling row of a step."""

    row: int
    position: int
    """Where the new token goes: the number of tokens before it."""
    params: ChoiceParams
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities on their way from the device."""

    num_top: list[int | None]
    """By sampled row: how many alternatives it asked for, or None if it asked for nothing."""
    sampled: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor
    ranks: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> SampledLogprobs:
        """The same with each tensor where ``move`` brings it."""
        tensors = (self.sampled, self.top_token_ids, self.top_logprobs, self.ranks)
        return SampledLogprobs(self.num_top, *map(move, tensors))

    def by_row(self) -> list[TokenLogprobs | None]:
        """Return what each row asked for; waits for the device."""
        tensors = (self.sampled, self.top_token_ids, self.top_logprobs, self.ranks)
        rows = zip(self.num_top, *(tensor.tolist() for tensor in tensors), strict=True)
        return [None if k is None else TokenLogprobs(one, i[:k], v[:k], rank) for k, one, i, v, rank in rows]


class RowSampler:
    """The sampling parameters of all rows."""

    def __init__(
        self, max_num_seqs: int, eos_token_ids: tuple[int, ...], batch: Batch, vocab: VocabShard
    ) -> None:
        """Sample from logits of ``vocab``; read earlier tokens from ``batch`` where a penalty needs them."""
        self._rows: list[NewRow | None] = [None] * max_num_seqs
        self._vocab = vocab
        self._eos_token_ids = eos_token_ids
        self._batch = batch

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        """Take in the parameters of new rows."""
        for new in new_rows:
            self._rows[new.row] = new

    def branch(self, branches: Sequence[Branch]) -> None:
        """Take over the parameters of the rows that others go on from."""
        before = self._rows.copy()
        for one in branches:
            self._rows[one.row] = before[one.source]

    def num_prompt_tokens(self, row: int) -> int:
        """Of the request that has ``row``."""
        new = self._rows[row]
        assert new is not None, f"row {row} computes but never entered the batch"
        return new.num_prompt_tokens

    def sampled_row(self, row: int, position: int) -> SampledRow:
        """Describe the sampling of ``row``'s token at ``position``."""
        new = self._rows[row]
        assert new is not None, f"row {row} samples but never entered the batch"
        return SampledRow(row, position, new.params, new.num_prompt_tokens)

    def sample(
        self, logits: Tensor, rows: list[SampledRow], masks: Mapping[int, bytes] = _NO_MASKS
    ) -> tuple[Tensor, SampledLogprobs | None]:
        """Return one token id a row [num_rows] int64, and log-probabilities if any row wants them.

        ``logits`` are [num_rows, this rank's tokens]; all ranks must call it together. Log-probabilities are of the
        model's own distribution, before penalties, bias and masks.

        Args:
            masks: by index in ``rows``, as ``TokenMask.allowed`` says them.
        """
        num_top = [row.params.num_logprobs for row in rows]
        widest = min(max((count for count in num_top if count is not None), default=-1), self._vocab.size)
        parts = []
        for start in range(0, len(rows), SAMPLED_AT_ONCE):
            end = start + SAMPLED_AT_ONCE
            own = {index - start: mask for index, mask in masks.items() if start <= index < end}
            parts.append(self._sample_part(logits[start:end].float(), rows[start:end], own, widest))
        token_ids, *scores = (torch.cat(column) for column in zip(*parts, strict=True))
        return token_ids, SampledLogprobs(num_top, *scores) if scores else None

    def _sample_part(
        self, logits: Tensor, rows: list[SampledRow], masks: Mapping[int, bytes], num_top: int
    ) -> tuple[Tensor, ...]:
        """Return tokens; with ``num_top`` of 0 and more also what ``log_probabilities`` says of them."""
        adjusted = self._adjust(logits, rows, masks)
        params = [row.params for row in rows]
        if all(p.temperature == 0 for p in params):
            token_ids = likeliest(adjusted, self._vocab)
        else:
            filtered = [i for i, p in enumerate(params) if p.min_p > 0 or p.top_k > 0 or p.top_p < 1]
            token_ids = sample(
                adjusted,
                self._floats([p.temperature for p in params]),
                self._streams(rows),
                self._filters([params[i] for i in filtered]) if filtered else None,
                self._vocab,
                self._integers(filtered) if 0 < len(filtered) < len(rows) else None,
            )
        if adjusted is not logits or any(p.min_tokens or p.logit_bias for p in params):
            token_ids = self._blame(logits, token_ids)
        if num_top < 0:
            return (token_ids,)
        return token_ids, *log_probabilities(logits, token_ids, num_top, self._vocab)

    def _blame(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Tell rows whose own logits are no finite numbers from those that were left no token.

        As far as this rank's part of the vocabulary shows it: NaN in weights spreads over all of it.
        """
        is_broken = ~logits.amax(-1).isfinite()
        return torch.where((token_ids == NO_TOKEN) & is_broken, NOT_FINITE, token_ids)

    def _adjust(self, logits: Tensor, rows: list[SampledRow], masks: Mapping[int, bytes]) -> Tensor:
        """Apply penalties, biases and forbidden tokens to a copy, if there are any; unknown tokens are passed over."""
        adjusted = logits
        own = self._vocab.own
        penalized = [index for index, row in enumerate(rows) if row.params.has_penalties]
        if penalized:
            adjusted = logits.clone()
            index = self._integers(penalized)
            adjusted[index] = self._penalize(logits[index], [rows[i] for i in penalized])
        bias = [
            (index, token_id - own.start, value)
            for index, row in enumerate(rows)
            for token_id, value in row.params.logit_bias.items()
            if token_id in own
        ]
        forbidden = [
            (index, token_id - own.start, float("-inf"))
            for index, row in enumerate(rows)
            if row.position - row.num_prompt_tokens < row.params.min_tokens
            for token_id in self._ending_tokens(row.params)
            if token_id in own
        ]
        if bias or forbidden:
            adjusted = logits.clone() if adjusted is logits else adjusted
            row_ids, token_ids, values = zip(*bias, *forbidden, strict=True)
            place = (self._integers(row_ids), self._integers(token_ids))
            adjusted.index_put_(place, self._floats(values), accumulate=True)
        limits = dict(masks)
        for i, row in enumerate(rows):
            if row.params.allowed_token_ids:
                chosen = _packed(row.params.allowed_token_ids)
                limits[i] = _intersection(chosen, limits[i]) if i in limits else chosen
        if limits:
            adjusted = logits.clone() if adjusted is logits else adjusted
            self._forbid(adjusted, limits)
        if any(row.params.bad_words for row in rows):
            adjusted = logits.clone() if adjusted is logits else adjusted
            self._end_no_bad_word(adjusted, rows)
        return adjusted

    def _forbid(self, logits: Tensor, limits: Mapping[int, bytes]) -> None:
        """Set what a mask does not allow to minus infinity, in place."""
        own = self._vocab.own
        first_byte, num_bytes = own.start // 8, -(-len(own) // 8)  # a stretch begins with a byte
        packed = np.zeros((len(limits), num_bytes), dtype=np.uint8)
        for i, allowed in enumerate(limits.values()):
            known = np.frombuffer(allowed, dtype=np.uint8)[first_byte : first_byte + num_bytes]
            packed[i, : len(known)] = known
        bits = self._to_device(torch.from_numpy(packed))[:, :, None] >> self._to_device(_BITS)
        is_allowed = (bits & 1).bool().flatten(1)[:, : len(own)]
        index = self._integers(list(limits))
        logits[index] = logits[index].masked_fill(~is_allowed, float("-inf"))

    def _end_no_bad_word(self, logits: Tensor, rows: list[SampledRow]) -> None:
        """Forbid, in place, each token that would complete a bad word; a word counts within the output only."""
        words = [
            (index, word)
            for index, row in enumerate(rows)
            for word in row.params.bad_words
            if len(word) - 1 <= row.position - row.num_prompt_tokens and word[-1] in self._vocab.own
        ]
        if not words:
            return
        longest = max(len(word) for _, word in words) - 1
        # Right-aligned; -1 stands for any token.
        beginnings = self._integers([[-1] * (longest + 1 - len(word)) + list(word[:-1]) for _, word in words])
        places = self._integers([rows[index].row for index, _ in words])
        ends = self._integers([rows[index].position for index, _ in words])
        columns = (ends[:, None] - longest + self._to_device(torch.arange(longest))).clamp(min=0)
        said = self._batch.token_ids[places[:, None], columns]
        is_begun = ((said == beginnings) | (beginnings < 0)).all(-1)
        index = self._integers([index for index, _ in words])
        lasts = self._integers([word[-1] - self._vocab.own.start for _, word in words])
        biases = torch.where(is_begun, float("-inf"), 0.0)
        logits.index_put_((index, lasts), biases, accumulate=True)

    def _penalize(self, logits: Tensor, rows: list[SampledRow]) -> Tensor:
        longest = max(row.position for row in rows)
        params = [row.params for row in rows]
        return apply_penalties(
            logits,
            self._batch.token_ids[self._integers([row.row for row in rows]), :longest]
            - self._vocab.own.start,
            self._integers([row.num_prompt_tokens for row in rows]),
            self._integers([row.position for row in rows]),
            self._floats([p.repetition_penalty for p in params]),
            self._floats([p.presence_penalty for p in params]),
            self._floats([p.frequency_penalty for p in params]),
        )

    def _ending_tokens(self, params: ChoiceParams) -> tuple[int, ...]:
        """Tokens that would end the request; none twice, since their biases add up."""
        eos = () if params.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))

    def _filters(self, params: Sequence[ChoiceParams]) -> Filters:
        return Filters(
            self._floats([p.min_p for p in params]),
            self._to_device(torch.tensor([p.top_k for p in params], dtype=torch.int32)),
            self._floats([p.top_p for p in params]),
        )

    def _streams(self, rows: list[SampledRow]) -> Streams:
        # Seeds are taken modulo 2^64, as two's complement.
        seeds = [((row.params.seed + 2**63) % 2**64) - 2**63 for row in rows]
        choices = [row.params.choice_index for row in rows]
        return Streams(
            self._integers(seeds), self._integers(choices), self._integers([row.position for row in rows])
        )

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return self._to_device(torch.tensor(values, dtype=torch.int64))

    def _floats(self, values: Sequence[float]) -> Tensor:
        return self._to_device(torch.tensor(values, dtype=torch.float32))

    def _to_device(self, tensor: Tensor) -> Tensor:
        device = self._batch.device
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


# A request's tokens may be the whole vocabulary: a few MB a key. Beyond these masks are packed anew each step.
@lru_cache(maxsize=_MASKS_KEPT)
def _packed(token_ids: tuple[int, ...]) -> bytes:
    """A mask that allows these alone."""
    mask = bytearray(max(token_ids) // 8 + 1)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def _intersection(one: bytes, other: bytes) -> bytes:
    return bytes(a & b for a, b in zip(one, other, strict=False))
