"""Content hashes of KV blocks: equal bytes in every process, for every peer.

A block's hash chains its parent's, so one hash names a whole prefix. The root separates namespaces (cache salt,
adapter, weights version). Canonical encoding: length-prefixed UTF-8 fields for the root, little-endian int32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

import numpy as np

BlockHash = NewType("BlockHash", bytes)

DIGEST_BYTES = 16


def root_hash(salt: str = "", adapter: str = "") -> BlockHash:
    """Hash the namespace of a chain; workers and routers must agree on it, so they all call this."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for field in (salt, adapter):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return BlockHash(digest.digest())


def child_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Hash one full block of tokens that follows `parent`."""
    data = np.asarray(tokens, dtype="<i4").tobytes()
    return BlockHash(blake2b(parent + data, digest_size=DIGEST_BYTES).digest())


def block_hashes(tokens: Sequence[int], block_size: int, root: BlockHash) -> list[BlockHash]:
    """Hash every full block of `tokens`, first to last; a partial tail has no hash."""
    data = np.asarray(tokens, dtype="<i4").tobytes()
    stride = 4 * block_size
    hashes: list[BlockHash] = []
    parent = root
    for end in range(stride, len(data) + 1, stride):
        parent = BlockHash(blake2b(parent + data[end - stride : end], digest_size=DIGEST_BYTES).digest())
        hashes.append(parent)
    return hashes
