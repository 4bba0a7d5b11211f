"""How much memory this host, or the container around this process, has; and what KV tiers may take of it."""

from __future__ import annotations

import math
import os
from pathlib import Path

from workers.engine.errors import InvalidRequest

_GIB = 1 << 30
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Of versions 2 and 1; "max" or a number beyond any memory where there is none."""


def host_memory_bytes() -> int:
    """Memory that processes here can have together."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # not this version, or no limit
    return min(limits)


def check_host_memory(
    kv_bytes: int, swap_bytes: int, num_ranks: int = 1, kv_setting: str = "kv_cache_gib"
) -> None:
    """Return if ``num_ranks`` ranks of this host can have that much memory each for their two tiers of KV blocks.

    Pages are given out when first written: what does not fit would end processes under load, not at start.

    Args:
        kv_bytes: of a rank's pool, where that is host memory; else 0.
        swap_bytes: of a rank's host tier.
        kv_setting: which setting says the former.

    Raises:
        InvalidRequest: it is more than there is; names the larger of the two.
    """
    have, wanted = host_memory_bytes(), num_ranks * (kv_bytes + swap_bytes)
    if wanted <= have:
        return
    flag, param, size = max(
        ("--swap-space", "swap_space", swap_bytes),
        ("KV blocks", kv_setting, kv_bytes),
        key=lambda one: one[2],
    )
    others = kv_bytes + swap_bytes - size
    # Rounded down: what is advised must do.
    most = math.floor(max(have // num_ranks - others, 0) / _GIB * 10) / 10
    ranks = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    if param == kv_setting:
        what = f"{_gib(size)} GiB of KV blocks{ranks}"
        way = "lower --kv-cache-gib or --num-gpu-blocks-override"
    else:
        what, way = f"{flag} {_gib(size)} (GiB){ranks}", "lower it"
    raise InvalidRequest(
        f"{what} is more than this machine's {_gib(have)} GiB of memory hold: {way}, to {most:,.15g} GiB at most",
        param,
    )


def _gib(num_bytes: int) -> str:
    """Gibibytes without an exponent, as one would write them."""
    gib = num_bytes / _GIB
    return f"{round(gib, 1 if gib >= 1 else 3):,.15g}"
