"""What a simulated replica can do: limits and costs, from a JSON file or one of the built-in ones.

A file may name any of the fields of ``ReplicaModel``; what it leaves out keeps its default:

    {"kind": "engine", "prompt_tokens_per_s": 42000, "base_s": 0.0036, "num_kv_tokens": 400000}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from deploy.durations import Seconds
from deploy.refusals import Spec, refusal, refused_path
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.errors import InvalidRequest

_MOST = 1 << 32
Rate = Annotated[float, Field(ge=0.001, le=1e12)]
"""Tokens a second; a token takes a time that can be added up."""


class ReplicaModel(Spec):
    """Limits and costs of one replica. Frozen."""

    kind: Literal["engine", "fifo"] = "engine"
    """``engine``: Shoal's own scheduler and block manager. ``fifo``: the textbook replica of ``FifoReplica``."""
    prompt_tokens_per_s: Rate = 15_000.0
    base_s: Seconds = Field(0.008, gt=0)
    """Of each step."""
    per_sequence_s: Seconds = Field(0.0001, ge=0)
    """Of each decoding request in a step."""
    per_context_token_s: Seconds = Field(0.0, ge=0)
    """Of each KV token that a step's decoding requests read."""
    per_attended_s: Seconds = Field(0.0, ge=0)
    """Of each pair of a prompt token and a KV token that it reads; ``engine`` only."""
    max_num_seqs: int = Field(128, ge=1, le=_MOST)
    max_num_batched_tokens: int = Field(2048, ge=1, le=_MOST)
    num_kv_tokens: int = Field(1_024_000, ge=1, le=_MOST)
    """Tokens that the KV pool holds: 2,000 blocks of 512."""
    num_host_kv_tokens: int = Field(0, ge=0, le=_MOST)
    """Tokens that blocks in host memory hold; ``engine`` only."""
    copied_tokens_per_s: Rate = 390_000.0
    """Between the tiers, each way: 51 GB/s, at 131,072 bytes a token of an 8B model."""
    run_ahead: int = Field(1, ge=0, le=1024)
    """Steps launched beyond the one awaited; ``engine`` only."""

    @model_validator(mode="after")
    def _has_what_its_kind_can(self) -> ReplicaModel:
        if self.kind == "fifo" and (self.per_attended_s or self.num_host_kv_tokens):
            raise ValueError("per_attended_s and num_host_kv_tokens need kind engine")
        return self

    def cost(self, block_size: int) -> CostModel:
        """What steps and copies take, with blocks of a trace's size."""
        return CostModel(
            self.base_s,
            self.per_sequence_s,
            1 / self.prompt_tokens_per_s,
            self.per_context_token_s,
            self.per_attended_s,
            copy_block_s=block_size / self.copied_tokens_per_s,
        )

    def num_blocks(self, block_size: int) -> int:
        """Blocks of a trace's size in the pool."""
        return max(1, self.num_kv_tokens // block_size)

    def engine_config(self, block_size: int) -> EngineConfig:
        """The same for the engine, with blocks of a trace's size."""
        num_blocks = self.num_blocks(block_size)
        return EngineConfig(
            max_model_len=num_blocks * block_size,
            num_blocks=num_blocks,
            num_host_blocks=self.num_host_kv_tokens // block_size,
            block_size=block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            run_ahead=self.run_ahead,
        )


BUILT_IN = {
    name: ReplicaModel.model_validate(fields)
    for name, fields in {
        "engine": {},
        "fifo": {"kind": "fifo"},
        # The Llama-3-8B shape in bf16 on one H200, by the figures in deploy/bench/results; 200 GB of host memory.
        "h200": {
            "prompt_tokens_per_s": 45_000,
            "base_s": 0.0039,
            "per_sequence_s": 4e-6,
            "per_context_token_s": 3.2e-8,
            "per_attended_s": 9e-10,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "num_kv_tokens": 800_000,
            "num_host_kv_tokens": 1_500_000,
        },
    }.items()
}
"""Names that stand for a file; a constant table."""


def read_replica_model(name: str) -> ReplicaModel:
    """The built-in model of this name, or what the file of this name says.

    Raises:
        InvalidRequest: it is neither, or a field is not what it must be.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    try:
        return ReplicaModel.model_validate_json(Path(name).read_text())
    except OSError as error:
        raise InvalidRequest(
            f"replica model {name!r} is neither a file nor one of {', '.join(BUILT_IN)}", "replica_model"
        ) from error
    except ValidationError as error:
        field = ".".join(refused_path(error)) or "the file"
        raise InvalidRequest(f"replica model {name}: {refusal(error, field)}", "replica_model") from error
