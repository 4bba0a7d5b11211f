"""Where the ranks of one host meet: a file, since torch's TCP store would listen on every interface.

torch takes the file away when the last rank has let go of it, but not when one was killed; so whoever ends a group
forgets its rendezvous as well. Where all were killed at once nobody can: the file's name tells who owned it, and the
next group to start takes away what no living process owns. Knows no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from pathlib import Path

import psutil

_FILE = "file://"
_NAME = re.compile(r"shoal-rendezvous-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{16}")
_SAME_START_S = 60.0
"""A process's start is told by a clock that may be set meanwhile."""


def new_rendezvous() -> str:
    """An address that ranks of this host can meet at, and nobody else has; the calling process owns it.

    Those of owners that ended without a word are taken away.
    """
    folder = Path(tempfile.gettempdir())
    _forget_ownerless(folder)
    own = psutil.Process()
    owner = f"{_namespace()}-{own.pid}-{own.create_time():.0f}"
    return f"{_FILE}{folder}/shoal-rendezvous-{owner}-{secrets.token_hex(8)}"


def is_of_one_host(rendezvous: str) -> bool:
    """True if it is one of ``new_rendezvous``."""
    return rendezvous.startswith(_FILE)


def forget_rendezvous(rendezvous: str | None) -> None:
    """Leave nothing of it on this host. Safe to call twice, and for addresses that leave nothing."""
    if rendezvous is not None and is_of_one_host(rendezvous):
        Path(rendezvous.removeprefix(_FILE)).unlink(missing_ok=True)


def _forget_ownerless(folder: Path) -> None:
    for path in folder.glob("shoal-rendezvous-*"):
        name = _NAME.fullmatch(path.name)
        # A process of another container cannot be seen from here, however alive.
        if name is None or int(name["namespace"]) != _namespace():
            continue
        if not _lives(int(name["pid"]), int(name["started"])):
            with contextlib.suppress(OSError):  # another user's, or taken away meanwhile
                path.unlink()


def _lives(pid: int, started_s: int) -> bool:
    """Whether that process is there, and is no later one of the same number."""
    try:
        return abs(psutil.Process(pid).create_time() - started_s) < _SAME_START_S
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _namespace() -> int:
    """Where process ids mean what they mean here; 0 on systems that have one such space alone."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
