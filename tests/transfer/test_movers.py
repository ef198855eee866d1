"""Movers between two processes: what the hand-over protocol needs to be true of each."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from mover_peer import Peer, Site, start_peer

from baton.transfer.mover import Completion, Incarnation, MemoryDescriptor, PlainMover, TransferError
from baton.transfer.nixl_mover import set_env_defaults

NUM_BLOCKS, BLOCK_BYTES = 64, 32 * 1024
OURS = Incarnation("prefill-1")
BOUND_S = 15.0


SITES = [
    pytest.param(Site("nixl"), id="nixl, host memory"),
    pytest.param(Site("nccl"), id="gloo, host memory"),
    pytest.param(Site("nixl", verify=True), id="nixl, host memory, verified"),
    pytest.param(Site("nixl", "cuda:0", "cuda:1"), id="nixl, two GPUs", marks=pytest.mark.multi_gpu),
    pytest.param(Site("nccl", "cuda:0", "cuda:1"), id="nccl, two GPUs", marks=pytest.mark.multi_gpu),
    pytest.param(
        Site("nccl", "cuda:0", "cuda:1", verify=True), id="nccl, two GPUs, verified", marks=pytest.mark.multi_gpu
    ),
]


@pytest.fixture(scope="module", params=SITES)
def site(request: pytest.FixtureRequest) -> Site:
    return request.param


@pytest.fixture(scope="module")
def kv(site: Site) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    kv = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, generator=generator)
    return kv.to(site.ours)


@pytest.fixture(scope="module")
def mover(site: Site, kv: torch.Tensor) -> Iterator[PlainMover]:
    set_env_defaults(os.environ)
    made = site.mover(kv, OURS)
    yield made
    made.close()


NAMES = itertools.count()


def start(site: Site, mover: PlainMover, shape: tuple[int, int] = (NUM_BLOCKS, BLOCK_BYTES)) -> Peer:
    return start_peer(site, mover, OURS, f"decode-{next(NAMES)}", shape=shape)


@pytest.fixture
def peer(site: Site, mover: PlainMover) -> Iterator[Peer]:
    started = start(site, mover)
    yield started
    mover.disconnect(started.incarnation)
    started.stop()


def numbers(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


def wait_for(mover: PlainMover, transfer: int) -> Completion:
    give_up = time.monotonic() + BOUND_S
    while time.monotonic() < give_up:
        for completion in mover.poll().completions:
            if completion.transfer == transfer:
                return completion
        time.sleep(1e-3)
    raise AssertionError(f"transfer {transfer} did not end within {BOUND_S} s")


def test_written_blocks_are_there_when_the_peer_hears_of_them(mover: PlainMover, kv: torch.Tensor, peer: Peer) -> None:
    transfer = mover.write(peer.incarnation, numbers(3, 9, 4, 5), numbers(60, 0, 7, 8), b"tag-1")
    completion = wait_for(mover, transfer)
    assert (completion.error, completion.tag, completion.peer) == (None, b"tag-1", peer.incarnation)
    assert completion.num_bytes == 4 * BLOCK_BYTES
    assert peer.expect() == (OURS, b"tag-1")
    for source, target in ((3, 60), (9, 0), (4, 7), (5, 8)):
        assert peer.block(target) == kv[source].cpu().numpy().tobytes()
    assert peer.block(1) == bytes(BLOCK_BYTES), "a block that nobody named has changed"


def test_every_write_of_a_burst_is_told_exactly_once(mover: PlainMover, peer: Peer) -> None:
    tags = [f"burst-{i}".encode() for i in range(50)]
    for i, tag in enumerate(tags):
        mover.write(peer.incarnation, numbers(i), numbers(i), tag)
    give_up = time.monotonic() + BOUND_S
    ended: list[Completion] = []
    while len(ended) < len(tags) and time.monotonic() < give_up:
        ended += mover.poll().completions
    assert sorted(c.tag for c in ended) == sorted(tags)
    assert sorted(str(peer.expect()) for _ in tags) == sorted(str((OURS, tag)) for tag in tags)


def test_a_block_number_out_of_range_is_refused(mover: PlainMover, peer: Peer) -> None:
    with pytest.raises(TransferError, match=r"InvalidParam|has 64 blocks, none numbered 64"):
        mover.write(peer.incarnation, numbers(0), numbers(NUM_BLOCKS), b"beyond")


def test_a_killed_peer_surfaces_and_its_successor_can_be_reached(
    site: Site, mover: PlainMover, kv: torch.Tensor, peer: Peer
) -> None:
    assert wait_for(mover, mover.write(peer.incarnation, numbers(1), numbers(1), b"alive")).error is None
    peer.process.kill()
    peer.process.join()
    assert failure_within_bound(mover, peer.incarnation) != ""
    mover.disconnect(peer.incarnation)
    mover.disconnect(peer.incarnation)  # idempotent
    with pytest.raises(TransferError, match="not connected"):
        mover.write(peer.incarnation, numbers(1), numbers(1), b"gone")
    successor = start(site, mover)
    assert wait_for(mover, mover.write(successor.incarnation, numbers(2), numbers(5), b"again")).error is None
    assert successor.expect() == (OURS, b"again")
    assert successor.block(5) == kv[2].cpu().numpy().tobytes()
    mover.disconnect(successor.incarnation)
    successor.stop()


def failure_within_bound(mover: PlainMover, peer: Incarnation) -> str:
    """Write until a write fails, at its post or in its completion: one in flight may still report success."""
    give_up = time.monotonic() + BOUND_S
    while time.monotonic() < give_up:
        try:
            error = wait_for(mover, mover.write(peer, numbers(1), numbers(1), b"dead?")).error
        except TransferError as refused:
            return str(refused)
        if error is not None:
            return error
        time.sleep(0.05)
    raise AssertionError(f"writes to a dead peer still succeed after {BOUND_S} s")


def test_a_peer_with_another_mover_is_refused_by_name(mover: PlainMover) -> None:
    theirs: MemoryDescriptor = msgspec.structs.replace(mover.describe(), mover="local")
    ours = mover.describe().mover
    with pytest.raises(TransferError, match=re.escape(f"mover is {ours!r} here but 'local' at peer odd")):
        mover.connect(Incarnation("odd"), theirs)


def test_a_peer_with_larger_blocks_is_written_from_staging_only(site: Site, mover: PlainMover) -> None:
    large = start(site, mover, (8, 2 * BLOCK_BYTES))
    with pytest.raises(TransferError, match=f"block_bytes is {BLOCK_BYTES} here but {2 * BLOCK_BYTES} at peer decode"):
        mover.write(large.incarnation, numbers(1), numbers(1), b"t")
    staging = torch.arange(4, dtype=torch.uint8)[:, None].expand(4, 2 * BLOCK_BYTES).contiguous().to(site.ours)
    transfer = mover.write(large.incarnation, numbers(3, 1), numbers(0, 7), b"staged", mover.stage(staging))
    completion = wait_for(mover, transfer)
    assert (completion.error, completion.num_bytes) == (None, 2 * 2 * BLOCK_BYTES)
    assert large.expect() == (OURS, b"staged")
    assert large.block(0) == bytes([3]) * 2 * BLOCK_BYTES and large.block(7) == bytes([1]) * 2 * BLOCK_BYTES
    mover.disconnect(large.incarnation)
    large.stop()


def test_pending_writes_to_a_peer_that_is_left_fail(site: Site, mover: PlainMover, peer: Peer) -> None:
    """It is stopped: whatever has not ended by itself must end here."""
    assert wait_for(mover, mover.write(peer.incarnation, numbers(1), numbers(1), b"first")).error is None
    assert peer.process.pid is not None
    os.kill(peer.process.pid, signal.SIGSTOP)
    left = {mover.write(peer.incarnation, numbers(*range(64)), numbers(*range(64)), b"w") for _ in range(20)}
    mover.disconnect(peer.incarnation)
    give_up = time.monotonic() + BOUND_S
    while left and time.monotonic() < give_up:
        left -= {completion.transfer for completion in mover.poll().completions}
        time.sleep(1e-3)
    assert not left
    peer.process.kill()


def test_a_handshake_of_another_life_is_refused() -> None:
    kv = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    mover, other = (Site("nixl").mover(kv, Incarnation(name)) for name in ("decode-3", "decode-2"))
    with pytest.raises(TransferError, match="names decode-2"):
        mover.connect(Incarnation("decode-1"), other.describe())
    for one in (mover, other):
        one.close()


def test_a_handshake_of_nonsense_is_refused(mover: PlainMover) -> None:
    with pytest.raises(TransferError, match="cannot connect to peer liar"):
        mover.connect(Incarnation("liar"), msgspec.structs.replace(mover.describe(), handshake=b"nonsense"))


def test_env_defaults_respect_the_user() -> None:
    environ = {"NIXL_LOG_LEVEL": "DEBUG"}
    set_env_defaults(environ)
    assert environ == {"NIXL_LOG_LEVEL": "DEBUG"}
