"""Empties this Ray node before it is taken away: ``python -m deploy.drain_node``, a Pod's preStop hook.

Ray is told first, so that Serve starts replicas elsewhere and places nothing here; then this waits until no
request passes through the node any more, by the counts of its own ingress processes and of its HAProxy. Requests
that are computed here for an ingress elsewhere need no waiting: it goes on with them at another replica.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deploy.durations import seconds

IN_FLIGHT = "shoal_requests_in_flight"
HAPROXY_SESSIONS = "haproxy_backend_current_sessions"
_POLL_S = 1.0
_NUM_QUIET = 3
"""Polls in a row without a request until the node counts as empty: endpoints are taken off Services with a delay."""

Fetch = Callable[[str], str | None]


def num_requests(metrics: str | None, name: str) -> float:
    """Sum of gauge ``name`` in a metrics page; 0 where there is no page, so no process."""
    if metrics is None:
        return 0.0
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name
    )


def wait_until_empty(
    pages: dict[str, str],
    timeout_s: float,
    settle_s: float,
    fetch: Fetch,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the gauges in ``pages`` (URL -> name) are all zero.

    Args:
        settle_s: wait at least so long, since traffic still arrives at first.

    Returns:
        False if ``timeout_s`` came first.
    """
    started_s = clock()
    num_quiet = 0
    while True:
        busy = sum(num_requests(fetch(url), name) for url, name in pages.items())
        num_quiet = 0 if busy else num_quiet + 1
        elapsed_s = clock() - started_s
        if num_quiet >= _NUM_QUIET and elapsed_s >= settle_s:
            return True
        if elapsed_s >= timeout_s:
            return False
        sleep(_POLL_S)


def tell_ray(timeout_s: float) -> str:
    """Ask Ray to drain this node; the answer in one line. A head cannot be drained and stays as it is."""
    done = subprocess.run(
        [
            *("ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "the node is about to be taken away"),
            *("--deadline-remaining-seconds", str(int(timeout_s))),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"ray drain-node ended with {done.returncode}"


def _fetch(url: str) -> str | None:
    try:
        answer = httpx.get(url, timeout=5.0)
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == 200 else None


def main() -> None:
    """Drain; always end with success, since a Pod is taken away whatever its hook says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout-s", type=seconds, required=True, help="after which it gives up waiting")
    parser.add_argument("--settle-s", type=seconds, default=15.0)
    parser.add_argument("--metrics", default="http://127.0.0.1:9400/metrics")
    parser.add_argument("--haproxy", default="http://127.0.0.1:9101/metrics")
    options = parser.parse_args()
    print(tell_ray(options.timeout_s), file=sys.stderr)
    pages = {options.metrics: IN_FLIGHT, options.haproxy: HAPROXY_SESSIONS}
    is_empty = wait_until_empty(pages, options.timeout_s, options.settle_s, _fetch)
    print("no request passes here any more" if is_empty else "gave up waiting", file=sys.stderr)


if __name__ == "__main__":
    main()
