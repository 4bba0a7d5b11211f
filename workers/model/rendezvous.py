"""Where the ranks of one host meet: a file, since torch's TCP store would listen on every interface.

torch takes the file away when the last rank has let go of it, but not when one was killed; so whoever ends a group
forgets its rendezvous as well. Knows no torch.
"""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

_FILE = "file://"


def new_rendezvous() -> str:
    """An address that ranks of this host can meet at, and nobody else has."""
    return f"{_FILE}{tempfile.gettempdir()}/shoal-rendezvous-{secrets.token_hex(8)}"


def is_of_one_host(rendezvous: str) -> bool:
    """True if it is one of ``new_rendezvous``."""
    return rendezvous.startswith(_FILE)


def forget_rendezvous(rendezvous: str | None) -> None:
    """Leave nothing of it on this host. Safe to call twice, and for addresses that leave nothing."""
    if rendezvous is not None and is_of_one_host(rendezvous):
        Path(rendezvous.removeprefix(_FILE)).unlink(missing_ok=True)
