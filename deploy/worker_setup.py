"""What runs first in each Ray worker of a local cluster, through Ray's ``worker_process_setup_hook``.

Ray Serve opens one port a replica for calls between deployments and binds it on every interface, whatever
host was asked for; Shoal's sockets stay on the host that ``--host`` names.
"""

from __future__ import annotations

import os
from typing import Any

HOST_VARIABLE = "SHOAL_HOST"


def bind_to_host() -> None:
    """Make Serve's internal gRPC servers listen on ``SHOAL_HOST``."""
    host = os.environ.get(HOST_VARIABLE)
    if not host:
        return
    from ray._common import tls_utils

    add_port = tls_utils.add_port_to_grpc_server

    def add_port_on_host(server: Any, address: str) -> int:
        return add_port(server, address.replace("[::]", f"[{host}]" if ":" in host else host))

    tls_utils.add_port_to_grpc_server = add_port_on_host
