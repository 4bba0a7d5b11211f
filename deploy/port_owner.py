"""Which process has a port, or a name that drivers claim, as far as this user may know."""

from __future__ import annotations

import psutil


def port_owner(port: int) -> str:
    """Who listens on ``port``, to be put into a sentence: `` by haproxy (process 7)``; empty if it cannot be known."""
    for one in _connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
            return f" by {_name(one.pid)} (process {one.pid})"
    return ""


def claim_owner(name: str) -> str:
    """Who holds the abstract socket ``name``, likewise: `` (process 7)``, or nothing."""
    for one in _connections("unix"):
        if one.laddr == f"@{name}" and one.pid:
            return f" (process {one.pid})"
    return ""


def _connections(kind: str) -> list[psutil._common.sconn]:
    try:
        return psutil.net_connections(kind)
    except (psutil.Error, OSError):  # a Mac lets only root look
        return []


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "a process that has ended"
