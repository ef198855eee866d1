"""Random operations on pool, cache and tables, against a model that is a dict of token prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from baton.actors.engine.block_hash import BlockHash, block_hashes, root_hash
from baton.actors.engine.block_space import BlockSpace, BlockTable
from baton.actors.engine.errors import IntegrityError
from baton.actors.engine.prefix_cache import PrefixCache

BLOCK_SIZE = 2
NUM_BLOCKS = 12
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


def hashes_of(tokens: Sequence[int]) -> list[BlockHash]:
    return block_hashes(tokens, BLOCK_SIZE, root_hash(""))


class Reader:
    """What a sequence would be: a table and the tokens it stands for."""

    def __init__(self, tokens: tuple[int, ...], table: BlockTable) -> None:
        self.tokens = tokens
        self.table = table


class SpaceMachine(RuleBasedStateMachine):
    """`content` is the truth about what each block holds, `told` what a router that reads the events believes."""

    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.space = BlockSpace(NUM_BLOCKS, BLOCK_SIZE, PrefixCache())
        self.open: list[Reader] = []
        self.closing: list[tuple[int, Reader]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> the whole prefix that ends with it
        self.told: set[BlockHash] = set()
        self.step = 0

    @rule(target=readers, tokens=prompts)
    def start(self, tokens: tuple[int, ...]) -> Reader:
        hashes = hashes_of(tokens)
        match = self.space.match(hashes, len(tokens))
        assert match.num_blocks <= (len(tokens) - 1) // BLOCK_SIZE
        table = self.space.open(hashes, match.num_blocks)
        for number, id in enumerate(table.ids, 1):  # what is found is what was asked for
            assert self.content[id] == tokens[: number * BLOCK_SIZE]
        reader = Reader(tokens, table)
        self.open.append(reader)
        num_new = self.space.blocks_for(len(tokens)) - match.num_blocks
        if num_new <= self.space.pool.num_available:
            self.space.extend(table, num_new)
            for number, id in enumerate(table.ids, 1):
                self.content[id] = tokens[: number * BLOCK_SIZE]
        return reader

    @rule(reader=readers, share=st.floats(0, 1))
    def publish(self, reader: Reader, share: float) -> None:
        num_full = min(len(reader.tokens) // BLOCK_SIZE, len(reader.table.ids))
        self.space.publish(reader.table, hashes_of(reader.tokens), round(share * num_full))

    @rule(reader=consumes(readers), is_written=st.booleans())
    def close(self, reader: Reader, is_written: bool) -> None:
        self.open.remove(reader)
        after = self.step + 1 if is_written else self.step
        self.space.close(reader.table, after)
        if is_written:
            self.closing.append((after, reader))

    @rule()
    def complete_a_step(self) -> None:
        self.step += 1
        self.space.complete(self.step)
        self.closing = [(after, reader) for after, reader in self.closing if after > self.step]

    @precondition(lambda self: self.step % 3 == 2)
    @rule()
    def flush(self) -> None:
        self.space.flush(reader.table for reader in self.open)
        assert self.space.cache.snapshot() == []

    @rule()
    def take_events(self) -> None:
        events = self.space.cache.take_events()
        assert not self.told & set(events.stored)
        assert set(events.removed) <= self.told
        self.told = self.told - set(events.removed) | set(events.stored)
        assert self.told == set(self.space.cache.snapshot())

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.space.check_integrity(reader.table for reader in self.open)
        counts = self.space.pool.counts()
        assert counts.free + counts.cached + counts.held == counts.total

    @invariant()
    def a_held_block_keeps_its_content(self) -> None:
        for reader in (*self.open, *(reader for _, reader in self.closing)):
            for number, id in enumerate(reader.table.ids, 1):
                assert self.content[id] == reader.tokens[: number * BLOCK_SIZE]

    @invariant()
    def a_prefix_is_found_exactly_as_long_as_all_its_parents_are(self) -> None:
        index = set(self.space.cache.snapshot())
        for number in range(64):
            hashes = hashes_of([number >> bit & 1 for bit in range(6)])
            present = [hash in index for hash in hashes]
            assert present == sorted(present, reverse=True)
            assert self.space.cache.match(hashes, 3).num_blocks == sum(present)

    def teardown(self) -> None:
        for reader in self.open:
            self.space.close(reader.table, self.step)
        self.space.complete(self.step + 1)
        self.space.check_integrity(())
        assert self.space.pool.counts().held == 0


TestSpace = SpaceMachine.TestCase
TestSpace.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_leaf_is_evicted_before_its_parent_and_a_used_path_not_at_all() -> None:
    space = BlockSpace(4, BLOCK_SIZE, PrefixCache())
    hashes = hashes_of((1, 1, 0, 0, 1, 0))
    table = space.open(hashes, 0)
    space.extend(table, 3)
    space.publish(table, hashes, 3)
    space.close(table, 0)
    reader = space.open(hashes, 1)
    other = space.open([], 0)
    space.extend(other, 2)  # one is free, so one must be evicted: the deepest
    assert space.cache.snapshot() == hashes[:2]
    space.extend(other, 1)
    assert space.cache.snapshot() == hashes[:1]
    assert space.pool.num_available == 0
    space.check_integrity((reader, other))


def test_a_duplicate_stays_private_and_is_freed_at_its_end() -> None:
    space = BlockSpace(6, BLOCK_SIZE, PrefixCache())
    hashes = hashes_of((1, 1, 0, 0))
    first, second = BlockTable(), BlockTable()
    for table in (first, second):
        space.extend(table, 2)
        space.publish(table, hashes, 2)
    assert set(first.ids).isdisjoint(second.ids)
    space.close(first, 0)
    assert space.pool.counts().held == 4  # the second table leans on the first one's path
    space.close(second, 0)
    assert (space.pool.counts().free, space.pool.counts().cached) == (4, 2)
    space.check_integrity(())


def test_blocks_that_a_step_in_flight_writes_come_back_when_it_has_ended() -> None:
    space = BlockSpace(3, BLOCK_SIZE, PrefixCache())
    table = BlockTable()
    space.extend(table, 2)
    space.close(table, after_step=5)
    assert (space.pool.num_available, space.num_returning) == (1, 2)
    space.complete(4)
    assert space.pool.num_available == 1
    space.complete(5)
    assert (space.pool.num_available, space.num_returning) == (3, 0)


def test_a_forgotten_table_breaks_the_integrity_check() -> None:
    space = BlockSpace(3, BLOCK_SIZE, PrefixCache())
    space.extend(BlockTable(), 1)
    with pytest.raises(IntegrityError, match="other reference counts"):
        space.check_integrity(())
