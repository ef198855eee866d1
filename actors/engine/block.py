"""One page of the KV cache. Owned by the `BlockPool`; nobody else changes `num_refs`."""

from __future__ import annotations

from dataclasses import dataclass

from baton.actors.engine.block_hash import BlockHash


@dataclass(slots=True, eq=False)
class Block:
    """Free (no references, no hash), cached (no references, a hash) or held (references)."""

    id: int
    num_refs: int = 0
    hash: BlockHash | None = None  # set exactly while the prefix cache can find the block
