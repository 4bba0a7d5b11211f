"""Chained hashes of full blocks: equal hash means equal tokens and equal everything before them.

BLAKE2b with 128-bit digests over the parent's digest and the block's token ids as little-endian int32.
Stable across processes and machines; the ingress computes them once, replicas register them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def make_root(*parts: str | bytes) -> bytes:
    """Digest of everything that must agree for two equal token blocks to hold the same KV.

    Parts are length-prefixed, so ("ab", "c") and ("a", "bc") differ.
    """
    digest = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of one full block that follows the chain ``parent``."""
    return blake2b(parent + struct.pack(f"<{len(token_ids)}i", *token_ids), digest_size=HASH_BYTES).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Digests of all full blocks of ``token_ids``, first to last; a partial tail has none."""
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
