"""Everything an ingress is told: models, limits, time-outs. Frozen, and picklable by value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from router.tenancy.keys import KeyRing
from workers.checkpoint.source import ModelFiles


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """One model that clients can name."""

    files: ModelFiles
    """Where its tokenizer and chat template are read from."""
    max_model_len: int
    """Most tokens of a prompt and its output together."""
    names: tuple[str, ...] = ()
    """What clients may call it, the reported name first; empty means ``files.name``."""
    group: str = ""
    """The membership group whose replicas serve it."""
    chat_template: str | None = None
    """Source of a Jinja template to use instead of the model's own."""
    tool_call_parser: str | None = None
    """One of ``router.text.tools.formats.FORMATS``; None: as the template teaches."""
    enable_auto_tool_choice: bool = True
    """Whether models may decide by themselves to call a tool."""
    reasoning_parser: str | None = None
    """One of ``router.text.reasoning.REASONING``; None: thinking is text like any other."""

    scales_to_zero: bool = False
    """Its last replica may go when nothing is asked; a request makes one start."""
    min_replicas: int | None = field(default=None, compare=False)
    """Replicas that it is meant to have at least, only to be told: with another number it is no other model. None: not
    known."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names, the reported one first; never empty."""
        return self.names or (self.files.name,)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one caller may ask for at most."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_choices: int = 128
    """Of one HTTP request: prompts times ``n``. OpenAI's own limit on ``n`` is 128."""
    max_inputs: int = 2048
    """Texts of one embeddings request; OpenAI's limit."""
    max_logprobs: int = 20
    """OpenAI's limit on ``top_logprobs``."""
    max_unbounded_chars: int = 1024 * 1024
    """Of a text whose number of tokens no model bounds: to be cut to its last tokens, or only to be tokenized."""
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    """Characters of one stop string: as many may be held back while streaming."""
    max_unread_outputs: int = 4096
    """Engine outputs that wait for a slow reader of one HTTP request; beyond, it is cancelled."""
    max_waiting_per_replica: int = 1024
    """Requests queued at a replica from which on it gets no more; all there: 429."""
    max_lost_replicas: int = 3
    """A request under which this many replicas broke in a row, none with a token of it, may be what breaks them:
    it is given up. Not two, since both replicas of a small cluster may go at once, with a bystander in the queue. The
    last time it is tried apart from others that may be, and takes none along (``router.last_chance``)."""
    max_lost_in_all: int = 16
    """Replicas that may break under a request, however far it gets: one that ends a replica with each token would
    otherwise take the whole cluster down again and again."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the ingress waits, in seconds."""

    replica_wait_s: float = 30.0
    """For any replica to be there, before a request is answered with 503."""
    stall_s: float = 30.0
    """Without a step while a replica has work of ours, until it counts as lost."""
    ping_s: float = 5.0
    """Between signs of life from a replica, until it is asked for one; as long without an answer, and it is lost: its
    process is stopped, or its host is gone."""
    connect_s: float = 5.0
    """For a replica's Hello after a connection attempt."""
    reconnect_first_s: float = 0.05
    """Pause after the first failed attempt; doubles with each further one."""
    reconnect_most_s: float = 2.0


@dataclass(frozen=True, slots=True)
class RpcConfig:
    """Where the gRPC server of each ingress listens, and with which certificate."""

    host: str
    port: int
    key: Path | None = None
    """PEM; None: plain."""
    certificate: Path | None = None
    grace_s: float = 60.0
    """For the calls of an ingress that leaves."""


@dataclass(frozen=True, slots=True)
class Observability:
    """How an ingress tells what it does."""

    vllm_metric_names: bool = False
    """Also show metrics under the names that vLLM's dashboards read."""
    metrics_port: int | None = None
    """Port on which a node's processes tell their metrics together; None: only ``/metrics`` of the endpoint."""
    host: str = "127.0.0.1"
    """Interface of that port."""
    log_format: str = "text"
    """``text`` or ``json``."""
    otlp_endpoint: str | None = None
    """Where traces go; None: nowhere, and nothing is measured for them."""
    trace_ratio: float = 1.0
    """Share of requests that are traced where the caller has not decided it."""


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """Settings of one ingress process."""

    models: tuple[ServedModelConfig, ...]
    policy: str = "prefix"
    """One of ``router.placement.policy.POLICIES``."""
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    allowed_origins: tuple[str, ...] = ("*",)
    """Web pages whose scripts may call the API from a browser (CORS); no cookies are involved."""
    keys: KeyRing | None = None
    """Keys of which callers must show one; None: everybody may call, unless ``key_file`` is set."""
    key_file: Path | None = None
    """Further keys, in a file that is read again when it changes."""
    rpc: RpcConfig | None = None
    """None: no gRPC for users."""
    max_index_hashes: int = 8_000_000
    """Block hashes that the prefix index of one model may hold over all replicas (about 100 bytes each)."""
    trace_folder: Path | None = None
    """Where requests are recorded (``router.trace_recorder``); None: they are not."""
    observability: Observability = field(default_factory=Observability)
