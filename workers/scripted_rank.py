"""A rank whose model is a hash function, over a paged KV cache whose every read it checks.

Where ``ScriptedExecutor`` only answers, this one does what a rank does, with numbers for tensors: it keeps
tokens and block table of each row, writes for each computed token what a model's KV would depend on, and reads
all of it back through the block table. A block handed out too early, shared wrongly or left unfilled raises
``AssertionError`` at the step that would have computed nonsense.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from workers.engine.admission import most_known
from workers.engine.config import EngineConfig
from workers.engine.constraint import Constraint, Matcher
from workers.engine.plan import (
    BlockCopy,
    LateMasks,
    NewRow,
    StepPlan,
    StepResult,
    TailCopy,
    TokenLogprobs,
)
from workers.engine.request import ChoiceParams, EngineRequest, FinishReason

_MASK = (1 << 61) - 1
_FACTOR = 0x1F35_7AEB_9E37_79B1

Slot = tuple[int, int]
"""Block id and offset in the block."""


def digest_of(token_ids: list[int]) -> int:
    """What the KV of the last token depends on: all tokens up to it."""
    digest = 1
    for token_id in token_ids:
        digest = _extend(digest, token_id)
    return digest


def next_token(digest: int, params: ChoiceParams, position: int, vocab_size: int) -> int:
    """The token sampled at ``position`` after tokens with ``digest``."""
    mixed = _extend(_extend(_extend(digest, params.seed), params.choice_index), position)
    return (mixed >> 23) % vocab_size


def likeliest(digest: int, position: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The ``count`` likeliest tokens at ``position`` after tokens with ``digest``, with their log-probabilities."""
    mixed = _extend(digest, position)
    found: dict[int, float] = {}
    logprob = 0.0
    while len(found) < min(count, vocab_size):
        mixed = _extend(mixed, len(found))
        logprob -= (mixed >> 13) % 1024 / 1000 + 0.001
        token_id = (mixed >> 23) % vocab_size
        found[
            next(i % vocab_size for i in range(token_id, 2 * vocab_size) if i % vocab_size not in found)
        ] = logprob
    return list(found.items())


def nearest_allowed(token_id: int, allowed: bytes | None, vocab_size: int) -> int:
    """``token_id``, or the next one behind it, around the end of the vocabulary, that a mask allows."""
    if allowed is None:
        return token_id
    return next(
        i % vocab_size for i in range(token_id, token_id + vocab_size) if allows(allowed, i % vocab_size)
    )


def allows(mask: bytes | None, token_id: int) -> bool:
    """True if a mask allows a token; None allows all."""
    return mask is None or (token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1))


def generate(
    request: EngineRequest, config: EngineConfig, vocab_size: int, matcher: Matcher | None = None
) -> tuple[list[int], FinishReason]:
    """What the engine must report of ``request``, said without an engine: its new tokens, and why it ends."""
    params = request.params
    constraint = Constraint(matcher, params) if params.has_constraint else None
    if constraint is not None:
        for token_id in request.output_token_ids:
            constraint.accept(token_id)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos_token_ids))
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    num_known = len(tokens)
    while True:
        num_output = len(tokens) - len(request.prompt_token_ids)
        if num_output and num_output >= params.min_tokens and tokens[-1] in stops:
            return tokens[num_known:], FinishReason.STOP
        if constraint is not None and constraint.is_complete:
            return tokens[num_known:], FinishReason.STOP
        if num_output >= params.max_tokens or len(tokens) >= config.max_model_len:
            return tokens[num_known:], FinishReason.LENGTH
        token_id = next_token(digest_of(tokens), params, len(tokens), vocab_size)
        if constraint is not None:
            token_id = nearest_allowed(token_id, constraint.mask(), vocab_size)
            constraint.accept(token_id)
        tokens.append(token_id)


def search(request: EngineRequest, config: EngineConfig, vocab_size: int) -> list[tuple[list[int], float]]:
    """What a beam search must report, said by growing all beams to the end: outputs and scores, best first."""
    params, beams = request.params, request.params.beams
    assert beams is not None, "the request is a beam search"
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos_token_ids))
    prompt = request.prompt_token_ids
    most = min(params.max_tokens, config.max_model_len - len(prompt))

    def score(tokens: list[int], logprob: float, length: int) -> tuple[list[int], float]:
        return tokens, logprob / max(1, len(prompt) + length) ** beams.length_penalty

    going: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for length in range(1, most + 1):
        grown = [
            ([*tokens, token_id], logprob + more)
            for tokens, logprob in going
            for token_id, more in likeliest(
                digest_of([*prompt, *tokens]), len(prompt) + length - 1, 2 * beams.width, vocab_size
            )
        ]
        if length >= params.min_tokens:
            ended += [score(tokens, logprob, length - 1) for tokens, logprob in grown if tokens[-1] in stops]
        going = sorted((one for one in grown if one[0][-1] not in stops), key=lambda one: -one[1])
        going = going[: beams.width]
    cut = [score(tokens, logprob, len(tokens)) for tokens, logprob in going]
    return sorted([*ended, *cut], key=lambda one: -one[1])[: beams.width]


