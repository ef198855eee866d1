from __future__ import annotations

import pytest

from baton.actors.engine.block import Block
from baton.actors.engine.block_hash import BlockHash
from baton.actors.engine.block_pool import BlockPool
from baton.actors.engine.errors import IntegrityError
from baton.actors.engine.updates import BlockCounts


def make_pool(num_blocks: int, evicted: list[int] | None = None) -> BlockPool:
    def on_evict(block: Block) -> None:
        block.hash = None
        if evicted is not None:
            evicted.append(block.id)

    return BlockPool(num_blocks, on_evict)


def test_a_block_is_free_again_only_when_its_last_holder_lets_go() -> None:
    pool = make_pool(2)
    [block] = pool.allocate(1)
    pool.hold([block])
    pool.release([block])
    assert pool.counts() == BlockCounts(total=2, free=1, cached=0, held=1)
    pool.release([block])
    assert pool.counts() == BlockCounts(total=2, free=2, cached=0, held=0)


def test_a_block_with_a_hash_stays_cached_and_is_evicted_least_recently_used_first() -> None:
    evicted: list[int] = []
    pool = make_pool(3, evicted)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        block.hash = BlockHash(bytes([number]))
    pool.release(blocks)
    pool.hold([blocks[0]])  # used once more, so it is now the most recent
    pool.release([blocks[0]])
    assert pool.counts() == BlockCounts(total=3, free=0, cached=3, held=0)
    pool.allocate(2)
    assert evicted == [blocks[1].id, blocks[2].id]
    pool.check_integrity()


def test_allocating_more_than_is_available_is_refused() -> None:
    pool = make_pool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 available"):
        pool.allocate(2)


def test_releasing_a_block_that_nobody_holds_is_refused() -> None:
    pool = make_pool(1)
    with pytest.raises(AssertionError, match="not held"):
        pool.release([pool[0]])


def test_a_reference_nobody_took_breaks_the_integrity_check() -> None:
    pool = make_pool(2)
    pool[1].num_refs = 1
    with pytest.raises(IntegrityError, match="2 free"):
        pool.check_integrity()
