"""Many decode steps at once, where nothing but decoding can happen: what makes a simulated day affordable.

While nobody arrives, ends or lacks a block, a step gives each running sequence one token and changes nothing else. So
`leap` adds many tokens to each at a time, and leaves the engine as so many single steps would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baton.actors.engine.block_hash import BlockHash
from baton.actors.engine.engine import Engine
from baton.actors.engine.request import Request
from baton.actors.engine.sequence import Sequence
from baton.actors.engine.updates import Update
from baton.actors.step_cost import StepCost, StepShape


class Stretch(NamedTuple):
    """Steps of which each takes a little longer than the one before, as the KV that they read grows."""

    num_steps: int
    first_ms: float
    growth_ms: float

    def total_ms(self, num_steps: int) -> float:
        return num_steps * (self.first_ms + 0.5 * self.growth_ms * (num_steps - 1))

    def steps_until(self, elapsed_ms: float) -> int:
        """Return how many steps have ended when the step that runs at `elapsed_ms` ends."""
        mean = self.first_ms - 0.5 * self.growth_ms
        root = (mean * mean + 2 * self.growth_ms * elapsed_ms) ** 0.5
        num = int(2 * elapsed_ms / (mean + root))
        while self.total_ms(num) < elapsed_ms or num < 1:
            num += 1
        return min(num, self.num_steps)


class LeapingEngine(Engine):
    """An engine without overlap, between two of its steps. `hashes` holds those of the prompts, by request id."""

    hashes: Mapping[str, list[BlockHash]]

    def stretch(self, cost: StepCost) -> Stretch | None:
        """Return the steps for which nothing but decoding can happen, or None if the next may be different."""
        sequences = self._decoding()
        if not sequences:
            return None
        num_steps = min(seq.stops.max_len - len(seq.tokens) for seq in sequences) - 1
        if num_steps < 2 or sum(self._num_new(seq, num_steps) for seq in sequences) > self._space.pool.num_available:
            return None
        shape = StepShape(num_decodes=len(sequences), decode_tokens=sum(seq.num_scheduled for seq in sequences))
        return Stretch(num_steps, cost.step_ms(shape), cost.decode_token_ms * len(sequences))

    def leap(self, num_steps: int, token: int) -> list[Update]:
        """Take so many steps of the stretch at once, each sampling `token` for every sequence."""
        tokens = (token,) * num_steps
        block_size = self._space.block_size
        updates: list[Update] = []
        for seq in self._decoding():
            if num_new := self._num_new(seq, num_steps):
                self._space.extend(seq.table, num_new)
            seq.tokens.extend(tokens)
            seq.num_scheduled += num_steps
            seq.num_computed = seq.num_scheduled
            num_full = seq.num_computed // block_size
            if num_full > len(seq.table.path):
                seq.hash_blocks(block_size, num_full)
                self._space.publish(seq.table, seq.hashes, num_full)
            updates.append(Update(seq.request.id, tokens=tokens))
        return updates

    def _sequence(self, request: Request, *, export: bool) -> Sequence:
        sequence = super()._sequence(request, export=export)
        sequence.hashes.extend(self.hashes[request.id])
        return sequence

    def _num_new(self, sequence: Sequence, num_steps: int) -> int:
        return self._space.blocks_for(sequence.num_scheduled + num_steps) - len(sequence.table.ids)

    def _decoding(self) -> list[Sequence]:
        """Return the running sequences if they are all that the next step is about."""
        return [] if self._adopted or self._queued else self._scheduler.decoding
