"""The HTTP endpoint as a cluster's configuration names it: the arguments of its Serve application."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from deploy.durations import Seconds
from deploy.refusals import Spec
from deploy.setting_values import BodyBytes
from deploy.settings import Policy


class IngressSpec(Spec):
    """The endpoint: everything about it that does not change without a restart."""

    policy: Policy = "prefix"
    num_cpus: float = Field(1.0, ge=0, le=1024)
    """CPUs that an ingress process counts for where it is placed."""
    max_body_bytes: BodyBytes = 8 << 20
    replica_wait_s: Seconds = Field(120.0, gt=0)
    stall_timeout_s: Seconds = Field(60.0, gt=0)
    drain_timeout_s: Seconds = Field(600.0, ge=0)
    """For the streams of an ingress that leaves; longer than the longest stream."""
    grpc_port: int | None = Field(None, ge=1, le=65535)
    """Port of the gRPC API on every node that has an ingress process. None: no gRPC."""
    api_keys_file: Path | None = None
    """Keys that callers need (``router/tenancy/keys.py``); read again when it changes. None: anybody may call."""