@dataclass(slots=True)
class ScriptedRow:
    """What a rank keeps for one row. Digests are those of the tokens up to and including each."""

    params: ChoiceParams
    token_ids: list[int]
    num_prompt_tokens: int
    max_len: int
    digests: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def digest_at(self, position: int) -> int:
        while len(self.digests) <= position:
            parent = self.digests[-1] if self.digests else 1
            self.digests.append(_extend(parent, self.token_ids[len(self.digests)]))
        return self.digests[position]


@dataclass(slots=True)
class _Pending:
    """A step that waits for masks, and its waiting rows by place."""

    result: StepResult
    rows: dict[int, ScriptedRow]


class ScriptedRank:
    """Runs each plan at ``launch``. An ``Executor``."""

    def __init__(self, config: EngineConfig, vocab_size: int, copy_lag: int = 0) -> None:
        """Start empty.

        Args:
            config: limits of the engine.
            vocab_size: tokens are below it.
            copy_lag: copies are made, and said to be done, as many plans later: as late as the contract allows.
        """
        self._config = config
        self._copy_lag = copy_lag
        self._vocab_size = vocab_size
        self._rows: dict[int, ScriptedRow] = {}
        self._kv: dict[Slot, tuple[int, int]] = {}
        """Position and digest of the token whose KV the slot holds."""
        self._results: deque[StepResult] = deque()
        self._pending: deque[_Pending] = deque()
        """Steps with rows whose sampling is deferred; their results stand in ``_results`` with -1 for these."""
        self._touched: deque[dict[int, set[int]]] = deque()
        """For each step not collected: blocks read or written, and by which rows (by identity)."""
        self._next_step_id = 0
        self._host: dict[int, tuple[int, dict[int, tuple[int, int]]]] = {}
        """Of each host block: how often it was written, and what its slots hold."""
        self._copies: deque[tuple[int, list[BlockCopy], list[BlockCopy]]] = deque()
        self._copied = -1

    def launch(self, plan: StepPlan) -> None:
        """Run the plan, or raise ``AssertionError`` if it breaks the contract or reads what is not there."""
        self._check_shape(plan)
        corrupt = self._copy(plan)
        if plan.late_masks is not None:
            self._sample_late(plan.late_masks)
        self._branch(plan)
        for new_row in plan.new_rows:
            self._rows[new_row.row] = self._begin(new_row)
        for copy in plan.tail_copies:
            self._copy_tail(copy)
        scheduled = [self._rows[row] for row in plan.rows]
        for row, new_block_ids, start in zip(scheduled, plan.new_block_ids, plan.starts, strict=True):
            self._append_blocks(row, new_block_ids, start)
        self._write(plan, scheduled)
        self._read(plan, scheduled)
        touched: dict[int, set[int]] = {}
        for row in scheduled:
            for block_id in row.block_ids:
                touched.setdefault(block_id, set()).add(id(row))
        self._touched.append(touched)
        sampling = [row for row, samples in zip(scheduled, plan.samples, strict=True) if samples]
        sampling += self._fork(plan)
        logprobs = [self._logprobs_of(row) for row in sampling]
        token_ids = self._sample(plan, scheduled, sampling)
        self._results.append(
            StepResult(plan.step_id, token_ids, logprobs, copied=self._copied, corrupt_blocks=corrupt)
        )
        if plan.deferred:
            self._pending.append(_Pending(self._results[-1], {i: sampling[i] for i in plan.deferred}))

    def flip(self, host_block: int) -> None:
        """Spoil what a host block holds, as broken memory would; a checksum would tell."""
        generation, slots = self._host[host_block]
        self._host[host_block] = (-generation, slots)

    @property
    def host_blocks(self) -> list[int]:
        """Host blocks that have been written."""
        return list(self._host)

    def _copy(self, plan: StepPlan) -> list[int]:
        """Take up the plan's copies and make those that are due; return device blocks that got no good content."""
        assert plan.copies_awaited <= self._copied, "copies are taken for done that nobody said are"
        busy = {copy.host for _, swap_out, swap_in in self._copies for copy in (*swap_out, *swap_in)}
        filling = {copy.host for _, swap_out, _ in self._copies for copy in swap_out}
        assert busy.isdisjoint(copy.host for copy in plan.swap_out), (
            "a host block is written while it is copied"
        )
        assert filling.isdisjoint(copy.host for copy in plan.swap_in), (
            "a host block is read before it is filled"
        )
        self._copies.append((plan.step_id, plan.swap_out, plan.swap_in))
        self._copied = (
            plan.step_id if plan.awaits_copies else max(self._copied, plan.step_id - self._copy_lag)
        )
        corrupt: list[int] = []
        size = self._config.block_size
        while self._copies and self._copies[0][0] <= self._copied:
            _, swap_out, swap_in = self._copies.popleft()
            for copy in swap_out:
                slots = {i: self._kv[copy.device, i] for i in range(size) if (copy.device, i) in self._kv}
                self._host[copy.host] = (copy.generation, slots)
            for copy in swap_in:
                generation, slots = self._host.get(copy.host, (0, {}))
                for i in range(size):
                    self._kv.pop((copy.device, i), None)
                if generation != copy.generation:
                    corrupt.append(copy.device)
                    continue
                self._kv.update({(copy.device, i): slot for i, slot in slots.items()})
        return corrupt

    def collect(self) -> StepResult:
        """The result of the oldest plan."""
        assert self.ready(), "the result waits for masks that no plan has brought"
        self._touched.popleft()
        return self._results.popleft()

    def ready(self) -> bool:
        """True if a plan is not collected."""
        return bool(self._results) and -1 not in self._results[0].token_ids

    def close(self) -> None:
        """Nothing to let go."""

    def _check_shape(self, plan: StepPlan) -> None:
        """What ``StepPlan`` promises of itself."""
        config = self._config
        assert plan.step_id == self._next_step_id, "steps are numbered one after the other"
        self._next_step_id += 1
        num_rows = len(plan.rows)
        columns = (plan.starts, plan.num_tokens, plan.samples, plan.new_block_ids)
        assert all(len(column) == num_rows for column in columns), "a column has another length"
        assert len(set(plan.rows)) == num_rows, "a row is scheduled twice"
        assert all(0 <= row < config.max_num_seqs for row in plan.rows), "a row is outside the batch"
        forks = {fork.row for fork in plan.forks}
        assert forks.isdisjoint(plan.rows), "a row forks and computes"
        new_rows = {new_row.row for new_row in plan.new_rows}
        assert forks <= new_rows, "a row forks that is not new"
        assert new_rows <= {*plan.rows, *forks}, "a new row is not scheduled"
        assert min(plan.num_tokens, default=1) >= 1, "a row is scheduled for nothing"
        assert plan.num_batched_tokens <= config.max_num_batched_tokens, "the step exceeds its budget"
        is_decode = [num == 1 and samples for num, samples in zip(plan.num_tokens, plan.samples, strict=True)]
        if config.replays_outputs:
            is_decode = self._check_replays(plan)
        assert is_decode == sorted(is_decode, reverse=True), "a prefill chunk stands before a decode"

    def _check_replays(self, plan: StepPlan) -> list[bool]:
        """Which rows compute output tokens: one each, and no other row goes past its prompt."""
        prompts = {row: one.num_prompt_tokens for row, one in self._rows.items()}
        prompts |= {branch.row: prompts[branch.source] for branch in plan.branches}
        prompts |= {new_row.row: new_row.num_prompt_tokens for new_row in plan.new_rows}
        is_output = []
        for row, start, num_tokens in zip(plan.rows, plan.starts, plan.num_tokens, strict=True):
            is_output.append(start >= prompts[row])
            assert num_tokens == 1 if is_output[-1] else start + num_tokens <= prompts[row], (
                "an output token is computed beside another one of its row"
            )
        return is_output

    def _branch(self, plan: StepPlan) -> None:
        """Let rows go on from others as these were before the plan."""
        before = self._rows.copy()
        for branch in plan.branches:
            source = before[branch.source]
            assert branch.num_blocks <= len(source.block_ids), "a branch takes over blocks that do not exist"
            self._rows[branch.row] = replace(
                source,
                token_ids=[*source.token_ids[: branch.num_tokens], branch.token_id],
                digests=source.digests[: branch.num_tokens],
                block_ids=source.block_ids[: branch.num_blocks],
            )

    def _copy_tail(self, copy: TailCopy) -> None:
        for touched in self._touched:
            assert copy.target not in touched, f"block {copy.target} is copied into while a step touches it"
        for i in range(self._config.block_size):
            self._kv.pop((copy.target, i), None)
            if (copy.source, i) in self._kv:
                self._kv[copy.target, i] = self._kv[copy.source, i]

    def _fork(self, plan: StepPlan) -> list[ScriptedRow]:
        """Rows that sample beside others, with the blocks that they share."""
        rows = []
        samples = {row for row, is_last in zip(plan.rows, plan.samples, strict=True) if is_last}
        for fork in plan.forks:
            assert fork.source in samples, "a row forks from one that does not sample"
            row, source = self._rows[fork.row], self._rows[fork.source]
            assert row.token_ids == source.token_ids, "a row forks from one with other tokens"
            assert fork.block_ids == source.block_ids[: len(fork.block_ids)], "a fork has other blocks"
            row.block_ids = list(fork.block_ids)
            rows.append(row)
        return rows

    def _begin(self, new_row: NewRow) -> ScriptedRow:
        max_len = min(
            new_row.num_prompt_tokens + new_row.params.max_tokens, most_known(new_row.params, self._config)
        )
        return ScriptedRow(new_row.params, list(new_row.token_ids), new_row.num_prompt_tokens, max_len)

    def _append_blocks(self, row: ScriptedRow, new_block_ids: list[int], start: int) -> None:
        """Grow a block table; what it will write must not be in use by another row's step in flight."""
        first_written = start // self._config.block_size
        for index, block_id in enumerate(new_block_ids, start=len(row.block_ids)):
            assert 0 <= block_id < self._config.num_blocks, f"block {block_id} does not exist"
            for touched in self._touched if index >= first_written else ():
                others = touched.get(block_id, set()) - {id(row)}
                assert not others, f"block {block_id} is handed out while a launched step touches it"
        row.block_ids.extend(new_block_ids)

    def _write(self, plan: StepPlan, scheduled: list[ScriptedRow]) -> None:
        written: set[Slot] = set()
        for row, start, num_tokens in zip(scheduled, plan.starts, plan.num_tokens, strict=True):
            assert start + num_tokens <= len(row.token_ids), "a token is computed before it is known"
            for position in range(start, start + num_tokens):
                slot = self._slot(row, position)
                assert slot not in written, f"slot {slot} is written twice in one step"
                written.add(slot)
                self._kv[slot] = (position, row.digest_at(position))

    def _read(self, plan: StepPlan, scheduled: list[ScriptedRow]) -> None:
        for row, start, num_tokens in zip(scheduled, plan.starts, plan.num_tokens, strict=True):
            for position in range(start + num_tokens):
                slot = self._slot(row, position)
                wanted = (position, row.digest_at(position))
                assert self._kv.get(slot) == wanted, (
                    f"slot {slot} does not hold position {position} of its row"
                )

    def _sample(self, plan: StepPlan, scheduled: list[ScriptedRow], sampling: list[ScriptedRow]) -> list[int]:
        masks = {mask.place: mask.allowed for mask in plan.masks}
        assert masks.keys().isdisjoint(plan.deferred), "a row has a mask and waits for one"
        for index, row in enumerate(scheduled):
            end = plan.starts[index] + plan.num_tokens[index]
            assert plan.samples[index] == (end == len(row.token_ids)), "a row samples before its last token"
        token_ids: list[int] = []
        for place, row in enumerate(sampling):
            assert len(row.token_ids) < row.max_len, "a token is sampled that its request has no room for"
            token_ids.append(-1 if place in plan.deferred else self._sample_row(row, masks.get(place)))
        return token_ids

    def _logprobs_of(self, row: ScriptedRow) -> TokenLogprobs | None:
        """What the row may go on with, if it asks for that."""
        count, end = row.params.num_logprobs, len(row.token_ids)
        if count is None:
            return None
        likely = likeliest(row.digest_at(end - 1), end, max(count, 1), self._vocab_size)
        told = likely[:count]
        return TokenLogprobs(likely[0][1], [token_id for token_id, _ in told], [one for _, one in told])

    def choose(self, row: ScriptedRow, allowed: bytes | None) -> int:
        """The next token of a row, one that the mask allows."""
        end = len(row.token_ids)
        token_id = next_token(row.digest_at(end - 1), row.params, end, self._vocab_size)
        return nearest_allowed(token_id, allowed, self._vocab_size)

    def _sample_row(self, row: ScriptedRow, allowed: bytes | None) -> int:
        token_id = self.choose(row, allowed)
        row.token_ids.append(token_id)
        return token_id

    def _sample_late(self, late_masks: LateMasks) -> None:
        assert self._pending, "masks come that no row waits for"
        pending = self._pending.popleft()
        assert pending.result.step_id == late_masks.step_id, "masks come for another step than the oldest"
        masks = {mask.place: mask.allowed for mask in late_masks.masks}
        assert masks.keys() <= pending.rows.keys(), "a mask comes for a row that does not wait"
        for place, row in pending.rows.items():
            pending.result.token_ids[place] = self._sample_row(row, masks.get(place))

    def _slot(self, row: ScriptedRow, position: int) -> Slot:
        index, offset = divmod(position, self._config.block_size)
        assert index < len(row.block_ids), f"position {position} has no block"
        return row.block_ids[index], offset


def _extend(digest: int, value: int) -> int:
    return ((digest ^ (value + 1)) * _FACTOR + (digest >> 29)) & _MASK
