"""A batch as the plain lists that a step starts from, one entry for each of the step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.actors.engine.batch import Row
from baton.kernels.attention import StepLayout

UNKNOWN = -1  # in place of a token id that only the device knows


class StepFields(NamedTuple):
    tokens: list[int]  # id, or UNKNOWN: what the sequence slot sampled last
    positions: list[int]
    cache_slots: list[int]  # block * block_size + offset; -1 = store nothing
    slots: list[int]  # sequence slot

    def pad(self, num_tokens: int, no_slot: int) -> None:
        """Append tokens that change nothing, up to `num_tokens`. `no_slot` is a sequence slot that nobody has."""
        missing = num_tokens - len(self.tokens)
        for values, filler in zip(self, (0, 0, -1, no_slot), strict=True):
            values += [filler] * missing


class SampledAfter(NamedTuple):
    """Parallel to the rows that sample."""

    tokens: list[int]  # which of the step's tokens is sampled after
    positions: list[int]  # of the token to be sampled
    slots: list[int]


def step_fields(rows: Sequence[Row], block_size: int) -> StepFields:
    fields = StepFields([], [], [], [])
    for row in rows:
        fields.tokens.extend(row.tokens)
        if len(row.tokens) < row.num_tokens:
            fields.tokens.append(UNKNOWN)
        fields.positions.extend(range(row.start, row.end))
        fields.cache_slots.extend(_cache_slots(row, block_size))
        fields.slots.extend([row.slot] * row.num_tokens)
    return fields


def sampled_after(rows: Sequence[Row]) -> SampledAfter:
    sampled = SampledAfter([], [], [])
    num_tokens = 0
    for row in rows:
        num_tokens += row.num_tokens
        if row.sample:
            sampled.tokens.append(num_tokens - 1)
            sampled.positions.append(row.end)
            sampled.slots.append(row.slot)
    return sampled


def step_layout(rows: Sequence[Row], block_size: int) -> StepLayout:
    num_decodes = next((i for i, row in enumerate(rows) if row.num_tokens != 1), len(rows))
    return StepLayout(
        query_lens=[row.num_tokens for row in rows],
        kv_lens=[row.end for row in rows],
        block_tables=[list(row.blocks[: -(-row.end // block_size)]) for row in rows],
        num_decodes=num_decodes,
    )


def _cache_slots(row: Row, block_size: int) -> list[int]:
    first, offset = divmod(row.start, block_size)
    if row.num_tokens == 1:
        return [row.blocks[first] * block_size + offset]
    blocks = row.blocks[first : -(-row.end // block_size)]
    slots = [place for block in blocks for place in range(block * block_size, (block + 1) * block_size)]
    return slots[offset : offset + row.num_tokens]
