"""One rank on CUDA: decode steps replay graphs, all others are launched kernel by kernel; nothing waits in between."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kernels.chunk_attention import can_attend
from kernels.draw import DrawShare, draw
from kernels.prefill_attention_hopper import can_attend_with
from workers.checkpoint.generic_config import ARCHITECTURE as TRANSFORMERS
from workers.engine.errors import UserError
from workers.engine.plan import LateMasks, NewRow, StepPlan, StepResult, TokenMask
from workers.engine.request import ChoiceParams
from workers.model.block_copies import BlockCopies, HostBlocks, allocate_host
from workers.model.chunk_work import SLOW_PROMPTS, ChunkCut, chunk_cut
from workers.model.cuda_block_copies import CudaBlockCopies
from workers.model.cuda_step import LaunchedStep
from workers.model.decode_buffers import MAX_LAUNCHED, DecodeBuffers
from workers.model.decode_forward import DecodeForward
from workers.model.decode_graphs import DecodeGraphs, graph_sizes
from workers.model.deferred_rows import DeferredRows, draw_masked
from workers.model.largest_steps import largest_steps
from workers.model.llama import LlamaDecoder
from workers.model.memory_account import MemoryAccount, used_bytes
from workers.model.pooler import PooledRows
from workers.model.prefill_graphs import PrefillGraphs
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig
from workers.model.row_sampler import SampledLogprobs

_log = logging.getLogger(__name__)
_NO_BLOCK = -1
_SPARE_PIECES = [1 << 20] * 16 + [32 << 20] * 8
"""Bytes that are kept for what the largest steps do not foresee: small pieces are kept apart from large ones."""
_MEASURED_BLOCKS = 4
"""Of the cache over which memory is measured: it need only be there."""


class CudaRank(Rank):
    """An ``Executor`` over one CUDA device, of models with native layers: graphs are made of nothing else."""

    _decoder: LlamaDecoder

    def __init__(self, config: RankConfig) -> None:
        """See ``Rank``."""
        super().__init__(replace(config, device=_with_index(config.device, config.tp_rank)))
        self._queue: deque[LaunchedStep] = deque()
        self._graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None

    @torch.inference_mode()
    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """See ``Rank``; the memory of decode steps is taken as well."""
        self._graphs = self._prefill_graphs = None  # they name memory that is given back now
        super().allocate(num_blocks, num_host_blocks)
        config, model = self.config, self.model_config
        self._buffers = DecodeBuffers(
            self._batch,
            model.hidden_size,
            len(self._decoder.vocab.own),
            len(self._decoder.shard.q_heads),
            len(self._decoder.shard.kv_heads),
            model.head_dim,
            self.dtype,
            self._draw_share(),
        )
        self._chunk_cut = self._make_chunk_cut()
        self._is_plain = [True] * config.max_num_seqs

    def warm_up(self) -> None:
        """Compile kernels and record graphs. All ranks of a group must do it together."""
        self._capture()
        self._run_largest_steps()

    @torch.inference_mode()
    def _capture(self) -> None:
        """Record the graphs, and compile what runs outside of them."""
        assert self._kv_cache is not None, "memory is allocated before warm-up"
        if not self.config.enforce_eager and not self.config.is_deterministic:
            self._graphs = DecodeGraphs(
                DecodeForward(self._decoder, self._kv_cache, self._buffers.logits),
                self._buffers,
                self._batch,
                self._decoder.embedding,
                self._decoder.vocab.own.start,
                graph_sizes(self.config.max_num_seqs),
            )
            self._graphs.capture()
            self._prefill_graphs = PrefillGraphs(
                self._decoder,
                self._kv_cache,
                self._batch,
                self._buffers.attention(is_shared=False),
                self._chunk_cut,
            )
            self._prefill_graphs.capture(self.config.max_num_batched_tokens)
        self._warm_up_prefill()
        torch.cuda.synchronize()

    def _cuda_kv_bytes(self) -> int:
        if self.config.tp_size > 1:
            return super()._cuda_kv_bytes()  # steps of a group are in step from the start, and that is later
        account = self._measure_memory()
        _log.info("device memory: %s", account)
        return account.kv_bytes(self.config.gpu_memory_utilization)

    def _measure_memory(self) -> MemoryAccount:
        """Do all that serving will do over a cache of a few blocks, see what that takes, and give it back.

        Raises:
            UserError: not even that fits the device.
        """
        device = self.device
        torch.cuda.empty_cache()
        loaded, weights = used_bytes(device), torch.cuda.memory_allocated(device)
        try:
            self.allocate(_MEASURED_BLOCKS)
            self._capture()
            captured = used_bytes(device)
            self._run_largest_steps()
            stepped = used_bytes(device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"the device has no memory for steps of {self.config.max_num_batched_tokens} tokens and "
                f"{self.config.max_num_seqs} requests: lower max_num_batched_tokens or max_num_seqs",
                "max_num_batched_tokens",
            ) from error
        self._give_back()
        return MemoryAccount(
            total=torch.cuda.mem_get_info(device)[1],
            weights=weights,
            other=loaded - weights,
            graphs=captured - loaded - _MEASURED_BLOCKS * self._layout.block_bytes,
            steps=stepped - captured,
        )

    def _give_back(self) -> None:
        """Let go of what ``allocate`` and ``warm_up`` have taken."""
        self._graphs = self._prefill_graphs = None
        self._kv_cache = self._copies = None
        del self._buffers, self._batch, self._sampler, self._pooler, self._scorer
        gc.collect()
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """See ``Executor``."""
        assert len(self._queue) < MAX_LAUNCHED, "each launched step has pinned memory of its own"
        if plan.late_masks is not None:
            self._sample_late(plan.late_masks)
        self._queue.append(self._run_step(plan))
        if self._copies is not None:
            self._copies.queue(plan)

    def collect(self) -> StepResult:
        """See ``Executor``."""
        assert self._queue, "collect follows launch"
        step = self._queue.popleft()
        step.done.synchronize()
        return step.result(self._report_copies(step.plan, has_later=bool(self._queue)))

    def ready(self) -> bool:
        """See ``Executor``."""
        if not self._queue:
            return False
        oldest = self._queue[0]
        awaits_copies = oldest.plan.awaits_copies and len(self._queue) == 1
        if awaits_copies and self._copies is not None and not self._copies.is_idle():
            return False
        return (oldest.deferred is None or oldest.deferred.token_ids is not None) and oldest.done.query()

    def close(self) -> None:
        """See ``Executor``."""
        self._queue.clear()
        # NCCL lets no communicator go while a graph holds one of its sums: it would wait for ever.
        self._graphs = self._prefill_graphs = None
        super().close()

    def _make_chunk_cut(self) -> ChunkCut | None:
        assert self._kv_cache is not None, "its type counts"
        shard = self._decoder.shard
        num_heads, num_kv_heads = len(shard.q_heads), len(shard.kv_heads)
        group, head_dim = num_heads // num_kv_heads, self.model_config.head_dim
        if not can_attend(self.dtype, self._kv_cache.dtype, head_dim, group):
            return None
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        is_fast = can_attend_with(self.device, self.dtype, self._kv_cache)
        return chunk_cut(num_heads, num_kv_heads, processors, 1.0 if is_fast else SLOW_PROMPTS)

    def _draw_share(self) -> DrawShare | None:
        """What the draw must know of the other ranks' columns, where they have some."""
        vocab = self._decoder.vocab
        if len(vocab.own) == vocab.size:
            return None
        assert self._group is not None, "weights are loaded before memory is taken"
        candidates = torch.zeros(self.config.max_num_seqs, 2, dtype=torch.float64, device=self.device)
        return DrawShare(vocab.own.start, candidates, self._group.gather)

    def _make_copies(self, kv_cache: Tensor, num_host_blocks: int) -> BlockCopies | CudaBlockCopies:
        host = HostBlocks(allocate_host(num_host_blocks, kv_cache), self.config.kv_checksum)
        return CudaBlockCopies(kv_cache, host, agree=self._agree())

    def _run_step(self, plan: StepPlan) -> LaunchedStep:
        if self._copies is not None:
            self._copies.begin(plan)
        started = torch.cuda.Event(enable_timing=True)
        started.record()
        if not plan.rows:  # it was there for its masks or copies alone
            return self._finish(plan, started, [], [], self._buffers.logits)
        self._share(plan)
        for new in plan.new_rows:
            self._is_plain[new.row] = is_plain(new.params, self._buffers.share is None)
        self._sampler.enter(plan.new_rows)
        self._pooler.enter(plan.new_rows)
        self._scorer.enter(plan.new_rows)
        self._buffers.enter(plan.new_rows)
        is_decode = (
            self._graphs is not None
            and all(plan.samples)
            and not plan.forks
            and max(plan.num_tokens) == 1
            and not self._pooler.wants(plan)
            and not self._scorer.wants(plan)
        )
        run = self._run_decode if is_decode else self._run_mixed
        return run(plan, started)

    def _share(self, plan: StepPlan) -> None:
        """See ``Rank``."""
        super()._share(plan)
        if plan.branches:
            self._buffers.branch(plan.branches)
            before = self._is_plain.copy()
            for one in plan.branches:
                self._is_plain[one.row] = before[one.source]

    def _run_decode(self, plan: StepPlan, started: torch.cuda.Event) -> LaunchedStep:
        assert self._graphs is not None, "graphs are captured before the first decode"
        new_blocks = self._batch.grow(plan)
        if new_blocks is None:
            self._batch.apply(plan)
            new_blocks = [_NO_BLOCK] * len(plan.rows)
        is_shared = self._buffers.tell(plan.rows, plan.starts, new_blocks, len(plan.rows))
        logits = self._graphs.run(len(plan.rows), is_shared)
        return self._finish(plan, started, plan.rows, plan.starts, logits)

    def _run_mixed(self, plan: StepPlan, started: torch.cuda.Event) -> LaunchedStep:
        assert self._kv_cache is not None, "memory is allocated before the first step"
        self._batch.apply(plan)
        sampled = plan.sampled_positions
        rows = [row for row, _ in sampled]
        last_positions = [position - 1 for _, position in sampled]
        no_blocks = [_NO_BLOCK] * len(rows)
        if self.config.is_deterministic:
            # The tables say all: how work is cut depends on the whole batch.
            is_shared, work = self._buffers.tell(rows, last_positions, no_blocks, 0), None
            arrays = self._batch.arrays(plan, self._num_output_rows(plan), has_work=False, has_tiles=True)
        else:
            num_decodes = next((i for i, count in enumerate(plan.num_tokens) if count > 1), len(plan.rows))
            # A lone last token of a long prompt's chunk need not be sampled: then the tables do.
            is_cut = all(plan.samples[:num_decodes])
            is_shared = self._buffers.tell(rows, last_positions, no_blocks, num_decodes if is_cut else 0)
            work = self._buffers.attention(is_shared) if is_cut else None
            # Without graphs nothing has compiled its kernels.
            few = self._chunk_cut if is_cut and self._prefill_graphs is not None else None
            arrays = self._batch.arrays(plan, None, has_work=is_cut, has_tiles=is_cut, chunk_cut=few)
        graphs = self._prefill_graphs
        if graphs is not None and work is not None and not is_shared and graphs.fits(arrays):
            attended, residual, sample_tokens = graphs.run(arrays)
        else:
            inputs = self._batch.upload(arrays, decode_work=work)
            attended, residual = self._decoder.attend_all(inputs, self._kv_cache)
            sample_tokens = inputs.sample_tokens
        pooled = self._pool(plan, attended, residual)
        scored = self._score(plan, attended, residual)
        logits = self._decoder.logits(attended, residual, sample_tokens)
        if rows:
            buffers, columns = self._buffers, self._buffers.columns
            draw(
                logits,
                buffers.params,
                columns.num_rows,
                columns.rows,
                columns.starts,
                self._batch.token_ids,
                buffers.drawn,
                buffers.scratch,
                buffers.share,
            )
        return replace(self._finish(plan, started, rows, last_positions, logits, pooled), scored=scored)

    def _num_output_rows(self, plan: StepPlan) -> int:
        """Rows, the first ones, that compute a token of their output."""
        scheduled = zip(plan.rows, plan.starts, strict=True)
        is_output = [start >= self._sampler.num_prompt_tokens(row) for row, start in scheduled]
        return sum(is_output)

    def _finish(
        self,
        plan: StepPlan,
        started: torch.cuda.Event,
        rows: list[int],
        last_positions: list[int],
        logits: Tensor,
        pooled: PooledRows | None = None,
    ) -> LaunchedStep:
        """Sample what the draw does not, start the copies to the host."""
        masks = {mask.place: mask.allowed for mask in plan.masks}
        others = {place for place, row in enumerate(rows) if not self._is_plain[row]} | masks.keys()
        places = sorted(others.difference(plan.deferred))
        logprobs = self._sample_others(rows, last_positions, logits, places, masks) if places else None
        deferred = self._defer(rows, last_positions, logits, plan.deferred) if plan.deferred else None
        if logprobs is not None:
            logprobs = logprobs.moved(_copy_to_host)
        token_ids = self._buffers.fetch(len(rows))
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return LaunchedStep(plan, started, done, token_ids, logprobs, places, pooled, deferred)

    def _defer(
        self, rows: list[int], last_positions: list[int], logits: Tensor, places: list[int]
    ) -> DeferredRows:
        """Keep what is needed to sample these rows later; what the draw took for them is overwritten then."""
        sampled = [self._sampler.sampled_row(rows[p], last_positions[p] + 1) for p in places]
        index = torch.tensor(places).pin_memory().to(self.device, non_blocking=True)
        are_plain = all(self._is_plain[rows[p]] for p in places)
        return DeferredRows(places, sampled, logits[index], are_plain)

    def _sample_late(self, late_masks: LateMasks) -> None:
        """Sample the deferred rows of an earlier step, before a step that reads their tokens."""
        step = next(step for step in self._queue if step.plan.step_id == late_masks.step_id)
        late = step.deferred
        assert late is not None, "masks come for rows that do not wait"
        index = {place: i for i, place in enumerate(late.places)}
        allowed = {index[mask.place]: mask.allowed for mask in late_masks.masks}
        if late.are_plain:
            drawn = draw_masked(late, allowed, self._buffers, self._batch, self._decoder.vocab)
            late.token_ids = _copy_to_host(drawn)
            step.done.record()
            return
        token_ids, logprobs = self._sampler.sample(late.logits, late.rows, allowed)
        self._batch.store([row.row for row in late.rows], [row.position for row in late.rows], token_ids)
        if logprobs is not None:
            late.logprobs = logprobs.moved(_copy_to_host)
        late.token_ids = _copy_to_host(token_ids)
        step.done.record()

    def _sample_others(
        self,
        rows: list[int],
        last_positions: list[int],
        logits: Tensor,
        places: list[int],
        masks: Mapping[int, bytes],
    ) -> SampledLogprobs | None:
        """Sample rows that ask for more than the draw does, over what it drew."""
        sampled = [self._sampler.sampled_row(rows[p], last_positions[p] + 1) for p in places]
        index = torch.tensor(places).pin_memory().to(self.device, non_blocking=True)
        allowed = {i: masks[place] for i, place in enumerate(places) if place in masks}
        token_ids, logprobs = self._sampler.sample(logits[index], sampled, allowed)
        self._batch.store([row.row for row in sampled], [row.position for row in sampled], token_ids)
        self._buffers.drawn[index] = token_ids.to(torch.int32)
        return logprobs

    def _run_largest_steps(self) -> None:
        """Take the memory that the largest steps need, so that none is taken from CUDA later."""
        config = self.config
        for plans in largest_steps(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            config.block_size,
            self.model_config.vocab_size,
        ):
            for plan in plans:
                self.launch(plan)
            # As in serving, results of one step are on their way while the next is launched.
            while len(self._queue) > 2:
                self.collect()
        while self._queue:
            self.collect()
        # Requests of other sizes leave gaps of other sizes.
        spare = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in _SPARE_PIECES]
        del spare

    def _warm_up_prefill(self) -> None:
        """Compile the kernels of prefill and mixed steps; leaves no trace, since blocks are written before read."""
        assert self._kv_cache is not None, "memory is allocated before warm-up"
        size = self.config.block_size
        num_tokens = min(2 * size, self.max_model_len - 2)
        table = list(range(1, 2 + -(-(num_tokens + 2) // size)))
        table = [min(block, self._kv_cache.shape[0] - 1) for block in table]
        params = ChoiceParams(max_tokens=2, temperature=1.0)
        row = NewRow(0, [0] * num_tokens, num_tokens, params)
        self.launch(StepPlan(0, [row], [0], [0], [num_tokens], [True], [table]))
        self.launch(StepPlan(1, [], [0], [num_tokens], [1], [True], [[]], deferred=[0]))
        masks = LateMasks(1, [TokenMask(0, b"\xff" * -(-self.model_config.vocab_size // 8))])
        if self.config.max_num_seqs > 1:
            other = NewRow(1, [0] * num_tokens, num_tokens, params)
            rows, starts, counts = [0, 1], [num_tokens, 0], [1, num_tokens]
            tables = [[], table]
            self.launch(StepPlan(2, [other], rows, starts, counts, [True, True], tables, late_masks=masks))
        else:
            self.launch(StepPlan(2, [], [], [], [], [], [], late_masks=masks))
        while self._queue:
            self.collect()


def is_plain(params: ChoiceParams, has_all_tokens: bool) -> bool:
    """True if ``kernels.draw`` alone samples it: no penalty, bias, forbidden token or log-probability.

    Filters need a rank that has the logits of all tokens.
    """
    has_filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return (
        (has_all_tokens or not has_filters)
        and not params.has_penalties
        and not params.logit_bias
        and params.num_logprobs is None
        and params.min_tokens == 0
        and not params.allowed_token_ids
        and not params.bad_words
    )


def make_rank(config: RankConfig) -> Rank:
    """Return the rank for the config's device and the model's layers."""
    if not config.device.startswith("cuda"):
        return Rank(config)
    rank = Rank(replace(config, device=_with_index(config.device, config.tp_rank)))
    return rank if rank.model_config.architecture == TRANSFORMERS else CudaRank(config)


def _with_index(device: str, tp_rank: int) -> str:
    """torch wants the number of "cuda": ranks that see several devices take one each."""
    return device if ":" in device else f"{device}:{tp_rank % max(torch.cuda.device_count(), 1)}"


def _copy_to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
