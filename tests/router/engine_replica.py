"""A replica with the real engine and real grammars in this process, over a rank without a model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc.aio

from cluster.proto import shoal_pb2 as pb
from cluster.service import ReplicaService, start_server
from workers.brain_messages import QueueShown, StepUpdate, TokenOutput
from workers.checkpoint.vocabulary import Vocabulary
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.request import EngineRequest, FinishReason
from workers.grammar import GrammarCompiler
from workers.obedient_rank import ObedientRank, Script
from workers.scripted_rank import ScriptedRank

END = 257


@dataclass
class EngineReplica:
    """Takes a step when told to; plays the brain that a ``ReplicaService`` speaks to."""

    vocabulary: Vocabulary
    replica_id: str = "engine"
    eos_token_ids: tuple[int, ...] = (END,)
    script: Script | None = None
    """What its model says (``ObedientRank``); None: tokens of a hash function."""
    limits: dict[str, int] = field(default_factory=dict)
    """Fields of its ``EngineConfig`` that are not those of the others."""
    requests: list[EngineRequest] = field(default_factory=list)
    num_snapshots: int = 0
    """That ingresses have asked for."""
    port: int = 0

    def __post_init__(self) -> None:
        limits = {"max_model_len": 4096, "num_blocks": 2048, "max_num_batched_tokens": 4096} | self.limits
        config = EngineConfig(**limits, eos_token_ids=(END,), vocab_size=258, hash_root=b"tests")
        self.engine = Engine(config)
        self.rank = (
            ScriptedRank(config, 258)
            if self.script is None
            else ObedientRank(config, self.vocabulary.token_bytes, self.script)
        )
        self.grammars = GrammarCompiler(
            self.vocabulary.token_bytes, self.vocabulary.special_token_ids, (END,)
        )
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """Where an ingress attaches."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen."""
        config = self.engine.config
        hello = pb.Hello(
            replica_id=self.replica_id,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            hash_root=config.hash_root,
        )
        self.service = ReplicaService(hello, self, self.engine.load())
        self._server, self.port = await start_server(self.service, "127.0.0.1")

    async def kill(self) -> None:
        """Die as a process does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def step(self) -> None:
        """Plan as far ahead as the engine goes, apply one result, tell the ingress."""
        while (plan := self.engine.plan(0.0)) is not None:
            self.rank.launch(plan)
        if self.engine.num_launched:
            outputs = self.engine.apply(self.rank.collect(), 0.0)
            self.service.on_update(StepUpdate(outputs, self.engine.drain_cache_events(), self.engine.load()))

    async def run(self) -> None:
        """Step until nothing is left to do, letting others run in between."""
        while self.engine.has_work:
            self.step()
            await asyncio.sleep(0)

    # What a service asks of a brain

    def submit(self, request: EngineRequest) -> None:
        """See ``Brain``."""
        self.requests.append(request)
        matcher = self.grammars.matcher(request.params.grammar) if request.params.grammar else None
        output = self.engine.add(request, 0.0, matcher)
        if output is not None:
            self.service.on_update(StepUpdate([output], None, self.engine.load()))

    def cancel(self, request_ids: list[str]) -> None:
        """See ``Brain``."""
        for request_id in request_ids:
            self.engine.abort(request_id)

    def release(self, request_ids: list[str]) -> None:
        """See ``Brain``."""
        given = [request_id for request_id in request_ids if self.engine.release(request_id)]
        outputs = [TokenOutput(request_id, [], FinishReason.RELEASED) for request_id in given]
        kept = [request_id for request_id in request_ids if request_id not in given]
        self.service.on_update(StepUpdate(outputs, None, self.engine.load(), kept))

    def show_queue(self, prefix: str, least_wait_s: float, most: int) -> None:
        """See ``Brain``."""
        self.service.on_update(QueueShown(prefix, self.engine.queued(prefix, least_wait_s, most)))

    def request_snapshot(self) -> None:
        """See ``Brain``."""
        self.num_snapshots += 1
        self.service.on_update(self.engine.cache_snapshot())
