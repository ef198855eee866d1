"""A step's block tables as flat index arrays on the host, and the padding of a decode step to a captured size.

Host-side half of the GPU attention backends' `plan`; knows numpy, no device.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.kernels.attention import StepLayout

Int32s = NDArray[np.int32]


class BlockIndex(NamedTuple):
    """Row i's blocks are indices[indptr[i]:indptr[i+1]], its queries those from cu_queries[i] to cu_queries[i+1]."""

    kv_lens: Int32s  # [num_rows]
    cu_queries: Int32s  # [num_rows + 1], from 0
    indptr: Int32s  # [num_rows + 1], from 0
    indices: Int32s


def block_index(layout: StepLayout, rows: slice, block_size: int) -> BlockIndex:
    """Flatten the tables of `rows`, without the blocks that lie wholly beyond a row's KV."""
    kv_lens = np.asarray(layout.kv_lens[rows], dtype=np.int32)
    counts = -(-kv_lens // block_size)
    tables = (table[:count] for table, count in zip(layout.block_tables[rows], counts.tolist(), strict=True))
    return BlockIndex(
        kv_lens=kv_lens,
        cu_queries=_offsets(np.asarray(layout.query_lens[rows], dtype=np.int32)),
        indptr=_offsets(counts),
        indices=np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(counts.sum())),
    )


def pad_decodes(layout: StepLayout, num_rows: int) -> StepLayout:
    """Fill a step of decodes up to `num_rows`: a padding row reads one token of block 0, and its result is noise."""
    missing = num_rows - len(layout.query_lens)
    if layout.num_decodes != len(layout.query_lens) or missing < 0:
        raise ValueError(
            f"a graph of {num_rows} decode rows was given {len(layout.query_lens)} rows, {layout.num_decodes} of them "
            "decodes; capture a larger size, and run steps with prefill outside of graphs"
        )
    return StepLayout(
        query_lens=layout.query_lens + [1] * missing,
        kv_lens=layout.kv_lens + [1] * missing,
        block_tables=layout.block_tables + [[0]] * missing,
        num_decodes=num_rows,
    )


def _offsets(lens: Int32s) -> Int32s:
    offsets = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=offsets[1:])
    return offsets
