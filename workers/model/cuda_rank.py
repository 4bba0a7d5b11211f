"""One rank on CUDA: decode steps replay graphs, all others are launched kernel by kernel; nothing waits in between."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.engine.plan import NewRow, StepPlan, StepResult, TokenLogprobs
from workers.engine.request import ChoiceParams
from workers.model.decode_buffers import MAX_LAUNCHED, DecodeBuffers, is_plain
from workers.model.decode_forward import DecodeForward
from workers.model.decode_graphs import DecodeGraphs, graph_sizes
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig
from workers.model.row_sampler import SampledLogprobs

_NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose results are on their way to the host."""

    plan: StepPlan
    started: torch.cuda.Event
    done: torch.cuda.Event
    token_ids: Tensor
    logprobs: SampledLogprobs | None
    logprob_places: list[int]
    """Which of the sampled rows ``logprobs`` speaks of."""


class CudaRank(Rank):
    """An ``Executor`` over one CUDA device."""

    def __init__(self, config: RankConfig) -> None:
        """See ``Rank``."""
        super().__init__(replace(config, device=_with_index(config.device)))
        self._queue: deque[_Launched] = deque()
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        """See ``Rank``; the memory of decode steps is taken as well."""
        super().allocate(num_blocks)
        config, model = self.config, self.model_config
        self._buffers = DecodeBuffers(
            config.max_num_seqs,
            model.hidden_size,
            model.vocab_size,
            len(self._decoder.shard.q_heads),
            len(self._decoder.shard.kv_heads),
            model.head_dim,
            self.dtype,
            self.device,
        )
        self._is_plain = [True] * config.max_num_seqs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile kernels and record graphs. All ranks of a group must do it together."""
        assert self._kv_cache is not None, "memory is allocated before warm-up"
        forward = DecodeForward(self._decoder, self._kv_cache, self._batch.block_tables)
        graphs = DecodeGraphs(
            forward,
            self._buffers,
            self._batch,
            self._decoder._embedding,
            graph_sizes(self.config.max_num_seqs),
        )
        if self.config.tp_size == 1:
            graphs.capture()
            self._graphs = graphs
        self._warm_up_prefill()
        torch.cuda.synchronize()

    def launch(self, plan: StepPlan) -> None:
        """See ``Executor``."""
        assert len(self._queue) < MAX_LAUNCHED, "each launched step has pinned memory of its own"
        self._queue.append(self._run_step(plan))

    def collect(self) -> StepResult:
        """See ``Executor``."""
        assert self._queue, "collect follows launch"
        step = self._queue.popleft()
        step.done.synchronize()
        logprobs: list[TokenLogprobs | None] | None = None
        if step.logprobs is not None:
            logprobs = [None] * len(step.token_ids)
            for place, one in zip(step.logprob_places, step.logprobs.by_row(), strict=True):
                logprobs[place] = one
        elapsed_s = step.started.elapsed_time(step.done) / 1e3
        return StepResult(step.plan.step_id, step.token_ids.tolist(), logprobs, elapsed_s)

    def ready(self) -> bool:
        """See ``Executor``."""
        return bool(self._queue) and self._queue[0].done.query()

    def close(self) -> None:
        """See ``Executor``."""
        self._queue.clear()
        super().close()

    @torch.inference_mode()
    def _run_step(self, plan: StepPlan) -> _Launched:
        started = torch.cuda.Event(enable_timing=True)
        started.record()
        for new in plan.new_rows:
            self._is_plain[new.row] = is_plain(new.params)
        self._sampler.enter(plan.new_rows)
        self._buffers.enter(plan.new_rows)
        is_decode = self._graphs is not None and all(plan.samples) and max(plan.num_tokens) == 1
        run = self._run_decode if is_decode else self._run_mixed
        return run(plan, started)

    def _run_decode(self, plan: StepPlan, started: torch.cuda.Event) -> _Launched:
        assert self._graphs is not None, "graphs are captured before the first decode"
        new_blocks = None if plan.new_rows else self._new_blocks(plan)
        if new_blocks is None:
            self._batch.apply(plan)
            new_blocks = [_NO_BLOCK] * len(plan.rows)
        self._buffers.tell(plan.rows, plan.starts, new_blocks)
        logits = self._graphs.run(len(plan.rows))
        others = [place for place, row in enumerate(plan.rows) if not self._is_plain[row]]
        logprobs = self._sample_others(plan, logits, others) if others else None
        return self._finish(plan, started, len(plan.rows), logprobs, others)

    def _new_blocks(self, plan: StepPlan) -> list[int] | None:
        """Each row's new block, -1 where it has none; None if a row has more than the one its token begins."""
        num_blocks, size = self._batch._num_blocks, self.config.block_size
        new_blocks = [_NO_BLOCK] * len(plan.rows)
        for index, (row, ids) in enumerate(zip(plan.rows, plan.new_block_ids, strict=True)):
            if ids:
                if len(ids) > 1 or plan.starts[index] // size != num_blocks[row]:
                    return None
                new_blocks[index] = ids[0]
        for row, ids in zip(plan.rows, plan.new_block_ids, strict=True):
            num_blocks[row] += len(ids)
        return new_blocks

    def _sample_others(self, plan: StepPlan, logits: Tensor, places: list[int]) -> SampledLogprobs | None:
        """Sample rows that ask for more than the graph does, over what it drew."""
        rows = [self._sampler.sampled_row(plan.rows[p], plan.starts[p] + 1) for p in places]
        index = torch.tensor(places).pin_memory().to(self.device, non_blocking=True)
        token_ids, logprobs = self._sampler.sample(logits[index].float(), rows)
        self._batch.store([row.row for row in rows], [row.position for row in rows], token_ids)
        self._buffers.drawn[index] = token_ids.to(torch.int32)
        return logprobs

    def _run_mixed(self, plan: StepPlan, started: torch.cuda.Event) -> _Launched:
        assert self._kv_cache is not None, "memory is allocated before the first step"
        self._batch.apply(plan)
        logits = self._decoder.forward(self._batch.inputs(plan), self._kv_cache)
        scheduled = zip(plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True)
        rows = [
            self._sampler.sampled_row(row, start + count) for row, start, count, last in scheduled if last
        ]
        logprobs = None
        if rows:
            token_ids, logprobs = self._sampler.sample(logits, rows)
            self._group.broadcast(token_ids)
            self._batch.store([row.row for row in rows], [row.position for row in rows], token_ids)
            self._buffers.drawn[: len(rows)] = token_ids.to(torch.int32)
        return self._finish(plan, started, len(rows), logprobs, list(range(len(rows))))

    def _finish(
        self,
        plan: StepPlan,
        started: torch.cuda.Event,
        num_sampled: int,
        logprobs: SampledLogprobs | None,
        places: list[int],
    ) -> _Launched:
        """Start the copies to the host and mark their end."""
        if logprobs is not None:
            tensors = (logprobs.sampled, logprobs.top_token_ids, logprobs.top_logprobs)
            logprobs = SampledLogprobs(logprobs.num_top, *(_copy_to_host(tensor) for tensor in tensors))
        token_ids = self._buffers.fetch(num_sampled)
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return _Launched(plan, started, done, token_ids, logprobs, places)

    def _warm_up_prefill(self) -> None:
        """Compile the kernels of prefill and mixed steps; leaves no trace, since blocks are written before read."""
        size = self.config.block_size
        num_tokens = min(2 * size, self.max_model_len - 2)
        table = list(range(1, 2 + -(-(num_tokens + 2) // size)))
        table = [min(block, self._kv_cache.shape[0] - 1) for block in table]
        params = ChoiceParams(max_tokens=2, temperature=1.0)
        row = NewRow(0, [0] * num_tokens, num_tokens, params)
        self.launch(StepPlan(0, [row], [0], [0], [num_tokens], [True], [table]))
        self.launch(StepPlan(1, [], [0], [num_tokens], [1], [True], [[]]))
        if self.config.max_num_seqs > 1:
            other = NewRow(1, [0] * num_tokens, num_tokens, params)
            plan = StepPlan(2, [other], [0, 1], [num_tokens, 0], [1, num_tokens], [True, True], [[], table])
            self.launch(plan)
        while self._queue:
            self.collect()


def _with_index(device: str) -> str:
    """ "cuda" is the current one: torch wants its number."""
    return device if ":" in device else f"{device}:{torch.cuda.current_device()}"


def _copy_to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
