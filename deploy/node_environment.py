"""What every Ray node of a cluster must have in its environment before Ray starts there, and why.

``shoal serve`` sets it by itself, the Helm chart in its Pods (a test compares the two). For hosts of one's own it is
printed for a shell: ``eval "$(python -m deploy.node_environment)"; ray start --head``.
"""

from __future__ import annotations

import shlex

LONGEST_STREAM_S = 3600


def node_environment(longest_stream_s: int = LONGEST_STREAM_S) -> dict[str, str]:
    """Names and values; those of one machine's ports and folders are not among them.

    Args:
        longest_stream_s: what HAProxy must let an old connection live after a reload.
    """
    return {
        # HAProxy before the ingress: a third of the CPU a token of Serve's own proxy
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # by default our code has a thread beside that of HTTP, and each token hops from one to the other
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # Serve's own errors are plain text, and HTTP/1.0 clients get chunks
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "router.outer_layer:middlewares",
        # by default HAProxy cuts what is older than 120 s at each reload
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(longest_stream_s + 60),
        # by default load reaches the autoscaling policy every 10 s
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        # by default one that has not answered three health checks gets its whole draining time, though it hears nothing
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # the replica actor claims no GPU and must still see those of its placement group
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray's default of 15 lets anything else on the machine go before
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def main() -> None:
    """Print lines for ``eval``."""
    for name, value in node_environment().items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
