"""Builders with defaults: a test names only what it is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from workers.engine.config import EngineConfig
from workers.engine.constraint import GrammarFailed, Matcher
from workers.engine.engine import Engine
from workers.engine.outputs import BeamOutput, TokenOutput
from workers.engine.plan import StepPlan
from workers.engine.request import ChoiceParams, EngineRequest, FinishReason
from workers.scripted_rank import ScriptedRank, generate, search

VOCAB_SIZE = 1000


class Residues:
    """A grammar of the tests, "modulus:length": each token's residue is that of the sum of those before it.

    "modulus:length:n" fails once n tokens are taken.
    """

    def __init__(self, grammar: str) -> None:
        self._modulus, self._length, *fails_at = map(int, grammar.split(":"))
        self._fails_at = fails_at[0] if fails_at else None
        self._total = 1
        self._num_taken = 0

    @property
    def is_complete(self) -> bool:
        return self._num_taken >= self._length

    def prepare(self, others: Sequence[Matcher]) -> None:
        pass

    def mask(self) -> bytes:
        if self._num_taken == self._fails_at:
            raise GrammarFailed("the grammar is too complex")
        allowed = bytearray(-(-VOCAB_SIZE // 8))
        for token_id in range(self._total % self._modulus, VOCAB_SIZE, self._modulus):
            allowed[token_id // 8] |= 1 << token_id % 8
        return bytes(allowed)

    def accept(self, token_id: int) -> None:
        if token_id % self._modulus != self._total % self._modulus:
            raise GrammarFailed(f"{token_id} is not allowed")
        self._total += token_id
        self._num_taken += 1


def matcher_of(request: EngineRequest) -> Residues | None:
    """A matcher of the request's grammar, if it has one."""
    return Residues(request.params.grammar) if request.params.grammar else None


@dataclass
class Bench:
    """An engine and a rank that checks what it is told, driven by hand."""

    engine: Engine
    rank: ScriptedRank
    now_s: float = 0.0
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    finish_reasons: dict[str, FinishReason] = field(default_factory=dict)
    beams: dict[str, list[BeamOutput]] = field(default_factory=dict)
    outputs: list[TokenOutput] = field(default_factory=list)
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    _names: Iterator[int] = field(default_factory=count)

    def add(self, prompt: int | list[int] = 4, *, max_tokens: int = 4, **fields: Any) -> str:
        """Add a request; a number stands for a prompt of that length which no other shares."""
        number = next(self._names)
        request_id = fields.pop("request_id", f"r{number}")
        outside = {
            key: fields.pop(key)
            for key in ("output_token_ids", "block_hashes", "hash_root", "priority", "tenant")
            if key in fields
        }
        if isinstance(prompt, int):
            prompt = [number * 37 % VOCAB_SIZE, *range(1, prompt)]
        params = ChoiceParams(max_tokens=max_tokens, **{"ignore_eos": True, "seed": number, **fields})
        request = EngineRequest(request_id, prompt, params, **outside)
        output = self.engine.add(request, self.now_s, matcher_of(request))
        self.requests[request_id] = request
        self.token_ids[request_id] = []
        if output is not None:
            self._take([output])
        return request_id

    def plan(self) -> StepPlan | None:
        """Plan a step and launch it."""
        plan = self.engine.plan(self.now_s)
        self.engine.check()
        if plan is not None:
            self.rank.launch(plan)
        return plan

    def apply(self) -> list[TokenOutput]:
        """Apply the oldest result."""
        outputs = self.engine.apply(self.rank.collect(), self.now_s)
        self.engine.check()
        self._take(outputs)
        return outputs

    def step(self) -> list[TokenOutput]:
        """Plan as far ahead as the engine goes, then apply one result."""
        while self.plan() is not None:
            pass
        return self.apply()

    def run(self, max_steps: int = 2000) -> None:
        """Step until all requests have ended."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"requests have not ended after {max_steps} steps")

    def expected(self, request_id: str) -> tuple[list[int], FinishReason]:
        """What the request must yield."""
        request = self.requests[request_id]
        return generate(request, self.engine.config, VOCAB_SIZE, matcher_of(request))

    def assert_all_as_expected(self) -> None:
        """Every request has yielded the tokens and the end that the pure function gives."""
        for request_id in self.requests:
            self.assert_as_expected(request_id)

    def assert_as_expected(self, request_id: str) -> None:
        """The request has yielded what the pure function gives: its tokens and end, or its beams and their scores."""
        request = self.requests[request_id]
        if request.params.beams is None:
            assert (self.token_ids[request_id], self.finish_reasons[request_id]) == self.expected(request_id)
            return
        found = self.beams[request_id]
        expected = search(request, self.engine.config, VOCAB_SIZE)
        assert [beam.token_ids for beam in found] == [tokens for tokens, _ in expected]
        assert [beam.score for beam in found] == pytest.approx([score for _, score in expected])

    def _take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finish_reasons, "a request speaks after its end"
            self.outputs.append(output)
            self.token_ids[output.request_id] += output.token_ids
            if output.beams is not None:
                self.beams[output.request_id] = output.beams
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id] = output.finish_reason


def make_bench(**fields: Any) -> Bench:
    """A bench whose engine is small: blocks of 4 tokens, one step at a time unless told otherwise."""
    defaults = {
        "max_model_len": 64,
        "num_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "run_ahead": 0,
    }
    copy_lag = fields.pop("copy_lag", 0)
    cost = fields.pop("cost", None)
    config = EngineConfig(**{**defaults, **fields})
    return Bench(Engine(config, cost), ScriptedRank(config, VOCAB_SIZE, copy_lag))


@pytest.fixture(name="make_bench", scope="session")
def make_bench_fixture() -> Any:
    """The builder, for tests that cannot import it."""
    return make_bench
