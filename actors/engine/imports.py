"""Sequences whose prompt KV a peer writes into our blocks: opened, given a place, then adopted or abandoned.

Knows nothing of the peer. Blocks that a peer may still write are handed out again only after `release`; nothing of
an import enters the prefix cache before it is adopted whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton.actors.engine.block_space import BlockSpace, BlockTable
from baton.actors.engine.errors import ImportStateError
from baton.actors.engine.room import Room
from baton.actors.engine.sequence import Sequence, Status


class ImportOpened(NamedTuple):
    skip_blocks: int  # the leading blocks that the local cache has
    num_blocks: int  # all blocks of the prompt
    is_coming: bool  # another sequence is about to bring all that is missing, save the last tokens


class QuarantineKey(NamedTuple):
    """Names the blocks of one abandoned attempt; one request may have several."""

    request_id: str
    attempt: int


@dataclass(slots=True)
class _Import:
    sequence: Sequence
    skip_blocks: int
    has_place: bool = False


class Imports:
    def __init__(self, space: BlockSpace, room: Room) -> None:
        self._space = space
        self._room = room
        self._imports: dict[str, _Import] = {}
        self._quarantines: dict[QuarantineKey, BlockTable] = {}
        self._num_attempts = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._imports

    @property
    def holds_blocks(self) -> bool:
        return bool(self._imports or self._quarantines)

    def tables(self) -> Iterator[BlockTable]:
        yield from (record.sequence.table for record in self._imports.values())
        yield from self._quarantines.values()

    def open(self, sequence: Sequence) -> ImportOpened:
        """Hold what the local cache has of the prompt."""
        num_tokens, block_size = len(sequence.tokens), self._space.block_size
        sequence.hash_blocks(block_size, num_tokens // block_size)
        is_coming = self._space.is_all_coming(sequence.hashes, num_tokens)
        skip_blocks = self._space.match(sequence.hashes, num_tokens).num_blocks
        sequence.table = self._space.open(sequence.hashes, skip_blocks)
        sequence.status = Status.IMPORTING
        self._imports[sequence.request.id] = _Import(sequence, skip_blocks)
        return ImportOpened(skip_blocks, self._space.blocks_for(num_tokens), is_coming)

    def reserve(self, request_id: str) -> tuple[int, ...] | None:
        """Take a slot and the blocks that are missing, or None while there is no room."""
        record = self._find(request_id)
        if record.has_place:
            raise ImportStateError(request_id, "its blocks are reserved already; reserve once per open")
        sequence = record.sequence
        num_new = self._space.blocks_for(len(sequence.tokens)) - record.skip_blocks
        if not self._room.enter(sequence, num_new):
            return None
        self._space.extend(sequence.table, num_new)
        record.has_place = True
        return tuple(sequence.table.ids[record.skip_blocks :])

    def adopt(self, request_id: str) -> Sequence:
        """Return the sequence with all its prompt's KV computed; its full blocks are the caller's to publish."""
        record = self._find(request_id)
        if not record.has_place:
            raise ImportStateError(request_id, "no blocks are reserved; call reserve_import until it returns them")
        del self._imports[request_id]
        sequence = record.sequence
        sequence.num_computed = sequence.num_scheduled = len(sequence.tokens)
        sequence.cached_tokens = sequence.request.prompt_len
        return sequence

    def abandon(self, request_id: str, *, quarantine: bool) -> QuarantineKey | None:
        """Give up. With `quarantine` the reserved blocks, if any, stay held under the returned key."""
        record = self._find(request_id)
        del self._imports[request_id]
        sequence, table = record.sequence, record.sequence.table
        sequence.status = Status.FINISHED
        self._room.withdraw(sequence)
        self._space.forsake(table)
        if record.has_place:
            self._room.leave(sequence)
        if not (quarantine and record.has_place):
            self._space.close(table, sequence.last_step)
            return None
        self._num_attempts += 1
        key = QuarantineKey(request_id, self._num_attempts)
        self._quarantines[key] = BlockTable(table.ids[record.skip_blocks :], is_private=True)
        self._space.close(BlockTable(table.ids[: record.skip_blocks], table.path), sequence.last_step)
        return key

    def release(self, key: QuarantineKey) -> None:
        """Nobody writes these blocks any more. Fine if they were released before."""
        table = self._quarantines.pop(key, None)
        if table is not None:
            self._space.close(table, after_step=0)

    def _find(self, request_id: str) -> _Import:
        record = self._imports.get(request_id)
        if record is None:
            raise ImportStateError(request_id, "not open; call open_import first")
        return record
