"""Compare two workers' KV layouts at the handshake: the bytes of a block must mean the same on both sides."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from baton.transfer.mover import TransferError
from baton.transfer.wire import KVLayout


class Difference(NamedTuple):
    field: str
    ours: object
    theirs: object


class LayoutMismatch(Exception):
    """Two workers cannot exchange KV, now or ever; not retryable between them."""

    def __init__(self, differences: tuple[Difference, ...]) -> None:
        self.differences = differences
        listed = "; ".join(f"{d.field}: ours is {d.ours!r}, the peer's is {d.theirs!r}" for d in differences)
        super().__init__(
            f"KV layouts differ in {listed}. Start both workers with the same model, block size and tensor_parallel."
        )


def check_layout(ours: KVLayout, theirs: KVLayout, *, repacked: bool = False) -> None:
    """Raise LayoutMismatch, naming every differing field with both values; TransferError for what cannot be moved.

    With `repacked` the writer cuts blocks to the reader's size (`transfer.reblock`): one size must divide the other.
    """
    small, large = sorted((ours.block_size, theirs.block_size))
    if repacked and large % small == 0:
        theirs = msgspec.structs.replace(theirs, block_size=ours.block_size)
    values = ((field, getattr(ours, field), getattr(theirs, field)) for field in KVLayout.__struct_fields__)
    differences = tuple(Difference(*entry) for entry in values if entry[1] != entry[2])
    if differences:
        raise LayoutMismatch(differences)
    if ours.tensor_parallel > 1:
        raise TransferError(
            f"tensor_parallel = {ours.tensor_parallel}: only the first rank's blocks could be handed over; "
            f"give such workers the role both, and no prefill or decode pool beside them"
        )
