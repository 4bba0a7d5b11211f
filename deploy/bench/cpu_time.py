"""CPU time by kind of process, to say where a token's microseconds go."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

import psutil

_KINDS = {
    "haproxy": "HAProxy",
    "ServeReplica:shoal-ingress": "ingress",
    "ServeReplica:model": "replica",
    "workers.brain": "brain",
    "RankActor": "rank",
    "ProxyActor": "Serve proxy",
    "HAProxyManager": "HAProxy manager",
    "ServeController": "Serve controller",
    "raylet": "Ray daemons",
    "gcs_server": "Ray daemons",
    "dashboard": "Ray daemons",
    "Dashboard": "Ray daemons",
    "RuntimeEnv": "Ray daemons",
}


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of user and system time since each process started, summed by kind."""

    seconds: dict[str, float]

    @staticmethod
    def now() -> CpuTimes:
        """Of all Shoal processes on this machine, and of this one as the client."""
        seconds: dict[str, float] = defaultdict(float)
        for process in psutil.process_iter(["pid", "cmdline", "cpu_times"]):
            kind = _kind_of(process)
            times = process.info["cpu_times"]
            if kind is not None and times is not None:
                seconds[kind] += times.user + times.system
        return CpuTimes(dict(seconds))

    def per_token_us(self, later: CpuTimes, num_tokens: int) -> dict[str, float]:
        """Microseconds a token between two readings; processes that did next to nothing are left out."""
        spent = {kind: later.seconds[kind] - self.seconds.get(kind, 0.0) for kind in later.seconds}
        return {kind: round(1e6 * s / max(num_tokens, 1), 1) for kind, s in sorted(spent.items()) if s > 0}


def _kind_of(process: psutil.Process) -> str | None:
    if process.info["pid"] == os.getpid():
        return "client"
    line = " ".join(process.info["cmdline"] or [])
    return next((kind for word, kind in _KINDS.items() if word in line), None)
