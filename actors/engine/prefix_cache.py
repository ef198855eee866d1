"""The radix tree over whole blocks, keyed by chained content hashes, and the news of it for the router.

A chained hash names its whole prefix, so the tree needs no edges: a block is present only if its parent is. Holds no
references and counts none; the `BlockPool` does. Salts are separate because their root hashes differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from baton.actors.engine.block import Block
from baton.actors.engine.block_hash import BlockHash


class CacheEvents(NamedTuple):
    """Net change since the last take; a parent stands before its children in `stored`."""

    stored: list[BlockHash]
    removed: list[BlockHash]


class Match(NamedTuple):
    """The longest prefix found."""

    num_blocks: int
    num_unheld: int  # how many of them nobody holds: taking them makes so many fewer available


class PrefixCache:
    def __init__(self) -> None:
        self._index: dict[BlockHash, Block] = {}
        self._expected: dict[BlockHash, object] = {}  # who is going to insert them
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def __len__(self) -> int:
        return len(self._index)

    def match(self, hashes: Sequence[BlockHash], limit: int) -> Match:
        """Find how many of the first `limit` blocks are present, in O(log limit). Changes nothing."""
        # Presence is closed under "parent of", and being held too, so both can be bisected.
        index = self._index
        num = bisect_left(hashes, True, hi=limit, key=lambda hash: hash not in index)
        held = bisect_left(hashes, True, hi=num, key=lambda hash: index[hash].num_refs == 0)
        return Match(num, num - held)

    def expect(self, hashes: Sequence[BlockHash], source: object) -> None:
        """`source` is about to compute these: who needs them too had better wait for it."""
        for hash in hashes:
            self._expected.setdefault(hash, source)

    def unexpect(self, hashes: Sequence[BlockHash], source: object) -> None:
        """`source` has given up, or is done."""
        for hash in hashes:
            if self._expected.get(hash) is source:
                del self._expected[hash]

    def is_expected(self, hash: BlockHash) -> bool:
        return hash in self._expected

    def path(self, hashes: Sequence[BlockHash], num_blocks: int) -> list[Block]:
        """Return the blocks of a prefix that `match` found."""
        return [self._index[hash] for hash in hashes[:num_blocks]]

    def insert(self, hash: BlockHash, block: Block) -> Block:
        """Make a full, complete block findable. Returns the block that has the hash: an earlier one, or this."""
        present = self._index.setdefault(hash, block)
        if present is block:
            block.hash = hash
            if hash in self._removed:
                del self._removed[hash]
            else:
                self._stored[hash] = None
        return present

    def forget(self, block: Block) -> None:
        """Take the block's hash away; it cannot be found any more."""
        hash, block.hash = block.hash, None
        assert hash is not None
        del self._index[hash]
        if hash in self._stored:
            del self._stored[hash]
        else:
            self._removed[hash] = None

    def clear(self) -> None:
        for block in list(self._index.values()):
            self.forget(block)

    def take_events(self) -> CacheEvents:
        events = CacheEvents(list(self._stored), list(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def snapshot(self) -> list[BlockHash]:
        """Every hash that can be found now, parents before children."""
        return list(self._index)


class NoCache(PrefixCache):
    """Remembers nothing, so finds nothing, and nothing is worth waiting for."""

    def expect(self, hashes: Sequence[BlockHash], source: object) -> None:
        pass

    def insert(self, hash: BlockHash, block: Block) -> Block:
        return block
