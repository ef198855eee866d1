"""Compare two workers' KV layouts at the handshake: the bytes of a block must mean the same on both sides."""

from __future__ import annotations

from typing import NamedTuple

from baton.transfer.wire import KVLayout

RECUT = ("block_size", "tensor_parallel")


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
            f"KV layouts differ in {listed}. Start both workers with the same model, weights and dtype, and with block "
            f"sizes and tensor_parallel of which one divides the other."
        )


def check_layout(ours: KVLayout, theirs: KVLayout) -> None:
    """Raise LayoutMismatch, naming every differing field with both values.

    The writer cuts blocks to the reader's size and ranks (`transfer.route`): there one number must divide the other.
    """
    differences: list[Difference] = []
    for field in KVLayout.__struct_fields__:
        here, there = getattr(ours, field), getattr(theirs, field)
        can_recut = field in RECUT and max(here, there) % min(here, there) == 0
        if here != there and not can_recut:
            differences.append(Difference(field, here, there))
    if differences:
        raise LayoutMismatch(tuple(differences))
