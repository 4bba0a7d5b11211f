"""Beam search over one prompt: which beams go on, which outputs have ended, when no better one can come.

Token ids and log-probabilities only; whose blocks a beam has is for others to know. A beam that ends is kept and its
place goes to another, as in vLLM's ``LLM.beam_search``; the rules of stopping early are those of transformers'
``BeamSearchScorer`` (Wolf et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.engine.outputs import BeamOutput
from workers.engine.request import BeamParams, FinishReason

Candidates = Sequence[tuple[int, float]]
"""Tokens that may come next and their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class Step:
    """How a beam goes on: which one of those before it, and with which token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]
    logprob: float


class BeamSearch:
    """The beams of one prompt: ``advance`` until ``is_done``, then ``outputs``."""

    def __init__(
        self,
        params: BeamParams,
        num_prompt_tokens: int,
        max_tokens: int,
        min_tokens: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        """Begin with one beam, which is empty.

        Args:
            params: width and scores.
            num_prompt_tokens: counted in lengths.
            max_tokens: of an output.
            min_tokens: below which no output ends.
            stop_token_ids: tokens that end an output.
        """
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self._going: list[_Beam] = [_Beam((), 0.0)]
        self._ended: list[BeamOutput] = []
        """The best so far, best first."""

    @property
    def num_beams(self) -> int:
        """Beams that go on."""
        return len(self._going)

    @property
    def is_done(self) -> bool:
        """True if nothing goes on, or nothing that does could be among the outputs."""
        length = self._length
        if not self._going or length >= self._max_tokens:
            return True
        if len(self._ended) < self._params.width:
            return False
        early = self._params.early_stopping
        if early:
            return True
        if early is None and self._params.length_penalty > 0:
            length = self._max_tokens  # log-probabilities are negative: dividing by more is better
        return self._score(self._going[0].logprob, length) <= self._ended[-1].score

    def advance(self, candidates: Sequence[Candidates]) -> list[Step]:
        """Choose who goes on, likeliest first, from the candidates of each beam."""
        grown: list[tuple[Step, _Beam]] = []
        for parent, (beam, nexts) in enumerate(zip(self._going, candidates, strict=True)):
            for token_id, logprob in nexts:
                longer = _Beam((*beam.token_ids, token_id), beam.logprob + logprob)
                if token_id not in self._stop_token_ids:
                    grown.append((Step(parent, token_id), longer))
                elif len(longer.token_ids) >= self._min_tokens:
                    self._end(longer)
        grown.sort(key=lambda one: -one[1].logprob)  # stable: of equals the one from the likelier beam
        del grown[self._params.width :]
        self._going = [beam for _, beam in grown]
        return [step for step, _ in grown]

    def outputs(self) -> list[BeamOutput]:
        """The best outputs, best first: those that have ended, and, if the search came to its end, what goes on."""
        if len(self._ended) == self._params.width and self._length < self._max_tokens:
            return self._ended
        cut = [
            BeamOutput(
                list(beam.token_ids),
                beam.logprob,
                self._score(beam.logprob, len(beam.token_ids)),
                FinishReason.LENGTH,
            )
            for beam in self._going
        ]
        return self._best([*self._ended, *cut])

    @property
    def _length(self) -> int:
        """Of all that go on: they grow together."""
        return len(self._going[0].token_ids) if self._going else 0

    def _end(self, beam: _Beam) -> None:
        score = self._score(beam.logprob, len(beam.token_ids) - 1)
        last = beam.token_ids[-1]
        ended = BeamOutput(list(beam.token_ids), beam.logprob, score, FinishReason.STOP, last)
        self._ended = self._best([*self._ended, ended])

    def _best(self, outputs: Iterable[BeamOutput]) -> list[BeamOutput]:
        return sorted(outputs, key=lambda output: -output.score)[: self._params.width]

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / max(1, self._num_prompt_tokens + num_tokens) ** self._params.length_penalty
