from __future__ import annotations

import pytest

from baton.kernels.attention import StepLayout
from baton.kernels.block_index import block_index, pad_decodes

LAYOUT = StepLayout(query_lens=[1, 1, 6], kv_lens=[5, 4, 9], block_tables=[[7, 3], [2, 9], [4, 1, 8]], num_decodes=2)


def test_tables_are_flattened_without_blocks_that_hold_nothing() -> None:
    index = block_index(LAYOUT, slice(None), block_size=4)
    assert index.indices.tolist() == [7, 3, 2, 4, 1, 8]
    assert index.indptr.tolist() == [0, 2, 3, 6]
    assert index.cu_queries.tolist() == [0, 1, 2, 8]


def test_a_slice_of_rows_counts_from_0() -> None:
    index = block_index(LAYOUT, slice(2, None), block_size=4)
    assert index.kv_lens.tolist() == [9]
    assert index.indptr.tolist() == [0, 3]
    assert index.cu_queries.tolist() == [0, 6]
    assert index.indices.tolist() == [4, 1, 8]


def test_padding_adds_decodes_of_one_token() -> None:
    decodes = StepLayout([1], [5], [[7, 3]], num_decodes=1)
    assert pad_decodes(decodes, 3) == StepLayout([1, 1, 1], [5, 1, 1], [[7, 3], [0], [0]], num_decodes=3)


def test_padding_refuses_prefill_rows_and_larger_steps() -> None:
    with pytest.raises(ValueError, match="graph of 4 decode rows was given 3 rows, 2 of them decodes"):
        pad_decodes(LAYOUT, 4)
    with pytest.raises(ValueError, match="graph of 1 decode rows"):
        pad_decodes(StepLayout([1, 1], [1, 1], [[0], [1]], num_decodes=2), 1)
