"""A batch as the host arrays that a step starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.actors.engine.batch import Row
from baton.kernels.attention import StepLayout

UNKNOWN = -1  # in place of a token id that only the device knows
Int64s = NDArray[np.int64]


class SampledAfter(NamedTuple):
    """Parallel to the rows that sample."""

    tokens: list[int]  # which of the step's tokens is sampled after
    positions: list[int]  # of the token to be sampled
    slots: list[int]


def write_fields(fields: Int64s, rows: Sequence[Row], block_size: int, no_slot: int) -> None:
    """Fill `fields` [4, size] with each token's id, position, cache slot and sequence slot, in the rows' order.

    An id is UNKNOWN where only the device knows it: what the sequence slot sampled last. A cache slot is block *
    block_size + offset. Padding stores nothing and belongs to `no_slot`, a sequence slot that nobody has.
    """
    num_decodes = next((i for i, row in enumerate(rows) if row.num_tokens != 1), len(rows))
    decodes = rows[:num_decodes]
    part = fields[:, :num_decodes]
    part[0] = [row.tokens[0] if row.tokens else UNKNOWN for row in decodes]
    part[1] = [row.start for row in decodes]
    part[2] = [row.blocks[row.start // block_size] * block_size + row.start % block_size for row in decodes]
    part[3] = [row.slot for row in decodes]
    end = num_decodes
    for row in rows[num_decodes:]:
        start, end = end, end + row.num_tokens
        _write_chunk(fields[:, start:end], row, block_size)
    fields[:, end:] = np.array([[0], [0], [-1], [no_slot]])


def _write_chunk(part: Int64s, row: Row, block_size: int) -> None:
    tokens, positions, cache_slots, slots = part
    tokens[: len(row.tokens)] = row.tokens
    tokens[len(row.tokens) :] = UNKNOWN
    positions[:] = np.arange(row.start, row.end)
    first = row.start // block_size
    blocks = np.array(row.blocks[first : -(-row.end // block_size)])
    cache_slots[:] = blocks[positions // block_size - first] * block_size + positions % block_size
    slots[:] = row.slot


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
