"""The local mover and its fabric: real copies, under a test's control."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.transfer.factory import MoverPlace, make_plain_mover
from baton.transfer.local_mover import LocalFabric, LocalMover
from baton.transfer.mover import Arrival, Incarnation, TransferError

A, B = Incarnation("a"), Incarnation("b")


def joined(
    *, hold: bool, num_blocks: int = 4
) -> tuple[LocalFabric, LocalMover, LocalMover, torch.Tensor, torch.Tensor]:
    fabric = LocalFabric(hold=hold)
    ours = torch.arange(num_blocks * 6, dtype=torch.bfloat16).reshape(num_blocks, 2, 3)
    theirs = torch.zeros_like(ours)
    a, b = LocalMover(fabric, ours, A), LocalMover(fabric, theirs, B)
    a.connect(B, b.describe())
    return fabric, a, b, ours, theirs


def numbers(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


def test_a_write_copies_whole_blocks_and_tells_both_sides() -> None:
    _, a, b, ours, theirs = joined(hold=False)
    transfer = a.write(B, numbers(1, 3), numbers(2, 0), b"t")
    assert torch.equal(theirs[2], ours[1]) and torch.equal(theirs[0], ours[3]) and not theirs[1].any()
    (completion,) = a.poll().completions
    assert (completion.transfer, completion.num_bytes, completion.error) == (transfer, 2 * 12, None)
    assert b.poll().arrivals == [Arrival(A, b"t")]
    assert b.poll().arrivals == []


def test_held_transfers_end_in_the_order_that_the_test_chooses() -> None:
    fabric, a, b, ours, theirs = joined(hold=True)
    a.write(B, numbers(1), numbers(0), b"first")
    a.write(B, numbers(2), numbers(0), b"second")
    assert a.poll().completions == [] and not theirs.any()
    fabric.deliver(fabric.pending[1])
    fabric.fail(fabric.pending[0], "cable cut")
    assert [(c.tag, c.error) for c in a.poll().completions] == [(b"second", None), (b"first", "cable cut")]
    assert b.poll().arrivals == [Arrival(A, b"second")]
    assert torch.equal(theirs[0], ours[2])


def test_a_dead_peer_fails_what_is_pending_and_cannot_be_written() -> None:
    fabric, a, _, _, _ = joined(hold=True)
    a.write(B, numbers(1), numbers(0), b"t")
    fabric.kill(B)
    assert [c.error for c in a.poll().completions] == ["peer b died"]
    with pytest.raises(TransferError, match="not connected"):
        a.write(B, numbers(1), numbers(0), b"t")


def test_disconnecting_fails_what_is_pending_and_is_idempotent() -> None:
    _, a, _, _, _ = joined(hold=True)
    a.write(B, numbers(1), numbers(0), b"t")
    a.disconnect(B)
    a.disconnect(B)
    assert [c.error for c in a.poll().completions] == ["disconnected from b"]


def test_a_peer_with_blocks_of_another_size_is_written_from_staging_only() -> None:
    fabric, theirs = LocalFabric(), torch.zeros(2, 4)
    a, b = LocalMover(fabric, torch.zeros(2, 8), A), LocalMover(fabric, theirs, B)
    a.connect(B, b.describe())
    with pytest.raises(TransferError, match="block_bytes is 32 here but 16 at peer b"):
        a.write(B, numbers(1), numbers(1), b"t")
    staging = torch.arange(12.0).reshape(3, 4)
    a.write(B, numbers(2), numbers(1), b"t", a.stage(staging))
    assert torch.equal(theirs[1], staging[2]) and not theirs[0].any()
    assert a.poll().completions[0].num_bytes == 16


def test_a_peer_outside_the_fabric_is_refused() -> None:
    a, b = LocalMover(LocalFabric(), torch.zeros(2, 4), A), LocalMover(LocalFabric(), torch.zeros(2, 4), B)
    with pytest.raises(TransferError, match="not on this fabric"):
        a.connect(B, b.describe())


def test_a_strided_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        LocalMover(LocalFabric(), torch.zeros(4, 4).t(), A)


def test_auto_is_local_exactly_where_a_fabric_joins_the_peers() -> None:
    kv = torch.zeros(2, 4)
    assert make_plain_mover("auto", kv, A, MoverPlace(fabric=LocalFabric())).describe().mover == "local"
    nixl = make_plain_mover("auto", kv, A, MoverPlace())
    assert nixl.describe().mover == "nixl"
    nixl.close()
    with pytest.raises(TransferError, match="needs a fabric"):
        make_plain_mover("local", kv, A, MoverPlace())
