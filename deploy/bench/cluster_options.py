"""What the commands that measure a cluster of their own check before they start it, which takes most of a minute."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.engine.errors import InvalidRequest

MOST_STREAMS = 28_000
"""Ports of one address for connections, by Linux's default (ip_local_port_range)."""
_OTHER_FILES = 100
"""What a command has open besides its connections."""


def check_cluster(settings: Mapping[str, Any]) -> None:
    """Return if a cluster of these settings can start here, as far as can be told without starting one.

    Args:
        settings: by the names of ``shoal serve``'s flags.

    Raises:
        UserError: there is no such model, or a setting does not fit it or this machine.
    """
    from deploy.preflight import check_cluster as check
    from deploy.settings import make_settings
    from workers.checkpoint.model_config import read_model_config
    from workers.checkpoint.source import resolve_model

    known = make_settings(**settings)
    files = resolve_model(known.model, known.source)
    check(known, files, read_model_config(files, known.model_impl))


def check_streams(num_streams: int) -> None:
    """Return if one process can hold so many connections.

    Raises:
        InvalidRequest: it cannot.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_streams > MOST_STREAMS:
        raise InvalidRequest(
            f"--streams is {num_streams}, one address has ports for {MOST_STREAMS} connections: lower it",
            "streams",
        )
    if files != resource.RLIM_INFINITY and num_streams > files - _OTHER_FILES:
        raise InvalidRequest(
            f"--streams is {num_streams}, this process may open {files} files: lower it, or raise that (ulimit -n)",
            "streams",
        )


def model_from_anywhere(model: str | None) -> str | None:
    """``model``, by its full path if it is one here: a cluster's processes run in another folder."""
    return str(Path(model).absolute()) if model is not None and Path(model).exists() else model
