"""Which of a step's sampled tokens count: in each row of drafts, up to and with the first that is not the draft.

A row of d drafts was sampled after its last known token and after each draft, d + 1 times. All rows' ids stand in one
vector, row behind row; `drafts` holds the draft that each id was to confirm, and NO_DRAFT for the last id of a row.
Where target and drafts are sampled with the same noise (keyed by seed and position), this is exact token by token: what
counts is what one token a step would have given.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_DRAFT = -1
REJECTED = -1


class Verified(NamedTuple):
    ids: torch.Tensor  # [num_ids] int64: REJECTED behind the first that was not its draft
    is_last: torch.Tensor  # [num_ids] bool: the last id that counts of each row


def verify_chains(ids: torch.Tensor, drafts: torch.Tensor, firsts: torch.Tensor) -> Verified:
    """ids, drafts: [num_ids] int64. firsts: [num_ids] int64, the index of the first id of each id's row.

    Queues a handful of small operations and never waits for the device.
    """
    differs = ids != drafts
    num_before = differs.cumsum(0) - differs.long()
    counts = num_before == num_before.index_select(0, firsts)
    return Verified(torch.where(counts, ids, REJECTED), counts & differs)
