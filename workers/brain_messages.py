"""What crosses between a replica and its brain process: commands down, updates up (msgspec, no pickle)."""

from __future__ import annotations

import msgspec

from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.outputs import CacheEvents, CacheSnapshot, Load, Queued, TokenOutput
from workers.engine.request import EngineRequest

__all__ = [
    "BrainConfig",
    "CacheEvents",
    "CacheSnapshot",
    "Cancel",
    "Command",
    "Failed",
    "Load",
    "Ping",
    "Pong",
    "QueueShown",
    "Queued",
    "Release",
    "ShowQueue",
    "SnapshotCache",
    "Started",
    "StepUpdate",
    "Stop",
    "Submit",
    "TokenOutput",
    "Update",
]


class BrainConfig(msgspec.Struct, frozen=True):
    """What a brain process is told first: its engine and where its ranks are."""

    engine: EngineConfig
    cost: CostModel = CostModel()
    """As measured on the ranks; kept current by every step."""
    num_ranks: int = 1
    """0 runs a ``ScriptedExecutor`` in process."""
    step_endpoint: str | None = None
    """Where to listen for ranks (``workers.channel.link``); None lets the client choose one of this machine."""
    replica_stop_s: float | None = None
    """The replica's process is ended once it has been stopped for so long; None: never."""
    start_timeout_s: float = 600.0
    """For all ranks to connect."""
    vocabulary_path: str = ""
    """The model's file or folder, of whose vocabulary grammars are made; empty: requests with grammars are refused."""
    scripted_vocab_size: int = 32000
    scripted_step_s: float = 0.0


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Take up a request."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End requests; unknown ids are ignored. Nothing further is reported of them."""

    request_ids: list[str]


class SnapshotCache(msgspec.Struct, frozen=True, tag="snapshot_cache"):
    """Answer with a ``CacheSnapshot``."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Give requests back of which nothing has been computed.

    Each ends with ``FinishReason.RELEASED``, or is named in ``StepUpdate.kept`` and goes on.
    """

    request_ids: list[str]


class ShowQueue(msgspec.Struct, frozen=True, tag="show_queue"):
    """Answer with a ``QueueShown``; what the fields mean: ``workers.engine.queue_listing.list_queued``."""

    prefix: str
    least_wait_s: float
    most: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with a ``Pong`` between two steps: proves that the loop turns."""

    sent_s: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Let the ranks go and exit."""


Command = Submit | Cancel | Release | ShowQueue | SnapshotCache | Ping | Stop


class Started(msgspec.Struct, frozen=True, tag="started"):
    """All ranks are connected; what is submitted from now on is served."""

    load: Load
    """Of the idle engine."""


class StepUpdate(msgspec.Struct, frozen=True, tag="step"):
    """At most one for each step, and one after idle changes (a cancel, say)."""

    outputs: list[TokenOutput]
    cache: CacheEvents | None
    load: Load
    kept: list[str] = []
    """Requests that were to be released and had begun."""


class QueueShown(msgspec.Struct, frozen=True, tag="queue"):
    """Requests that wait, in the order of their turns."""

    prefix: str
    """As asked."""
    queued: list[Queued]


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The loop turned at the time it answered."""

    sent_s: float
    has_work: bool
    num_steps: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The brain cannot go on (a rank is lost, say); it exits after this."""

    message: str


Update = Started | StepUpdate | QueueShown | CacheSnapshot | Pong | Failed
