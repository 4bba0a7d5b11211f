"""Ranks for offline use: in this process where there is one, else a process for each, without Ray."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from deploy.offline.own_rank import OwnRank
from deploy.offline.owned_ranks import OwnedRanks
from deploy.offline.spawning import (
    interrupts_kept_from_children,
    leave_interrupts_to_parent,
    raise_if_unguarded,
    rank_name,
)
from deploy.settings import ServeSettings
from workers.channel.link import new_endpoint
from workers.channel.serve import serve_steps
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import RankLost
from workers.engine.plan import Executor
from workers.model.cuda_rank import make_rank
from workers.model.rank_config import LOOPBACK_ENVIRONMENT, RANK_ENVIRONMENT, BlockCounts, RankConfig
from workers.model.rendezvous import forget_rendezvous, new_rendezvous


def start_executor(settings: ServeSettings, files: ModelFiles) -> tuple[Executor, BlockCounts]:
    """Load the model on its ranks.

    Returns:
        The executor and the KV blocks that each rank has.

    Raises:
        ShoalError: a rank could not start.
    """
    max_num_seqs, max_num_batched_tokens = settings.step_limits
    config = RankConfig(
        files=files,
        load_format=settings.load_format,
        dtype=settings.dtype,
        quantization=settings.quantization,
        model_impl=settings.model_impl,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device_name,
        block_size=settings.block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_bytes=settings.kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        num_blocks=settings.num_gpu_blocks_override,
        swap_space_bytes=settings.swap_space_bytes,
        kv_checksum=settings.kv_checksum,
        copy_bytes_per_s=settings.copy_bytes_per_s,
        num_threads=settings.cpu_threads or max(1, (os.cpu_count() or 1) // settings.tensor_parallel_size),
        seed=settings.seed,
        enforce_eager=settings.enforce_eager,
        is_deterministic=settings.deterministic,
    )
    os.environ.update(RANK_ENVIRONMENT)
    if settings.tensor_parallel_size > 1:
        return _start_processes(config, settings.tensor_parallel_size)
    rank = make_rank(config)
    rank.load()
    counts = rank.block_counts()
    rank.allocate(counts.device, counts.host)
    rank.warm_up()
    return OwnRank(rank), counts


def _start_processes(config: RankConfig, num_ranks: int) -> tuple[Executor, BlockCounts]:
    """Start the ranks, agree on the number of blocks, connect the step channel."""
    context = multiprocessing.get_context("spawn")
    # Only where there are no abstract sockets does the endpoint need a folder.
    folder = "" if sys.platform == "linux" else tempfile.mkdtemp(prefix="shoal-")
    endpoint = new_endpoint(folder)
    rendezvous = new_rendezvous()
    config = replace(config, tp_size=num_ranks, rendezvous=rendezvous)
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    executor = OwnedRanks(endpoint, num_ranks, processes, rendezvous)
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_run_rank,
                name=rank_name(rank),
                args=(replace(config, tp_rank=rank), theirs, endpoint),
                daemon=True,
            )
            with interrupts_kept_from_children():
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        told = executor.hear(pipes)
        counts = BlockCounts.least([one for one in told if isinstance(one, BlockCounts)])
        for pipe in pipes:
            with contextlib.suppress(OSError):  # one that has ended is named by what follows
                pipe.send(counts)
        executor.hear(pipes)
        executor.connect_ranks()
    except RankLost:
        executor.kill()
        raise_if_unguarded(processes)
        raise
    except BaseException:
        executor.kill()
        raise
    return executor, counts


def _run_rank(config: RankConfig, pipe: Connection, endpoint: str) -> None:
    """Body of a rank's process; it ends with the channel, or at once when its parent is gone.

    It tells through ``pipe`` how many blocks it has room for, is told how many to take, and says when it is ready.
    """
    leave_interrupts_to_parent()
    threading.Thread(target=_end_with_parent, args=(config.rendezvous,), daemon=True).start()
    if sys.platform == "linux":
        os.environ.update(LOOPBACK_ENVIRONMENT)
    try:
        rank = make_rank(config)
        rank.load()
        pipe.send(rank.block_counts())
        counts: BlockCounts = pipe.recv()
        rank.allocate(counts.device, counts.host)
        rank.warm_up()
        pipe.send(None)
    except Exception as error:  # noqa: BLE001 - the parent raises it anew
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
        return
    try:
        serve_steps(rank, endpoint, config.tp_rank)
    except RankLost as error:  # the parent tells which one; of a failed collective this is all that is known
        raise SystemExit(" ".join(str(error).split())) from None
    finally:
        forget_rendezvous(config.rendezvous)


def _end_with_parent(rendezvous: str | None) -> None:
    """End this process as soon as its parent is gone, whatever it waits for: a file, a device, another rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by another process"
    parent.join()
    forget_rendezvous(rendezvous)
    os._exit(1)
