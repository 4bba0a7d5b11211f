"""What is done to a cluster while streams run: processes are killed and stopped, and operators change things.

``FAULTS`` need nothing but processes to signal, ``CHANGES`` a cluster that can be changed (``DeployedCluster``).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import psutil

from deploy.deployed_cluster import DeployedCluster


class SeenCluster(Protocol):
    """A cluster as it is seen from outside."""

    @property
    def url(self) -> str:
        """The endpoint."""

    @property
    def model(self) -> str:
        """Whom to ask."""

    def busiest(self, word: str) -> psutil.Process:
        """Of the processes with ``word`` in their title, the one that is at work for a stream."""


_NUM_PULSES = 4
_PULSE_S = 0.5
"""Shorter than any time-out: who is stopped for so long is waited for."""

C = TypeVar("C", bound=SeenCluster, contravariant=True)


def _nothing(cluster: SeenCluster) -> None:
    """No more is needed."""


@dataclass(frozen=True, slots=True)
class Fault(Generic[C]):
    """One thing that is done to a cluster of kind ``C``; its functions block."""

    name: str
    strike: Callable[[C], float]
    """Does it; returns when it did, on the monotonic clock."""
    prepare: Callable[[C], None] = _nothing
    """Before the streams."""
    restore: Callable[[C], None] = _nothing
    """After the streams: brings back what does not come back by itself."""
    loses_replica: bool = True
    """Ingresses miss a replica because of it."""
    heals: bool = True
    """What is missed comes back by itself."""
    spares_streams: bool = True
    """False: the streams that pass through the process end with it, and only they."""


def _send(number: signal.Signals, word: str) -> Callable[[SeenCluster], float]:
    """To the process at work with ``word`` in its command line or title."""

    def strike(cluster: SeenCluster) -> float:
        process = cluster.busiest(word)
        process.send_signal(number)
        return time.monotonic()

    return strike


def _pulse(word: str) -> Callable[[SeenCluster], float]:
    """Stop the process at work with ``word`` in its title for a moment, and again: slow, not gone."""

    def strike(cluster: SeenCluster) -> float:
        process = cluster.busiest(word)
        struck_s = time.monotonic()
        for _ in range(_NUM_PULSES):
            process.suspend()
            time.sleep(_PULSE_S)
            process.resume()
            time.sleep(_PULSE_S)
        return struck_s

    return strike


_RANK, _BRAIN, _REPLICA, _INGRESS = (
    "RankActor",
    "workers.brain",
    "ServeReplica:model",
    "ServeReplica:shoal-ingress",
)

FAULTS: tuple[Fault[SeenCluster], ...] = (
    Fault("kill-rank", _send(signal.SIGKILL, _RANK)),
    Fault("kill-brain", _send(signal.SIGKILL, _BRAIN)),
    Fault("kill-replica", _send(signal.SIGKILL, _REPLICA)),
    Fault("stop-rank", _send(signal.SIGSTOP, _RANK)),
    Fault("stop-brain", _send(signal.SIGSTOP, _BRAIN)),
    Fault("stop-replica", _send(signal.SIGSTOP, _REPLICA)),
    Fault("pulse-brain", _pulse(_BRAIN), loses_replica=False),
    Fault("pulse-replica", _pulse(_REPLICA), loses_replica=False),
    Fault("kill-ingress", _send(signal.SIGKILL, _INGRESS), loses_replica=False, spares_streams=False),
)


def _scale_down(cluster: DeployedCluster) -> float:
    struck_s = time.monotonic()
    cluster.scale(1, wait=False)
    return struck_s


def _scale_ingress_out_and_in(cluster: DeployedCluster) -> float:
    struck_s = time.monotonic()
    cluster.scale_ingress(3)
    cluster.scale_ingress(1)
    return struck_s


def _roll_ingress(cluster: DeployedCluster) -> float:
    struck_s = time.monotonic()
    cluster.roll_ingress()
    return struck_s


def _roll_model(cluster: DeployedCluster) -> float:
    struck_s = time.monotonic()
    cluster.roll_model()
    return struck_s


def _kill_node(cluster: DeployedCluster) -> float:
    cluster.kill_node()
    return time.monotonic()


CHANGES: tuple[Fault[DeployedCluster], ...] = (
    Fault("scale-down", _scale_down, restore=lambda it: it.scale(it.num_replicas), heals=False),
    Fault(
        "kill-node",
        _kill_node,
        prepare=lambda it: it.add_node(),
        restore=lambda it: it.scale(it.num_replicas),
        heals=False,
    ),
    Fault(
        "scale-ingress",
        _scale_ingress_out_and_in,
        restore=lambda it: it.scale_ingress(2),
        loses_replica=False,
    ),
    Fault("roll-ingress", _roll_ingress, loses_replica=False),
    Fault("roll-model", _roll_model, loses_replica=False),
)
