"""One rank: loads its part of a model, then runs plans in the order given.

The work itself is done in ``collect``: with a second plan launched ahead, the first one's result need not wait for
both. On CUDA that serves models with transformers' layers; ``cuda_rank`` does better.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.block_copy import copy_blocks
from kernels.paged_decode_attention import SPLIT_TOKENS
from workers.checkpoint.generic_config import ARCHITECTURE as TRANSFORMERS
from workers.checkpoint.model_config import ModelConfig, read_model_config
from workers.checkpoint.quantization import choose_quantization
from workers.engine.errors import UserError
from workers.engine.plan import LateMasks, NewRow, StepPlan, StepResult
from workers.engine.request import ChoiceParams
from workers.model.batch import Batch
from workers.model.block_copies import Agree, BlockCopies, CopyReport, HostBlocks, allocate_host
from workers.model.cuda_block_copies import CudaBlockCopies
from workers.model.decoder import Decoder
from workers.model.determinism import check_deterministic
from workers.model.device import choose_dtype, choose_kv_dtype, read_cpu_flags
from workers.model.host_memory import check_host_memory
from workers.model.kv_pool import cuda_bytes, default_cpu_bytes
from workers.model.llama import LlamaDecoder, is_computed_in_parts
from workers.model.pooler import PooledRows, Pooler
from workers.model.prompt_scorer import PromptScorer, ScoredPrompts
from workers.model.rank_config import COPY_SHARE, BlockCounts, RankConfig
from workers.model.row_sampler import RowSampler, SampledLogprobs
from workers.model.tensor_parallel import TensorParallelGroup
from workers.model.tensor_source import open_source
from workers.model.transformers_decoder import TransformersDecoder

_PADDED_ROWS = 4
"""Rows to which a smaller step is padded on a CPU if that is faster: oneDNN's product of 4 rows can beat that of 1."""
_TAIL_COPY_PROGRAMS = 132
"""One a multiprocessor of an H200: the step waits for these copies."""
_PADDING_TRIALS = 5
"""Passes of which the fastest counts: others may use the machine meanwhile."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose results are on their way to the host."""

    plan: StepPlan
    started_s: float
    token_ids: Tensor
    logprobs: SampledLogprobs | None
    pooled: PooledRows | None
    scored: ScoredPrompts | None


