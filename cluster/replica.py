"""The replica: one model on one group of ranks, as Ray Serve sees it. Ids only; text lives in the router.

Brings up ranks, brain and gRPC server, in that order; ends all of them when one is lost, so that Serve
replaces the replica at once; drains by itself when Serve takes it away.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest

from cluster.config import ReplicaConfig
from cluster.demand import DemandMeter
from cluster.engine_metrics import EngineCollector, EngineRow
from cluster.group import RankGroup, host_address
from cluster.logs import set_up_logs
from cluster.node_exporter import NodeExporter, metrics_folder
from cluster.progress import ProgressMonitor, stall_limit_s
from cluster.proto import shoal_pb2 as pb
from cluster.service import ReplicaService, start_server
from cluster.signs import wait_until_stopped
from workers.brain_client import BrainClient
from workers.brain_messages import BrainConfig, CacheSnapshot, Failed, Pong, QueueShown, StepUpdate
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import ModelFiles, resolve_model
from workers.engine.admission import context_len
from workers.engine.block_hash import make_root
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.model.rank_config import RankConfig

logger = logging.getLogger("ray.serve")

_PING_PERIOD_S = 0.5


class Replica:
    """Serve calls the constructor once and ``check_health`` again and again; tokens flow over gRPC."""

    async def __init__(self, config: ReplicaConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        """Be ready to serve when this returns.

        Raises:
            UserError: the model is unknown, or does not fit; Serve reports it as the deployment's message.
        """
        set_up_logs(config.log_format, f"replica-{os.getpid()}")
        self._config = config
        self._group: RankGroup | None = None
        self._vocabulary_path = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._exporter: NodeExporter | None = None
        if config.scripted:
            engine_config, cost = _scripted_engine(config), CostModel()
        else:
            engine_config, cost = await self._load_ranks()
        await self._start_brain(engine_config, cost)
        await self._start_service(engine_config)
        limit_s = stall_limit_s(cost, engine_config, config.stall_timeout_s)
        self._monitor = ProgressMonitor(limit_s, time.monotonic())
        self._demand = DemandMeter(
            self._service.load, time.monotonic(), engine_config.max_num_seqs, engine_config.block_size
        )
        self._start(self._ping())
        gc.freeze()  # a full collection of what is here by now would hold up all streams for 0.1 s
        logger.info("replica of %s is ready at %s", config.served_name, self._address)

    # -- starting -----------------------------------------------------------------------------------------

    async def _load_ranks(self) -> tuple[EngineConfig, CostModel]:
        config = self._config
        files = await asyncio.to_thread(resolve_model, config.model, config.source)
        self._vocabulary_path = config.tokenizer_path or str(files.path)
        model = await asyncio.to_thread(read_model_config, files, config.model_impl)
        self._group = RankGroup(_rank_config(config, files), config)
        counts = await self._group.load()
        num_blocks = counts.device
        engine_config = EngineConfig(
            max_model_len=context_len(
                config.max_model_len, model.max_position_embeddings, num_blocks, config.block_size
            ),
            num_blocks=num_blocks,
            num_host_blocks=counts.host,
            policy=config.scheduling_policy,
            preemption_mode=config.preemption_mode,
            kv_host_fraction=config.kv_host_fraction,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            eos_token_ids=tuple(model.eos_token_ids),
            vocab_size=model.vocab_size,
            hash_root=make_root(
                config.served_name,
                files.path.name,
                config.dtype,
                config.quantization or "",
                config.kv_cache_dtype,
                config.model_impl,
                str(config.block_size),
            ),
            run_ahead=config.run_ahead,
            max_step_growth=config.max_step_growth,
            replays_outputs=config.is_deterministic and config.device == "cuda",
        )
        return engine_config, await self._group.allocate(engine_config)

    async def _start_brain(self, engine_config: EngineConfig, cost: CostModel) -> None:
        config = self._config
        self._brain = BrainClient(
            BrainConfig(
                engine=engine_config,
                cost=cost,
                num_ranks=0 if config.scripted else config.tensor_parallel_size,
                vocabulary_path=self._vocabulary_path,
                step_endpoint=self._group.step_endpoint() if self._group is not None else None,
                replica_stop_s=config.rank_timeout_s,
                scripted_step_s=config.scripted_step_s,
            )
        )
        endpoint = await self._brain.start()
        if self._group is not None:
            self._group.serve_steps(endpoint)
            self._start(self._watch_ranks(self._group))
        await self._brain.started()
        assert self._brain.pid is not None, "it has started"
        self._start(self._watch_brain(self._brain.pid))

    async def _start_service(self, engine_config: EngineConfig) -> None:
        config = self._config
        hello = pb.Hello(
            replica_id=f"{config.served_name}#{os.getpid()}",
            model=config.served_name,
            block_size=engine_config.block_size,
            max_model_len=engine_config.max_model_len,
            num_blocks=engine_config.num_blocks,
            max_num_seqs=engine_config.max_num_seqs,
            max_num_batched_tokens=engine_config.max_num_batched_tokens,
            hash_root=engine_config.hash_root,
            generation=time.time_ns(),
        )
        self._service = ReplicaService(hello, self._brain, self._brain.idle_load)
        self._start(self._pump())
        self._server, port = await start_server(self._service, config.host)
        self._address = f"{host_address(config.host)}:{port}"
        if config.metrics_port is not None:
            self._exporter = self._start_exporter(config.metrics_port, hello.replica_id)

    def _start_exporter(self, port: int, replica_id: str) -> NodeExporter:
        config = self._config
        registry = CollectorRegistry()
        registry.register(
            EngineCollector(
                lambda: EngineRow(config.served_name, replica_id, self._service.load),
                config.vllm_metric_names,
            )
        )
        return NodeExporter(
            f"replica-{os.getpid()}",
            lambda: generate_latest(registry),
            metrics_folder(port),
            config.host,
            port,
        )

    def _start(self, coroutine: object) -> None:
        self._tasks.append(asyncio.create_task(coroutine))  # type: ignore[arg-type]

    # -- what Serve asks ----------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, str]:
        """Where ingresses find this replica; read once by Serve and told to every router."""
        return {"grpc_address": self._address, "model": self._config.served_name}

    def check_health(self) -> None:
        """Raise if the engine is stuck.

        Raises:
            RuntimeError: what is wrong.
        """
        complaint = self._monitor.complaint(time.monotonic())
        if complaint is not None:
            raise RuntimeError(complaint)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """This replica's demand, by the names of ``ReplicaDemand``."""
        return asdict(
            self._demand.measure(self._service.load, time.monotonic(), self._service.num_held_tokens)
        )

    async def __del__(self) -> None:
        """Drain, then end ranks and brain. Serve calls this after it has told the routers."""
        if self._is_ending or not hasattr(self, "_server"):
            return
        self._is_ending = True
        finished = await self._service.drain(self._config.drain_timeout_s)
        logger.info("drained %s", "with all requests finished" if finished else "by moving requests on")
        await self._server.stop(grace=1.0)
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.stop)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._brain.stop(), 5.0)
        self._end_processes()

    # -- watching -----------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        async for update in self._brain.updates():
            if isinstance(update, StepUpdate | QueueShown | CacheSnapshot):
                self._service.on_update(update)
            elif isinstance(update, Pong):
                self._monitor.on_answer(update.num_steps, update.has_work, time.monotonic())
            elif isinstance(update, Failed):
                self._exit(update.message)
        self._exit("the engine process has ended")

    async def _watch_ranks(self, group: RankGroup) -> None:
        reason = await group.lost
        await group.kill_far()
        self._exit(reason)

    async def _watch_brain(self, pid: int) -> None:
        """A brain that is stopped answers as little as one amid a long step; its end is told by ``_pump``."""
        await wait_until_stopped(pid, self._config.rank_timeout_s)
        self._exit("the engine process is stopped")

    async def _ping(self) -> None:
        while True:
            self._brain.ping(time.monotonic())
            await asyncio.sleep(_PING_PERIOD_S)
            complaint = self._monitor.complaint(time.monotonic())
            if complaint is not None:
                self._exit(complaint)

    def _exit(self, reason: str) -> None:
        """End the whole group now: ingresses see the socket close, Serve the actor die."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._is_stopped:
            logger.info("replica ends with its cluster: %s", reason)
        else:
            logger.error("replica ends: %s", reason)
        self._end_processes()
        logging.shutdown()
        os._exit(1)

    @property
    def _is_stopped(self) -> bool:
        """Whether somebody is stopping the cluster: its processes end one by one, in any order."""
        sign = self._config.stopping_file
        return sign is not None and sign.exists()

    def _end_processes(self) -> None:
        self._brain.kill()
        if self._group is not None:
            self._group.kill()


def _scripted_engine(config: ReplicaConfig) -> EngineConfig:
    return EngineConfig(
        max_model_len=config.max_model_len or 8192,
        num_blocks=config.num_blocks or 65536,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        hash_root=make_root("scripted", config.served_name, str(config.block_size)),
    )


def _rank_config(config: ReplicaConfig, files: ModelFiles) -> RankConfig:
    return RankConfig(
        files=files,
        load_format=config.load_format,
        dtype=config.dtype,
        quantization=config.quantization,
        model_impl=config.model_impl,
        kv_cache_dtype=config.kv_cache_dtype,
        device=config.device,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_bytes=config.kv_cache_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        swap_space_bytes=config.swap_space_bytes,
        num_blocks=config.num_blocks,
        kv_checksum=config.kv_checksum,
        copy_bytes_per_s=config.copy_bytes_per_s,
        num_threads=config.num_threads,
        seed=config.seed,
        enforce_eager=config.enforce_eager,
        is_deterministic=config.is_deterministic,
    )
