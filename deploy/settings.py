"""All settings of a cluster on this machine: from flags, then a file, then environment (``SHOAL_...``), then defaults.

The one place: a field here is a flag of ``shoal serve``, a key of its configuration file and a variable. What
stands under a field is its help.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from platformdirs import user_cache_dir
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cluster.autoscaling import ScaleBounds, ScaleTargets
from cluster.config import ReplicaConfig
from deploy import setting_values
from deploy.durations import Seconds
from deploy.refusals import first_flag, flag_of, no_truth_value, refusal, refused_path, told_as_given
from deploy.setting_values import MOST_GIB, BodyBytes, Gib, Host, HttpAddress, Keys, Names, Words
from router.config import Observability
from workers.checkpoint.source import ModelSource
from workers.engine.errors import InvalidRequest
from workers.model.rank_config import MAX_DETERMINISTIC_RANKS

Quantizations = Literal[
    "awq", "gptq", "squeezellm", "fp8", "int8", "int4", "compressed-tensors", "bitsandbytes", "gguf"
]
_ONLY_WITH_SCALING = ("target_ttft_s", "target_tpot_s", "downscale_delay_s", "scale_to_zero_delay_s")
Policy = Literal["prefix", "least-load", "round-robin", "power-of-two", "longest-match", "consistent-hash"]


class ServeSettings(BaseSettings):
    """What ``shoal serve`` takes. Frozen: a changed setting is a new object."""

    model_config = SettingsConfigDict(
        env_prefix="SHOAL_", frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip

    model: str | None = None
    """A folder, a .gguf file or a hub id; None: the demo model, SmolLM2-135M."""
    served_model_name: Names = ()
    """What clients call the model, the reported name first; several between commas, or given several times. None: its
    own name."""
    tokenizer: Path | None = None
    """A folder or .gguf file to take the tokenizer from; None: the model's."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    download_dir: Path | None = None
    """Where models of the hub are kept; None: the hub's own cache."""
    chat_template: Path | None = None
    """A Jinja file to make prompts of conversations with; None: the model's own template."""
    tool_call_parser: Literal["hermes", "qwen", "llama3_json", "llama", "mistral", "json"] | None = None
    """How the model writes tool calls; None: as its chat template teaches it."""
    enable_auto_tool_choice: bool = True
    """Let models decide by themselves whether to call a tool."""
    reasoning_parser: Literal["deepseek_r1", "qwen3", "think"] | None = None
    """How the model marks its thinking; None: thinking is text like any other."""
    host: Host = "127.0.0.1"
    """Interface of every socket of the cluster."""
    port: int = Field(8000, ge=1, le=65535)
    """Port of the OpenAI API."""
    grpc_port: int | None = Field(None, ge=1, le=65535)
    """Port of the gRPC API (router/rpc/proto/inference.proto). Default: none."""
    api_key: Keys = ()
    """A key that callers must show; several between commas, or given several times. Others see flags: better a file, or
    SHOAL_API_KEY."""
    api_keys: Path | None = None
    """A file of keys, one a line or YAML with limits; it is read again when it changes."""
    allowed_origins: Words = ("*",)
    """Web pages whose scripts may call the API (CORS); several between commas, or given several times."""
    ssl_keyfile: Path | None = None
    """Private key (PEM) of the certificate; with --ssl-certfile the API speaks HTTPS only."""
    ssl_certfile: Path | None = None
    """Certificate (PEM), with its chain."""
    replicas: int = Field(2, ge=1, le=1024)
    """Copies of the model, each with its own engine."""
    max_replicas: int | None = Field(None, ge=1, le=1024)
    """Copies that there may be under load; None: always as many as --replicas, which are otherwise the first."""
    min_replicas: int = Field(1, ge=0, le=1024)
    """Copies that stay without load, with --max-replicas; 0: none, and the first request waits for one to start."""
    target_ttft_s: Seconds = Field(2.0, gt=0)
    """Time to first token that copies are added for, with --max-replicas."""
    target_tpot_s: Seconds = Field(0.1, gt=0)
    """Time per output token that copies are added for, with --max-replicas."""
    downscale_delay_s: Seconds = Field(60.0, ge=0)
    """How long a lighter load must last before a copy is given back, with --max-replicas."""
    scale_to_zero_delay_s: Seconds = Field(300.0, ge=0)
    """How long nothing may have been asked before the last copy is given back, with --min-replicas 0."""
    ingress_replicas: int = Field(1, ge=1, le=64)
    """HTTP processes."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Ranks that share one replica's model."""
    max_model_len: int | None = Field(None, ge=2, le=1 << 30)
    """Most tokens of prompt and output; None: what the model takes."""
    max_num_seqs: int | None = Field(None, ge=1, le=4096)
    """Most requests in a step; None: 256 on a GPU, 64 on a CPU."""
    max_num_batched_tokens: int | None = Field(None, ge=16, le=1 << 20)
    """Most tokens in a step; None: 16384 on a GPU, 1024 on a CPU."""
    block_size: Literal[16, 32, 64] = 16
    """Tokens of a KV block."""
    enable_prefix_caching: bool = True
    """Keep the blocks of prompts for others that begin alike."""
    enable_chunked_prefill: bool = True
    """Accepted for compatibility: long prompts are always computed in portions beside decoding requests."""
    num_scheduler_steps: int | None = Field(None, ge=1, le=1 << 20)
    """Accepted for compatibility: each step is planned while the one before it runs."""
    max_logprobs: int = Field(20, ge=0, le=1000)
    """Most alternatives of a token that a request may ask for."""
    num_gpu_blocks_override: int | None = Field(None, ge=2, le=1 << 40)
    """KV blocks of a rank, on GPU or CPU; None: as many as the memory holds."""
    kv_cache_gib: Gib | None = Field(None, gt=0)
    """KV memory of a rank on a CPU, GiB."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory to use."""
    swap_space: Gib | None = Field(None, ge=0)
    """Host memory of a rank for KV blocks, GiB; None: 4 beside a GPU, none beside a CPU, whose memory is the same."""
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """Who is served first: as they come, by the request's priority, or so that tenants share the tokens."""
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    """What becomes of a request that must give way: its blocks move to the host, or are computed again."""
    kv_host_fraction: float = Field(0.5, ge=0, le=1)
    """Share of the swap space that preempted requests leave to cached prefixes."""
    kv_checksum: bool = False
    """Sum blocks that move to the host and compare when they come back."""
    copy_gib_per_s: float | None = Field(None, ge=0.0001, le=MOST_GIB)
    """On a CPU: copies between the tiers take as long as over a link of this rate, to try what a GPU would do."""
    load_format: Literal["auto", "gguf", "safetensors", "dummy"] = "auto"
    """How weights are stored; dummy: random ones."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers of weights, activations and KV."""
    quantization: Quantizations | None = None
    """None: as the checkpoint stores weights; fp8, int8 and int4 quantize full ones at load."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """Whose layers: Shoal's or transformers' (any of its decoder-only models); auto: Shoal's where there are such."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; auto: on GPUs where there are any."""
    enforce_eager: bool = False
    """On a GPU: launch every step kernel by kernel, without CUDA graphs; a faster start, slower steps."""
    max_step_growth: float | None = Field(None, gt=0, le=1 << 20)
    """How many times longer prompts may make a step in which others get tokens (2: three times in all); None: as
    --max-num-batched-tokens lets them."""
    deterministic: bool = False
    """Results are equal bit for bit whatever else is computed beside them and however often: slower."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Numbers of the KV cache; auto: those of --dtype; fp8: e4m3, with the checkpoint's scales where it has some."""
    trust_remote_code: bool = Field(False, json_schema_extra={"const": False})
    """Refused: no code of a checkpoint is ever run."""
    seed: int = Field(0, ge=0, le=2**64 - 1)
    """Of random weights."""
    cpu_threads: int | None = Field(None, ge=1, le=1 << 16)
    """Threads of a rank on a CPU; None: its share of the cores."""
    policy: Policy = "prefix"
    """How requests are placed on replicas."""
    max_body_bytes: BodyBytes = 8 << 20
    """Longest request body."""
    stall_timeout_s: Seconds = Field(60.0, gt=0)
    """A replica without a step for so long while work waits counts as stuck; sooner, from 10 s on, if that is 20 times
    what its largest step is expected to take."""
    rank_timeout_s: Seconds = Field(1.0, gt=0)
    """A rank that has not answered for this long (its host is cut off) is lost with its group; so is one whose process
    has been stopped for half as long, or whose replica's or engine's process has been for as long (by a debugger, too).
    One that Ray has no process for after ten times as long is made anew."""
    drain_timeout_s: Seconds = Field(60.0, ge=0)
    """Time for the requests of a replica that is taken away, before they go on elsewhere."""
    replica_wait_s: Seconds = Field(120.0, gt=0)
    """How long a request waits for a replica where none is there, before a 503."""
    haproxy: bool = sys.platform == "linux"
    """Put HAProxy before the ingress; without it Ray Serve's own proxy stands there."""
    cache_dir: Path = Path(user_cache_dir("shoal"))
    """Where the demo model is kept."""
    hub_endpoint: HttpAddress | None = None
    """Address of the model hub; None: HF_ENDPOINT, else the Hugging Face hub."""
    offline: bool = False
    """Never ask a network for a model."""
    record_trace: Path | None = None
    """A folder in which each ingress writes down arrivals, lengths and block hashes; None: nothing is recorded."""
    metrics_port: int | None = Field(None, ge=1, le=65535)
    """Port on which each node tells the metrics of all its processes; None: only /metrics of the API."""
    vllm_metric_names: bool = False
    """Also tell metrics under the names that vLLM's dashboards read."""
    log_format: Literal["text", "json"] = "text"
    """How ingresses and replicas write their logs; json: an object a line."""
    otlp_endpoint: HttpAddress | None = None
    """Where traces go (OTLP over HTTP); None: OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere."""
    trace_ratio: float = Field(1.0, ge=0, le=1)
    """Share of requests that are traced where the caller has not decided it."""
    scripted: bool = False
    """Serve tokens by formula instead of a model, to measure everything else."""
    scripted_step_s: Seconds = Field(0.0, ge=0)
    """Duration of a step then."""

    @field_validator("trust_remote_code")
    @classmethod
    def _runs_no_foreign_code(cls, value: bool) -> bool:
        if value:
            raise ValueError("no code of a checkpoint is ever run here: leave it out")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _is_not_blank(cls, value: object) -> object:
        if isinstance(value, str) and not value.strip():
            raise ValueError("nothing is no value: leave it out for the default")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_is_a_number(cls, value: object, info: ValidationInfo) -> object:
        return no_truth_value(cls.model_fields[str(info.field_name)], value)

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> ServeSettings:
        if self.max_replicas is not None and not self.min_replicas <= self.replicas <= self.max_replicas:
            unasked = "" if "replicas" in self.model_fields_set else ", the default,"
            raise ValueError(
                f"--replicas {self.replicas}{unasked} is not between --min-replicas {self.min_replicas} and "
                f"--max-replicas {self.max_replicas}: give --replicas, with which their number begins, between the two"
            )
        if self.max_replicas is None and self.min_replicas != 1:
            raise ValueError(
                f"--min-replicas {self.min_replicas} needs --max-replicas: without it the number is fixed, --replicas"
            )
        if self.max_replicas is None:
            for name in _ONLY_WITH_SCALING:
                if name in self.model_fields_set:
                    raise ValueError(
                        f"{flag_of(name)} {getattr(self, name):g} needs --max-replicas: without it the number of "
                        "replicas is fixed, give both or neither"
                    )
        return self

    @model_validator(mode="after")
    def _determinism_is_possible(self) -> ServeSettings:
        if self.deterministic and self.tensor_parallel_size > MAX_DETERMINISTIC_RANKS:
            raise ValueError(
                f"--deterministic does not cover --tensor-parallel-size {self.tensor_parallel_size}: in what order "
                f"more than {MAX_DETERMINISTIC_RANKS} ranks are summed depends on the batch"
            )
        return self

    @model_validator(mode="after")
    def _swapping_has_room(self) -> ServeSettings:
        if self.preemption_mode == "swap" and self.kv_host_fraction == 1:
            raise ValueError(
                "--kv-host-fraction 1 leaves the swap space to cached prefixes alone, --preemption-mode swap needs it: "
                "lower the fraction, or take another mode"
            )
        return self

    @property
    def scale_bounds(self) -> ScaleBounds | None:
        """None where the number of replicas is fixed."""
        if self.max_replicas is None:
            return None
        return ScaleBounds(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            initial_replicas=self.replicas,
            targets=ScaleTargets(self.target_ttft_s, self.target_tpot_s),
            down_delay_s=self.downscale_delay_s,
            zero_delay_s=self.scale_to_zero_delay_s,
        )

    @property
    def least_replicas(self) -> int:
        """Replicas that there are meant to be at any time."""
        return self.replicas if self.max_replicas is None else self.min_replicas

    @property
    def notes(self) -> list[str]:
        """What is worth knowing of settings that are accepted and change nothing."""
        notes = []
        if self.num_scheduler_steps is not None:
            notes.append(
                "--num-scheduler-steps has no effect: each step is planned while the one before it runs"
            )
        if not self.enable_chunked_prefill:
            notes.append("--no-enable-chunked-prefill has no effect: long prompts are computed in portions")
        if "scale_to_zero_delay_s" in self.model_fields_set and self.min_replicas > 0:
            notes.append(
                f"--scale-to-zero-delay-s has no effect: --min-replicas {self.min_replicas} keeps the last replica"
            )
        return notes

    @property
    def source(self) -> ModelSource:
        """Where models are looked for."""
        return ModelSource(
            cache_dir=self.cache_dir,
            hub_endpoint=self.hub_endpoint or os.environ.get("HF_ENDPOINT"),
            hub_token=os.environ.get("HF_TOKEN"),
            revision=self.revision,
            hub_cache_dir=self.download_dir,
            offline=self.offline or os.environ.get("HF_HUB_OFFLINE") == "1",
        )

    def served_names(self, name: str) -> tuple[str, ...]:
        """What clients may call a model whose own name is ``name``, the reported name first.

        Raises:
            InvalidRequest: it is to have its own, which can be no name.
        """
        if self.served_model_name:
            return self.served_model_name
        try:
            return (setting_values.checked_name(name),)
        except ValueError as error:
            raise InvalidRequest(
                f"the model's own name: {error}, by --served-model-name", "served_model_name"
            ) from None

    @property
    def device_name(self) -> str:
        """ "auto" resolved: a GPU where there is one."""
        if self.device != "auto":
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def num_ranks(self) -> int:
        """Of all replicas that there may be."""
        return (self.max_replicas or self.replicas) * self.tensor_parallel_size

    @property
    def step_limits(self) -> tuple[int, int]:
        """Most requests and most tokens in a step, defaults resolved for the device."""
        seqs, tokens = (256, 16384) if self.device_name == "cuda" else (64, 1024)
        return self.max_num_seqs or seqs, self.max_num_batched_tokens or tokens

    @property
    def swap_space_bytes(self) -> int:
        """``swap_space`` in bytes, its default resolved for the device."""
        gib = self.swap_space if self.swap_space is not None else (4 if self.device_name == "cuda" else 0)
        return int(gib * (1 << 30))

    @property
    def copy_bytes_per_s(self) -> float | None:
        """``copy_gib_per_s`` in bytes."""
        return self.copy_gib_per_s * (1 << 30) if self.copy_gib_per_s else None

    @property
    def kv_cache_bytes(self) -> int | None:
        """``kv_cache_gib`` in bytes."""
        return int(self.kv_cache_gib * (1 << 30)) if self.kv_cache_gib else None

    @property
    def observability(self) -> Observability:
        """How ingresses tell what they do."""
        return Observability(
            vllm_metric_names=self.vllm_metric_names,
            metrics_port=self.metrics_port,
            host=self.host,
            log_format=self.log_format,
            otlp_endpoint=self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
            trace_ratio=self.trace_ratio,
        )

    def replica_config(self, model_path: str, name: str) -> ReplicaConfig:
        """What each replica of a model found at ``model_path`` and called ``name`` needs."""
        max_num_seqs, max_num_batched_tokens = self.step_limits
        return ReplicaConfig(
            model=model_path,
            served_name=self.served_names(name)[0],
            tokenizer_path=str(self.tokenizer.absolute()) if self.tokenizer is not None else None,
            source=self.source,
            tensor_parallel_size=self.tensor_parallel_size,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            num_blocks=self.num_gpu_blocks_override,
            kv_cache_bytes=self.kv_cache_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            swap_space_bytes=self.swap_space_bytes,
            scheduling_policy=self.scheduling_policy,
            preemption_mode=self.preemption_mode,
            kv_host_fraction=self.kv_host_fraction,
            kv_checksum=self.kv_checksum,
            copy_bytes_per_s=self.copy_bytes_per_s,
            load_format=self.load_format,
            dtype=self.dtype,
            quantization=self.quantization,
            model_impl=self.model_impl,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device_name,
            seed=self.seed,
            enforce_eager=self.enforce_eager,
            is_deterministic=self.deterministic,
            max_step_growth=self.max_step_growth,
            num_threads=self.cpu_threads or self._thread_share,
            host=self.host if self.ssl_certfile is None else "127.0.0.1",
            stall_timeout_s=self.stall_timeout_s,
            rank_timeout_s=self.rank_timeout_s,
            drain_timeout_s=self.drain_timeout_s,
            metrics_port=self.metrics_port,
            vllm_metric_names=self.vllm_metric_names,
            log_format=self.log_format,
            scripted=self.scripted,
            scripted_step_s=self.scripted_step_s,
        )

    @property
    def _thread_share(self) -> int:
        return max(1, (os.cpu_count() or 1) // (self.replicas * self.tensor_parallel_size))


def make_settings(called: Mapping[str, str] | None = None, /, **values: object) -> ServeSettings:
    """Settings from given values; None means not given.

    Args:
        called: what the user calls a setting whose value did not come by its flag: a place in a file.
        values: what was given, by setting's name.

    Raises:
        InvalidRequest: a value is out of range; the message names the flag (or the place in ``called``, or the
            variable), the value and what is allowed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    setting_values.check_variables()
    try:
        return ServeSettings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        path = refused_path(error)
        message = refusal(error, flag_of(path[0]) if path else "")
        param = path[0] if path else first_flag(message) or "settings"
        raise InvalidRequest(
            told_as_given(message, {**variables_beside(given), **(called or {})}), param
        ) from error


def variables_beside(given: Iterable[str]) -> dict[str, str]:
    """The variables that say something of settings, by setting's name, but for those that are given otherwise."""
    variables = {name: f"SHOAL_{name}".upper() for name in ServeSettings.model_fields.keys() - set(given)}
    there = set(map(str.upper, os.environ))
    return {name: variable for name, variable in variables.items() if variable in there}
