"""All that one rank needs to know, in one frozen object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.source import ModelFiles

RANK_ENVIRONMENT = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
"""What a rank's process needs in its environment before torch looks: NVLink multicast off, since a program that dies
while it uses it can take the host's other GPUs with it; sums go before the products that they run beside; and each rank
may see one device alone, number 0 to all. The last two bound what torch and oneDNN keep for each number of rows that a
CPU has multiplied, 1,024 products each by default: with SmolLM2's shapes and 1 to 1,024 rows that took 6.5 GiB, with 64
it takes 0.5. A product seen anew costs 1 ms once, in a step of 40 ms and more; a step needs five of them."""

MAX_DETERMINISTIC_RANKS = 2
"""Two numbers have one sum; of more, libraries choose the order by where in the batch they stand."""

LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The same for ranks that meet in a file, so all on one host: their sockets are nobody else's business. On Linux."""

COPY_SHARE = 8
"""Weights of codes are kept in 16 bits as well where that takes this part of a GPU's memory at most: many tokens
are multiplied faster by more than the KV cache would gain."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """KV blocks that fit a rank's memory."""

    device: int
    host: int
    block_bytes: int = 0
    """Of one, on one rank."""

    @classmethod
    def least(cls, counts: Iterable[BlockCounts]) -> BlockCounts:
        """What fits every rank of a group."""
        listed = list(counts)
        return cls(min(one.device for one in listed), min(one.host for one in listed), listed[0].block_bytes)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What one rank loads, where, and how much it may take."""

    files: ModelFiles | None = None
    """None only with ``load_format`` "dummy" and a ``model_config``."""
    load_format: str = "auto"
    """One of "auto" (by the files), "gguf", "safetensors", and "dummy" for random weights."""
    model_impl: str = "auto"
    """Whose layers: "native", "transformers", or "auto" for native ones where there are such."""
    model_config: ModelConfig | None = None
    """Overrides what the files say; needed where there are none."""
    quantization: str | None = None
    """How weights are kept: None as the checkpoint stores them; "fp8", "int8" and "int4" quantize full ones."""
    kv_cache_dtype: str = "auto"
    """Numbers of the KV cache: "auto" for those of ``dtype``, or "fp8"."""
    dtype: str = "auto"
    """One of "auto", "float32", "bfloat16" and "float16"."""
    device: str = "cpu"
    """As torch names it: "cpu", "cuda", "cuda:1"."""
    tp_rank: int = 0
    tp_size: int = 1
    rendezvous: str | None = None
    """Where the ranks of a group meet: "file://path" on one host, "tcp://host:port" across; None for one rank."""
    block_size: int = 16
    max_num_seqs: int = 64
    max_model_len: int | None = None
    """None: as many positions as the model was trained for."""
    max_num_batched_tokens: int = 1024
    kv_cache_bytes: int | None = None
    """Memory of the KV pool of this rank. None: on CUDA what ``gpu_memory_utilization`` leaves, else 1 GiB or what
    holds ``max_num_seqs`` requests of full length, whichever is less."""
    num_blocks: int | None = None
    """Device blocks to take; None: as many as its memory holds."""
    swap_space_bytes: int = 0
    """Host memory of this rank for blocks that the device has no room for."""
    kv_checksum: bool = False
    """Sum what is copied to the host, and compare when it is copied back."""
    copy_bytes_per_s: float | None = None
    """On a CPU: copies between the tiers are said to be done no sooner than at this rate; None: at once."""
    gpu_memory_utilization: float = 0.9
    num_threads: int | None = None
    """CPU threads of this rank; None leaves torch's choice."""
    pack_weights: bool = True
    """On a CPU: keep linear weights in the layout of oneDNN's kernels."""
    enforce_eager: bool = False
    """On CUDA: launch every step kernel by kernel, without graphs: a faster start, slower steps."""
    is_deterministic: bool = False
    """A token's numbers depend, to the bit, on the tokens before it alone, not on how they were computed."""
    seed: int = 0
    """Of dummy weights."""
