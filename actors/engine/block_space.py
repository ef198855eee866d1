"""Block tables over one pool and one prefix cache: open on a cached prefix, extend, publish, close.

The only place where references are taken and dropped. Knows steps by number, so that a block which a launched step
still writes is not given away before that step has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.actors.engine.block import Block
from baton.actors.engine.block_hash import BlockHash
from baton.actors.engine.block_pool import BlockPool
from baton.actors.engine.errors import IntegrityError
from baton.actors.engine.prefix_cache import Match, PrefixCache


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, append-only.

        ids   [ b0 | b1 | b2 | b3 | b4 ]      where the KV lies
        path  [ b0 | b1'| b2 ]                 what the cache answers for the same hashes

    A reference is held on every block of both. `b1'` differs from `b1` when another sequence published the same
    content first: `b1` stays private to this table, and the path stays whole, which the pool's eviction order needs.
    """

    ids: list[int] = field(default_factory=list[int])
    path: list[Block] = field(default_factory=list[Block])
    expected: list[BlockHash] = field(default_factory=list[BlockHash])  # of the blocks it is going to publish
    is_private: bool = False  # its content must not be published: the cache was flushed after it was computed

    @property
    def duplicates(self) -> list[int]:
        """Own blocks whose content the cache has in another block, which this table holds too."""
        return [id for id, block in zip(self.ids, self.path, strict=False) if id != block.id]


class BlockSpace:
    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache, num_recomputed: int = 0) -> None:
        """`num_recomputed`: blocks at the end of every match that are computed anew all the same."""
        self._num_recomputed = num_recomputed
        self.block_size = block_size
        self.cache = cache
        self.pool = BlockPool(num_blocks, on_evict=cache.forget)
        self._completed_step = 0
        self._closing: deque[tuple[int, BlockTable]] = deque()  # by the step that they wait for, ascending

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_returning(self) -> int:
        """Blocks that become available when the steps in flight end."""
        return sum(self.pool[id].num_refs == 1 for _, table in self._closing for id in table.ids)

    def is_in_flight(self, step: int) -> bool:
        return step > self._completed_step

    def match(self, hashes: Sequence[BlockHash], num_tokens: int) -> Match:
        """Match whole blocks, leaving at least the last of `num_tokens` to compute: its logits are needed."""
        match = self.cache.match(hashes, (num_tokens - 1) // self.block_size)
        if not self._num_recomputed:
            return match
        return self.cache.match(hashes, max(0, match.num_blocks - self._num_recomputed))

    def open(self, hashes: Sequence[BlockHash], num_blocks: int) -> BlockTable:
        """Start a table on `num_blocks` matched blocks; the rest of `hashes` it is going to publish."""
        path = self.cache.path(hashes, num_blocks)
        self.pool.hold(path)
        table = BlockTable([block.id for block in path], path, list(hashes[num_blocks:]))
        self.cache.expect(table.expected, table)
        return table

    def is_coming(self, hashes: Sequence[BlockHash], num_tokens: int) -> bool:
        """Whether the first block that `match` does not find is about to be published by an open table."""
        limit = (num_tokens - 1) // self.block_size
        num_blocks = self.cache.match(hashes, limit).num_blocks
        return num_blocks < limit and self.cache.is_expected(hashes[num_blocks])

    def is_all_coming(self, hashes: Sequence[BlockHash], num_tokens: int) -> bool:
        """Whether all that can be matched of these tokens is about to be published by open tables, or is there."""
        num_blocks = (num_tokens - 1) // self.block_size
        return num_blocks > 0 and self.cache.is_expected(hashes[num_blocks - 1])

    def forsake(self, table: BlockTable) -> None:
        """The table publishes no more than it has: whoever waits for it need not."""
        self.cache.unexpect(table.expected, table)

    def extend(self, table: BlockTable, num_blocks: int) -> None:
        table.ids.extend(block.id for block in self.pool.allocate(num_blocks))

    def publish(self, table: BlockTable, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Let the cache find the table's first `num_blocks` blocks: full, and complete on the device."""
        if table.is_private:
            return
        for position in range(len(table.path), num_blocks):
            own = self.pool[table.ids[position]]
            present = self.cache.insert(hashes[position], own)
            if present is not own:
                self.pool.hold((present,))
            table.path.append(present)
            self.cache.unexpect(hashes[position : position + 1], table)

    def close(self, table: BlockTable, after_step: int) -> None:
        """Let go of the table once `after_step`, the last step that writes it, has ended. The table is dead."""
        self.forsake(table)
        if self.is_in_flight(after_step):
            self._closing.append((after_step, table))
        else:
            self._release(table)

    def complete(self, step: int) -> None:
        """`step` and all before it have ended on the device."""
        self._completed_step = step
        while self._closing and self._closing[0][0] <= step:
            self._release(self._closing.popleft()[1])

    def flush(self, tables: Iterable[BlockTable]) -> None:
        """Forget every cached prefix; `tables` are all that are open, and go on without publishing."""
        for table in tables:
            table.is_private = True
            self.forsake(table)
        self.pool.evict_all()
        self.cache.clear()

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise IntegrityError unless the references are exactly those of `tables`, all that are open."""
        self.pool.check_integrity()
        refs = [0] * self.pool.num_blocks
        for table in (*tables, *(table for _, table in self._closing)):
            for block in (*table.path, *self._private(table)):
                refs[block.id] += 1
        wrong = [id for id, num in enumerate(refs) if self.pool[id].num_refs != num]
        if wrong:
            raise IntegrityError(f"blocks {wrong} have other reference counts than the open tables explain")

    def _release(self, table: BlockTable) -> None:
        self.pool.release(reversed(table.path))
        self.pool.release(self._private(table))

    def _private(self, table: BlockTable) -> list[Block]:
        """Blocks that the table references beside its path."""
        return [self.pool[id] for id in (*table.duplicates, *table.ids[len(table.path) :])]