class Rank:
    """An ``Executor`` over one device. Call ``load``, ``allocate`` and ``warm_up`` before the first ``launch``."""

    def __init__(self, config: RankConfig) -> None:
        """Check ``config`` and read the model's own; nothing big is loaded yet.

        Raises:
            UserError: a model, dtype or length that cannot be served.
        """
        self.config = config
        if config.model_config is not None:
            self.model_config: ModelConfig = config.model_config
        elif config.files is not None:
            self.model_config = read_model_config(config.files, config.model_impl)
        else:
            raise UserError("a rank needs model files or a model config", "model")
        self._quantization = choose_quantization(self.model_config.quantization, config.quantization)
        self.device = torch.device(config.device)
        self.dtype = choose_dtype(config.dtype, self.model_config.dtype, self.device, read_cpu_flags())
        self.kv_dtype = choose_kv_dtype(config.kv_cache_dtype, self.dtype, self.device)
        longest = self.model_config.max_position_embeddings
        self.max_model_len = config.max_model_len or longest
        if self.max_model_len > longest:
            raise UserError(
                f"max_model_len is {self.max_model_len}, this model takes at most {longest}", "max_model_len"
            )
        if config.is_deterministic:
            check_deterministic(self.model_config, self.device, self.dtype, self.kv_dtype, config.tp_size)
        self._launched: deque[StepPlan] = deque()
        self._kv_cache: Tensor | None = None
        self._min_num_tokens = 1
        self._group: TensorParallelGroup | None = None
        self._copies: BlockCopies | CudaBlockCopies | None = None

    @torch.inference_mode()
    def load(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Meet the other ranks and load this rank's weights; ``progress`` gets shares from 0 to 1."""
        config = self.config
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._group = TensorParallelGroup(config.tp_rank, config.tp_size, config.rendezvous, self.device)
        self._group.prepare(
            self.model_config.hidden_size,
            self.dtype,
            config.max_num_batched_tokens if is_computed_in_parts(self.model_config) else 0,
            config.is_deterministic,
        )
        self._decoder = self._load_decoder(self._group, progress)
        if config.pack_weights:
            how = self._quantization
            self._decoder.pack(is_narrow=how is not None and (how.is_online or how.is_narrow))
        self._layout = self._decoder.kv_layout(config.block_size, self.kv_dtype)

    def _load_decoder(self, group: TensorParallelGroup, progress: Callable[[float], None]) -> Decoder:
        config, model = self.config, self.model_config
        if model.architecture == TRANSFORMERS:
            if config.files is None:
                raise UserError("a model with transformers' layers needs a folder", "model")
            is_dummy = config.load_format == "dummy"
            return TransformersDecoder(
                model,
                group,
                config.files.path,
                is_dummy,
                self._quantization,
                self.device,
                self.dtype,
                config.seed,
                self.max_model_len,
                progress,
            )
        source = open_source(
            config.files, config.load_format, model, self._quantization, config.seed, self.device
        )
        decoder = LlamaDecoder(
            model,
            group,
            source,
            self._quantization,
            self.device,
            self.dtype,
            self.max_model_len,
            progress,
            config.is_deterministic,
        )
        if self.device.type == "cuda" and not config.is_deterministic:
            decoder.keep_copies(torch.cuda.get_device_properties(self.device).total_memory // COPY_SHARE)
        return decoder

    def block_counts(self) -> BlockCounts:
        """What this rank takes of its memory, device and host: what was asked for, else what fits.

        Raises:
            UserError: more was asked for than fits, or not even one request of ``max_model_len`` does.
        """
        config, block_bytes = self.config, self._layout.block_bytes
        wanted, is_cpu = config.num_blocks, self.device.type == "cpu"
        # On a CPU a number of blocks is a size of the pool like any other.
        is_sized = is_cpu and config.kv_cache_bytes is None and wanted is not None
        num_blocks = wanted if is_sized and wanted is not None else self.max_num_blocks()
        if wanted is not None and wanted > num_blocks:
            raise UserError(
                f"num_gpu_blocks_override is {wanted:,}, this rank's memory holds {num_blocks:,} KV blocks of "
                f"{block_bytes / 2**20:.3g} MiB: lower it, or leave it out",
                "num_gpu_blocks_override",
            )
        check_host_memory((wanted or num_blocks) * block_bytes if is_cpu else 0, config.swap_space_bytes)
        return BlockCounts(wanted or num_blocks, config.swap_space_bytes // block_bytes, block_bytes)

    def max_num_blocks(self) -> int:
        """Return how many KV blocks this rank's memory holds; a group must take the least of its ranks'.

        Raises:
            UserError: not even one request of ``max_model_len`` fits.
        """
        config = self.config
        if config.kv_cache_bytes is not None:
            num_bytes = config.kv_cache_bytes
        elif self.device.type == "cuda":
            num_bytes = self._cuda_kv_bytes()
        else:
            num_bytes = default_cpu_bytes(self._layout, config.max_num_seqs, self.max_model_len)
        num_blocks = max(num_bytes, 0) // self._layout.block_bytes
        if num_blocks * config.block_size < self.max_model_len:
            raise UserError(self._ways_out(num_bytes, num_blocks * config.block_size), "max_model_len")
        return num_blocks

    def _cuda_kv_bytes(self) -> int:
        """KV memory that the utilization leaves, by the sizes of what the largest step holds."""
        return cuda_bytes(self.config.gpu_memory_utilization, self.device, self._step_peak_bytes())

    def _ways_out(self, num_bytes: int, num_tokens: int) -> str:
        """Say what KV memory of ``num_bytes``, too little for the longest request, could be changed to."""
        config = self.config
        needed = -(-self.max_model_len // config.block_size) * self._layout.block_bytes
        ways = [f"max_model_len {num_tokens}"] if num_tokens else []
        if config.kv_cache_bytes is not None or self.device.type == "cpu":
            ways.append(f"kv_cache_gib {needed / 2**30 + 0.005:.2f}")
        else:
            missing = (needed - num_bytes) / torch.cuda.get_device_properties(self.device).total_memory
            share = math.ceil((config.gpu_memory_utilization + missing) * 100) / 100
            ways.append(f"gpu_memory_utilization {share}" if share < 1 else "a device of more memory")
        return (
            f"KV memory holds {num_tokens} tokens, one request may need {self.max_model_len}: "
            f"{' or '.join(ways)} would do"
        )

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Take memory for blocks of both tiers and for the rows of the batch."""
        config = self.config
        self._kv_cache = self._layout.allocate(num_blocks, self.device)
        self._copies = self._make_copies(self._kv_cache, num_host_blocks) if num_host_blocks else None
        self._batch = Batch(config.max_num_seqs, self.max_model_len, config.block_size, self.device)
        self._pooler = Pooler()
        self._scorer = PromptScorer(self._decoder.vocab)
        self._sampler = RowSampler(
            config.max_num_seqs, self.model_config.eos_token_ids, self._batch, self._decoder.vocab
        )

    def warm_up(self) -> None:
        """Run steps of typical shapes, so that the first request finds kernels compiled and memory taken.

        All ranks of a group must do it together. Leaves no trace: block 0 is overwritten before it is read.
        """
        assert self._kv_cache is not None, "memory is allocated before warm-up"
        config = self.config
        is_alone = self.device.type == "cpu" and config.tp_size == 1
        if is_alone and config.pack_weights and not config.is_deterministic:
            self._min_num_tokens = self._choose_padding()
        num_tokens = min(self.config.block_size, self.max_model_len - 1)
        params = ChoiceParams(max_tokens=2, temperature=0.0)
        prompt = NewRow(0, [0] * num_tokens, num_tokens, params)
        self.launch(StepPlan(0, [prompt], [0], [0], [num_tokens], [True], [[0]]))
        self.launch(StepPlan(1, [], [0], [num_tokens - 1], [1], [True], [[]]))
        self.collect()
        self.collect()
        if self.max_model_len > SPLIT_TOKENS:
            # A context of several splits takes kernels of its own; what it reads does not matter.
            table = [0] * (SPLIT_TOKENS // self.config.block_size + 1)
            self.launch(StepPlan(2, [prompt], [0], [SPLIT_TOKENS], [1], [True], [table]))
            self.collect()

    def launch(self, plan: StepPlan) -> None:
        """See ``Executor``."""
        self._launched.append(plan)

    def collect(self) -> StepResult:
        """See ``Executor``."""
        assert self._launched, "collect follows launch"
        plan = self._launched.popleft()
        launched = self._run(plan, self._late_masks_for(plan))
        copies = self._report_copies(launched.plan, has_later=bool(self._launched))
        return StepResult(
            step_id=launched.plan.step_id,
            token_ids=launched.token_ids.tolist(),
            logprobs=launched.logprobs.by_row() if launched.logprobs is not None else None,
            elapsed_s=time.perf_counter() - launched.started_s,
            pooled=launched.pooled.by_row(len(launched.token_ids)) if launched.pooled is not None else None,
            prompt_logprobs=(
                launched.scored.by_row(len(launched.token_ids)) if launched.scored is not None else None
            ),
            copied=copies.copied,
            num_copied_blocks=copies.num_blocks,
            copied_s=copies.elapsed_s,
            corrupt_blocks=copies.corrupt_blocks,
        )

    def ready(self) -> bool:
        """See ``Executor``. ``collect`` computes but waits for nobody but late masks."""
        if not self._launched:
            return False
        oldest = self._launched[0]
        return not oldest.deferred or self._late_masks_for(oldest) is not None

    def close(self) -> None:
        """See ``Executor``."""
        self._launched.clear()
        if self._group is not None:
            self._group.close()

    def _late_masks_for(self, plan: StepPlan) -> LateMasks | None:
        """What the plan's deferred rows wait for, if a plan launched later has brought it."""
        later = (one.late_masks for one in self._launched)
        return next((late for late in later if late is not None and late.step_id == plan.step_id), None)

    @torch.inference_mode()
    def _run(self, plan: StepPlan, late_masks: LateMasks | None = None) -> _Launched:
        assert not plan.deferred or late_masks is not None, (
            "the step waits for masks that no plan has brought"
        )
        assert self._group is not None, "weights are loaded before the first step"
        assert self._kv_cache is not None, "memory is allocated before the first step"
        if self._copies is not None:
            self._copies.begin(plan)
        started_s = time.perf_counter()
        if not plan.rows:  # it was there for its masks or copies alone
            return _Launched(plan, started_s, torch.empty(0, dtype=torch.int64), None, None, None)
        self._share(plan)
        self._batch.apply(plan)
        self._sampler.enter(plan.new_rows)
        self._pooler.enter(plan.new_rows)
        self._scorer.enter(plan.new_rows)
        if self.config.is_deterministic:
            inputs = self._batch.lone_inputs(plan)
        else:
            inputs = self._batch.inputs(plan, self._min_num_tokens)
        attended, residual = self._decoder.attend_all(inputs, self._kv_cache)
        pooled = self._pool(plan, attended, residual)
        scored = self._score(plan, attended, residual)
        logits = self._decoder.logits(attended, residual, inputs.sample_tokens)
        rows = [self._sampler.sampled_row(row, position) for row, position in plan.sampled_positions]
        token_ids = torch.empty(0, dtype=torch.int64, device=self.device)
        logprobs = None
        if rows:
            masks = [*plan.masks, *(late_masks.masks if late_masks else ())]
            allowed = {mask.place: mask.allowed for mask in masks}
            token_ids, logprobs = self._sampler.sample(logits, rows, allowed)
            self._batch.store([row.row for row in rows], [row.position for row in rows], token_ids)
        return _Launched(plan, started_s, token_ids, logprobs, pooled, scored)

    def _share(self, plan: StepPlan) -> None:
        """Let beams go on from each other's rows, and copy blocks that are shared no longer."""
        assert self._kv_cache is not None, "memory is allocated before the first step"
        if plan.branches:
            self._batch.branch(plan.branches)
            self._sampler.branch(plan.branches)
        if plan.tail_copies:
            pairs = torch.tensor([(copy.source, copy.target) for copy in plan.tail_copies], dtype=torch.int32)
            if self.device.type != "cpu":
                pairs = pairs.pin_memory().to(self.device, non_blocking=True)
            copy_blocks(self._kv_cache, self._kv_cache, pairs, _TAIL_COPY_PROGRAMS)

    def _make_copies(self, kv_cache: Tensor, num_host_blocks: int) -> BlockCopies | CudaBlockCopies:
        host = HostBlocks(allocate_host(num_host_blocks, kv_cache), self.config.kv_checksum)
        return BlockCopies(kv_cache, host, self.config.copy_bytes_per_s, agree=self._agree())

    def _agree(self) -> Agree:
        """How ranks agree on which blocks are intact: with checksums; generations are the brain's own and the same."""
        assert self._group is not None, "weights are loaded before memory is taken"
        if not self.config.kv_checksum:
            return list
        self._group.all_agree([True])  # connects the ranks now, not under load
        return self._group.all_agree

    def _report_copies(self, plan: StepPlan, has_later: bool) -> CopyReport:
        """Which copies are done; a plan that awaits them waits for all, but for none if a later one is launched.

        Raises:
            RuntimeError: ranks do not agree, and a copy went wrong on one that the brain does not hear: the group
                must end.
        """
        if self._copies is None:
            return CopyReport()
        report = self._copies.report(waits=plan.awaits_copies and not has_later)
        if report.corrupt_blocks and self.config.tp_rank != 0 and not self.config.kv_checksum:
            raise RuntimeError(f"blocks {report.corrupt_blocks} came back from the host corrupted")
        return report

    def _pool(self, plan: StepPlan, attended: Tensor, residual: Tensor) -> PooledRows | None:
        """Vectors of prompts that end with this step, where any were asked for."""
        if not self._pooler.wants(plan):
            return None
        return self._pooler.pool(
            plan, lambda tokens: self._decoder.hidden(attended, residual, tokens), self.device
        )

    def _score(self, plan: StepPlan, attended: Tensor, residual: Tensor) -> ScoredPrompts | None:
        """Log-probabilities of prompts that end with this step, where any were asked for."""
        if not self._scorer.wants(plan):
            return None
        return self._scorer.score(
            plan, lambda tokens: self._decoder.logits(attended, residual, tokens), self.device
        )

    @torch.inference_mode()
    def _choose_padding(self) -> int:
        """Time passes over all weights with 1 row and with ``_PADDED_ROWS``; return the faster number of rows."""
        best_s = {1: math.inf, _PADDED_ROWS: math.inf}
        for _ in range(_PADDING_TRIALS):
            for num_rows in best_s:
                started_s = time.perf_counter()
                for linear in self._decoder.linears():
                    linear(torch.zeros(num_rows, linear.in_features, dtype=self.dtype))
                best_s[num_rows] = min(best_s[num_rows], time.perf_counter() - started_s)
        return min(best_s, key=lambda num_rows: best_s[num_rows])

    def _step_peak_bytes(self) -> int:
        """Activations and logits of the largest step, by size."""
        config, model = self.config, self.model_config
        widths = 4 * model.hidden_size + 3 * model.intermediate_size + 2 * model.num_heads * model.head_dim
        activations = config.max_num_batched_tokens * widths * self.dtype.itemsize
        # The sampler holds logits, scaled logits, weights and a sorted copy, in float32.
        return activations + 6 * config.max_num_seqs * model.vocab_size * 4
