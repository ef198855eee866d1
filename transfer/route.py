"""Which ranks of a peer share heads with one of ours, and in what form blocks go to them.

block size   larger or smaller there: our tokens are packed into blocks of its size
more ranks   each takes a part of our heads: packed apart, and sent to each
fewer ranks  our block is one of the stretches that make one of its: it lies there until the receiver joins the heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.transfer.actions import SourceBlock
from baton.transfer.mover import Incarnation, MemoryDescriptor, TransferError

SLICES = 64  # of a block; a compressed one fills the first few


@dataclass(frozen=True, slots=True)
class Route:
    """From one rank of ours to those of a peer that share heads with it; the same ones write to us.

    Of `parts` and `stretches` one is 1: our heads go to so many ranks there, or are one of so many that one has.
    """

    ranks: range
    parts: int
    stretches: int
    stretch: int  # which of them is ours
    block_size: int  # the peer's
    compressed: int  # see MemoryDescriptor

    @property
    def form(self) -> tuple[int, int, int]:
        """What blocks look like that go this way."""
        return (self.block_size, self.parts, self.compressed)

    @property
    def pieces(self) -> int:
        """How many equal ones each of the peer's blocks is counted as."""
        return self.stretches * (SLICES if self.compressed else 1)

    def places(self, blocks: np.ndarray) -> np.ndarray:
        """Name the pieces of the peer's blocks that are ours to write."""
        stretches = blocks * self.stretches + self.stretch
        if not self.compressed:
            return stretches
        return (stretches[:, None] * SLICES + np.arange(self.compressed)).reshape(-1)

    @classmethod
    def find(
        cls, peer: Incarnation, memory: MemoryDescriptor, *, rank: int, world: int, block_size: int, block_bytes: int
    ) -> Route:
        """`block_bytes` is of all our ranks together. Raises TransferError where neither side's cut divides."""
        theirs = len(memory.ranks)
        for here, there, what in (
            (block_bytes, memory.total_block_bytes, "block_bytes"),
            (world, theirs, "tensor_parallel"),
        ):
            if max(here, there) % min(here, there):
                raise TransferError(f"{what} is {here} here but {there} at peer {peer}: neither divides the other")
        size = block_size * memory.total_block_bytes // block_bytes
        if theirs >= world:
            parts = theirs // world
            return cls(range(rank * parts, (rank + 1) * parts), parts, 1, 0, size, memory.compressed)
        stretches = world // theirs
        first = rank // stretches
        return cls(range(first, first + 1), 1, stretches, rank % stretches, size, memory.compressed)


def source_blocks(blocks: Sequence[int], ours: int, theirs: int) -> Sequence[SourceBlock]:
    """Name what of our `blocks` (in token order, `ours` tokens each) fills each block of `theirs` tokens, in order.

    Theirs are larger: several of our blocks; where the last lacks some, -1. Smaller: one number, block * (ours //
    theirs) + which part of it. Equal: the blocks themselves.
    """
    if theirs == ours:
        return blocks
    if theirs > ours:
        per_block = theirs // ours
        padded = (*blocks, *[-1] * (-len(blocks) % per_block))
        return tuple(padded[start : start + per_block] for start in range(0, len(padded), per_block))
    num_parts = ours // theirs
    return tuple((block * num_parts + part,) for block in blocks for part in range(num_parts))
