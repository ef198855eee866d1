"""Who may enter: blocks and slots go by turn, and the running ones keep some blocks to grow.

Starting sequences and imports ask here alike. A refusal is remembered as a claim that everyone whose turn comes later
must leave untouched, so that a large request is not starved by a stream of small ones.
"""

from __future__ import annotations

from baton.actors.engine.block_space import BlockSpace
from baton.actors.engine.sequence import Sequence, Turn


class Room:
    def __init__(self, space: BlockSpace, num_slots: int, *, headroom_blocks: int, max_preemptions: int) -> None:
        self._space = space
        self._headroom_blocks = headroom_blocks
        self._max_preemptions = max_preemptions
        self._free_slots = list(range(num_slots))[::-1]
        self._entered: dict[int, Sequence] = {}  # by slot
        self._claims: dict[Turn, int] = {}  # blocks that were refused

    def enter(self, sequence: Sequence, num_blocks: int) -> bool:
        """Give `sequence` a slot if it and `num_blocks` can be had; the blocks are then the caller's to take."""
        turn = sequence.turn
        earlier = [num for claimant, num in self._claims.items() if claimant < turn]
        needed = num_blocks + sum(earlier) + self._room_to_grow(sequence)
        if needed > self._space.pool.num_available or len(self._free_slots) <= len(earlier):
            self._claims[turn] = num_blocks
            return False
        self.withdraw(sequence)
        sequence.slot = self._free_slots.pop()
        self._entered[sequence.slot] = sequence
        return True

    def leave(self, sequence: Sequence) -> None:
        """Give the slot back. Steps in flight may still use it: the device runs them before its next owner's."""
        del self._entered[sequence.slot]
        self._free_slots.append(sequence.slot)

    def withdraw(self, sequence: Sequence) -> None:
        """Drop the claim of a sequence that no longer wants to enter; fine if there is none."""
        self._claims.pop(sequence.turn, None)

    def _room_to_grow(self, newcomer: Sequence) -> int:
        """Blocks that must stay available beside those the newcomer asks for.

        Some for each who is in; but a sequence that was preempted as often as allowed must be able to run to its end,
        so for it and for all its elders, who could take its blocks, it is all they may still come to need.
        """
        entered = self._entered.values()
        guarded = [seq.rank for seq in (*entered, newcomer) if seq.num_preemptions >= self._max_preemptions]
        if not guarded:
            return self._headroom_blocks * len(entered)
        youngest = max(guarded)
        need = sum(self._growth(seq) if seq.rank <= youngest else self._headroom_blocks for seq in entered)
        return need + (self._growth(newcomer) if newcomer.rank <= youngest else 0)

    def _growth(self, sequence: Sequence) -> int:
        """Blocks that the sequence may still come to need beyond those it holds, or enters with."""
        held = max(len(sequence.table.ids), self._space.blocks_for(len(sequence.tokens)))
        return max(0, self._space.blocks_for(sequence.stops.max_len) - held)
