"""All KV blocks of one worker: who is free, cached or held. Every operation is O(1) per block.

Knows no tokens and no sequences. Whoever holds a cached block also holds the blocks before it in its prefix and lets
go of the deepest first; so the cached blocks, in the order in which they were let go, never show a parent before
its child, and the least recently used one is always a leaf of the radix tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from baton.actors.engine.block import Block
from baton.actors.engine.errors import IntegrityError
from baton.actors.engine.updates import BlockCounts


class BlockPool:
    def __init__(self, num_blocks: int, on_evict: Callable[[Block], None]) -> None:
        """`on_evict` is told of each cached block just before it is freed, while it still has its hash."""
        self._blocks = [Block(id) for id in range(num_blocks)]
        self._free = self._blocks[::-1]
        self._cached: OrderedDict[int, Block] = OrderedDict()  # least recently used first
        self._on_evict = on_evict

    def __getitem__(self, id: int) -> Block:
        return self._blocks[id]

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        total, free, cached = len(self._blocks), len(self._free), len(self._cached)
        return BlockCounts(total=total, free=free, cached=cached, held=total - free - cached)

    def allocate(self, num: int) -> list[Block]:
        """Hold `num` blocks, evicting the least recently used where no free one is left."""
        assert num <= self.num_available, f"{num} blocks wanted, {self.num_available} available"
        if num > len(self._free):
            self._evict(num - len(self._free))
        blocks = [self._free.pop() for _ in range(num)]
        for block in blocks:
            block.num_refs = 1
        return blocks

    def hold(self, blocks: Iterable[Block]) -> None:
        """Add a reference to cached or held blocks."""
        for block in blocks:
            if block.num_refs == 0:
                del self._cached[block.id]
            block.num_refs += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop a reference of each; of a cached prefix, the deepest block must come first."""
        for block in blocks:
            assert block.num_refs > 0, f"block {block.id} is not held"
            block.num_refs -= 1
            if block.num_refs:
                continue
            if block.hash is None:
                self._free.append(block)
            else:
                self._cached[block.id] = block

    def evict_all(self) -> None:
        self._evict(len(self._cached))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free, cached or held, and only one of these."""
        free = {block.id for block in self._free}
        held = {block.id for block in self._blocks if block.num_refs > 0}
        total = len(self._blocks)
        if not len(free) == len(self._free) or len(free) + len(self._cached) + len(held) != total:
            raise IntegrityError(f"{len(self._free)} free + {len(self._cached)} cached + {len(held)} held != {total}")
        if free & held or free & self._cached.keys() or held & self._cached.keys():
            raise IntegrityError("a block is in two states at once")
        if any(self._blocks[id].hash is not None for id in free):
            raise IntegrityError("a free block has a hash")
        if any(block.hash is None for block in self._cached.values()):
            raise IntegrityError("a cached block has no hash")

    def _evict(self, num: int) -> None:
        for _ in range(num):
            _, block = self._cached.popitem(last=False)
            self._on_evict(block)
            assert block.hash is None, "on_evict must take the hash away"
            self._free.append(block)
