"""Cutting blocks anew, and the staging that it goes through, over a fabric that holds every transfer back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from baton.transfer.local_mover import LocalFabric, LocalMover
from baton.transfer.mover import Arrival, Incarnation, TransferError
from baton.transfer.reblock import ReblockingMover
from baton.transfer.route import source_blocks
from baton.transfer.staging import NUM_BUFFERS

A, B = Incarnation("a"), Incarnation("b")


def cache(num_blocks: int, block_size: int) -> torch.Tensor:
    return torch.randn(num_blocks, 3, 2, block_size, 2, 4)


def tokens_of(kv: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """[num_layers, 2, num_tokens, num_kv_heads, head_dim]"""
    return torch.cat([kv[block] for block in blocks], dim=2)


@dataclass
class Pair:
    ours: int = 4
    theirs: int = 8
    hold: bool = False
    max_write_blocks: int = 3

    def __post_init__(self) -> None:
        self.fabric = LocalFabric(hold=self.hold)
        self.source, self.target = cache(12, self.ours), torch.zeros_like(cache(12, self.theirs))
        self.mover = ReblockingMover(LocalMover(self.fabric, self.source, A), self.source, self.max_write_blocks)
        self.peer = LocalMover(self.fabric, self.target, B)
        self.mover.connect(B, self.peer.describe())

    def write(self, blocks: list[int], target: list[int], skip: int = 0, tag: bytes = b"t") -> int:
        """Write what fills the targets, from the peer's block `skip` of the sequence on."""
        named = source_blocks(blocks, self.ours, self.theirs)[skip : skip + len(target)]
        return self.mover.write(B, np.asarray(named, np.int64), np.asarray(target, np.int64), tag)


def test_a_larger_block_is_filled_by_several_of_ours_and_the_last_may_lack_some() -> None:
    assert source_blocks((5, 2, 9), 16, 32) == ((5, 2), (9, -1))
    assert source_blocks((5, 2), 16, 64) == ((5, 2, -1, -1),)


def test_a_smaller_block_is_filled_by_a_part_of_ours() -> None:
    assert source_blocks((5, 2), 32, 16) == ((10,), (11,), (4,), (5,))


def test_equal_blocks_stay_as_they_are() -> None:
    assert source_blocks((5, 2), 16, 16) == (5, 2)


def test_larger_blocks_arrive_with_the_same_tokens() -> None:
    pair = Pair(4, 8)
    transfer = pair.write([7, 2, 11], [9, 0])
    assert torch.equal(tokens_of(pair.target, [9, 0])[:, :, :12], tokens_of(pair.source, [7, 2, 11]))
    assert not pair.target[1:9].any() and not pair.target[10:].any()
    (completion,) = pair.mover.poll().completions
    assert (completion.transfer, completion.tag, completion.error) == (transfer, b"t", None)
    assert completion.num_bytes == 2 * pair.peer.describe().block_bytes
    assert pair.peer.poll().arrivals == [Arrival(A, b"t")]


@pytest.mark.parametrize(("skip", "num"), [(0, 3), (1, 3), (3, 3), (5, 1)])
def test_smaller_blocks_may_begin_and_end_inside_one_of_ours(skip: int, num: int) -> None:
    pair = Pair(8, 4)
    pair.write([7, 2, 11], [9, 0, 4][:num], skip)
    sent = tokens_of(pair.source, [7, 2, 11])[:, :, 4 * skip : 4 * (skip + num)]
    assert torch.equal(tokens_of(pair.target, [9, 0, 4][:num]), sent)


def test_writes_wait_for_a_buffer_and_keep_their_order() -> None:
    pair = Pair(hold=True)
    for number in range(NUM_BUFFERS + 2):
        pair.write([number, 2 * number], [number], tag=bytes([number]))
    assert len(pair.fabric.pending) == NUM_BUFFERS
    arrived: list[int] = []
    while pair.fabric.pending:
        pair.fabric.deliver(pair.fabric.pending[0])
        arrived += [completion.tag[0] for completion in pair.mover.poll().completions]
    assert arrived == list(range(NUM_BUFFERS + 2))
    for number in arrived:
        assert torch.equal(tokens_of(pair.target, [number]), tokens_of(pair.source, [number, 2 * number]))


def test_what_waits_for_a_lost_peer_fails_and_its_buffers_serve_the_next() -> None:
    pair = Pair(hold=True)
    for number in range(NUM_BUFFERS + 1):
        pair.write([1, 2], [number], tag=bytes([number]))
    pair.mover.disconnect(B)
    ends = {completion.tag[0]: completion.error for completion in pair.mover.poll().completions}
    assert ends == dict.fromkeys(range(NUM_BUFFERS + 1), "disconnected from b")
    with pytest.raises(TransferError, match="not connected to peer b"):
        pair.write([1, 2], [0])
    pair.mover.connect(B, pair.peer.describe())
    for number in range(NUM_BUFFERS):
        pair.write([1, 2], [number])
    assert len(pair.fabric.pending) == NUM_BUFFERS


def test_equal_blocks_go_straight_from_the_cache() -> None:
    pair = Pair(4, 4)
    pair.write([7, 2, 11, 5], [0, 1, 2, 3])  # more than a buffer holds
    assert torch.equal(pair.target[:4], pair.source[[7, 2, 11, 5]])


def test_a_write_that_no_buffer_holds_is_refused() -> None:
    with pytest.raises(TransferError, match="4 blocks exceeds max_write_blocks = 3"):
        Pair().write(list(range(8)), [0, 1, 2, 3])


def test_sizes_of_which_neither_divides_the_other_are_refused_with_both() -> None:
    with pytest.raises(TransferError, match="block_bytes is 768 here but 1152 at peer b"):
        Pair(4, 6)
