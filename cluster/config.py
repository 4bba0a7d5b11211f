"""What one replica needs to start, anywhere in the cluster. Values only; picklable."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workers.checkpoint.source import ModelSource

INGRESS_APPLICATION = "shoal-ingress"
INGRESS_DEPLOYMENT = "ingress"
REPLICA_DEPLOYMENT = "replica"
"""Names in Serve; configurations and the chart use the same."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One replica group: a model, its memory and its ranks."""

    model: str | None
    """A path, a hub id, or None for the demo model; each replica resolves it on its own host."""
    served_name: str
    source: ModelSource
    tokenizer_path: str | None = None
    """Where the vocabulary that grammars are made of is read from; None: the model's files."""
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    """None: what the model and the KV memory allow."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_blocks: int | None = None
    """None: as many as the KV memory holds."""
    kv_cache_bytes: int | None = None
    """KV memory of a rank on a CPU; None: the rank's default."""
    gpu_memory_utilization: float = 0.9
    swap_space_bytes: int = 0
    """Host memory of a rank for blocks that the device has no room for."""
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    kv_host_fraction: float = 0.5
    kv_checksum: bool = False
    copy_bytes_per_s: float | None = None
    """On a CPU: copies between the tiers take as long as at this rate; None: as long as they take."""
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    model_impl: str = "auto"
    """Whose layers: "native", "transformers", or "auto"."""
    kv_cache_dtype: str = "auto"
    """Numbers of the KV cache: "auto" for those of ``dtype``, or "fp8"."""
    device: str = "auto"
    enforce_eager: bool = False
    """On a GPU: no CUDA graphs."""
    max_step_growth: float | None = None
    """See ``EngineConfig``."""
    is_deterministic: bool = False
    """Results are equal bit for bit however they are computed."""
    seed: int = 0
    num_threads: int | None = None
    """CPU threads of a rank; None: its share of the host's cores."""
    host: str = "127.0.0.1"
    """Interface of the replica's gRPC port, and its address to the ingresses."""
    stall_timeout_s: float = 60.0
    """Work is waiting and no step has ended for this long: the replica counts as stuck and is replaced."""
    rank_timeout_s: float = 1.0
    """A rank's process that has not answered for this long is lost, and its group with it; so is a replica or a brain
    that has been stopped for this long."""
    drain_timeout_s: float = 60.0
    """How long a replica that is being removed goes on with the requests it has."""
    stopping_file: Path | None = None
    """There once the cluster is being stopped, so that what ends from then on is no failure; None: no such sign."""
    metrics_port: int | None = None
    """Port on which the processes of a node tell their metrics together (``cluster.node_exporter``); None: not."""
    vllm_metric_names: bool = False
    """Also under the names that vLLM's dashboards read."""
    log_format: str = "text"
    """``text`` or ``json``."""
    scripted: bool = False
    """No model: tokens by formula, to measure everything but the model."""
    scripted_step_s: float = 0.0

    @property
    def run_ahead(self) -> int:
        """Steps planned beyond the one that runs: hides the brain behind a GPU, only delays new requests on a CPU."""
        return 1 if self.device == "cuda" else 0

    @property
    def application_name(self) -> str:
        """Name of the model's Serve application, also of its membership group."""
        return application_name(self.served_name)


def application_name(served_name: str) -> str:
    """Name of the Serve application of the model that clients call ``served_name``.

    Serve allows no slashes, takes ASCII alone, and makes names of files of it: other names and long ones are told by a
    part that can be read, and a digest.
    """
    if _PLAIN_NAME.fullmatch(served_name):
        return "model-" + served_name.replace("/", "--")
    part = re.sub(r"[^A-Za-z0-9._-]+", "-", served_name)[:40]
    digest = hashlib.sha256(served_name.encode()).hexdigest()[:16]
    return f"model-{part}-{digest}"
