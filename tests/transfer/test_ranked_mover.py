"""Tensor-parallel workers of different degrees, each rank with a mover of its own on one fabric."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from baton.transfer.local_mover import LocalFabric, LocalMover
from baton.transfer.mover import Arrival, Completion, Incarnation, KVMover, TransferError, rank_name
from baton.transfer.ranked_mover import Join, RankedMover, RankServer
from baton.transfer.reblock import ReblockingMover
from baton.transfer.route import SLICES, source_blocks

A, B = Incarnation("a"), Incarnation("b")
HEADS, NUM_BLOCKS, MAX_WRITE_BLOCKS = 8, 12, 4
BOUND_S = 10.0


@dataclass
class RankedWorker:
    """All ranks of one worker; those other than 0 live on threads, as they do on processes elsewhere."""

    mover: KVMover
    kvs: list[torch.Tensor]  # by rank
    lines: list[Connection]
    threads: list[threading.Thread]

    @classmethod
    def start(
        cls, fabric: LocalFabric, worker: Incarnation, world: int, block_size: int, fill: bool, compress: bool = False
    ) -> RankedWorker:
        whole = torch.randn(NUM_BLOCKS, 3, 2, block_size, HEADS, 4, dtype=torch.bfloat16) * fill
        kvs = [share.contiguous() for share in whole.chunk(world, dim=4)]

        def rank_mover(rank: int) -> Callable[[Join], KVMover]:
            def make(join: Join) -> KVMover:
                plain = LocalMover(fabric, kvs[rank], rank_name(join.worker, rank))
                return ReblockingMover(plain, kvs[rank], MAX_WRITE_BLOCKS, rank=rank, world=world, compress=compress)

            return make

        pairs = [Pipe() for _ in range(1, world)]
        threads = [
            threading.Thread(target=serve, args=(RankServer(theirs, rank_mover(rank)),), daemon=True)
            for rank, (_, theirs) in enumerate(pairs, 1)
        ]
        for thread in threads:
            thread.start()
        lines = [ours for ours, _ in pairs]
        own = rank_mover(0)(Join(worker, "here"))
        return cls(RankedMover(own, lines, worker, "here") if lines else own, kvs, lines, threads)

    def tokens(self, blocks: list[int]) -> torch.Tensor:
        """[num_layers, 2, num_tokens, HEADS, head_dim]"""
        whole = torch.cat(self.kvs, dim=4)
        return torch.cat([whole[block] for block in blocks], dim=2)

    def wait(self, news: Callable[[], list[Completion] | list[Arrival]]) -> list[Completion] | list[Arrival]:
        give_up = time.monotonic() + BOUND_S
        while not (found := news()):
            assert time.monotonic() < give_up
            time.sleep(1e-3)
        return found

    def stop(self) -> None:
        for line in self.lines:
            line.close()
        for thread in self.threads:
            thread.join(BOUND_S)
            assert not thread.is_alive()


def serve(server: RankServer) -> None:
    with suppress(EOFError, OSError):
        server.run()


Start = Callable[..., RankedWorker]


@pytest.fixture
def fabric() -> LocalFabric:
    return LocalFabric()


@pytest.fixture
def start(fabric: LocalFabric) -> Iterator[Start]:
    started: list[RankedWorker] = []

    def start(worker: Incarnation, world: int, block_size: int, fill: bool, compress: bool = False) -> RankedWorker:
        started.append(RankedWorker.start(fabric, worker, world, block_size, fill, compress))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.mark.parametrize(("size", "peer_size"), [(4, 4), (4, 8), (8, 4)])
@pytest.mark.parametrize(("world", "peer_world"), [(1, 1), (2, 2), (1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)])
def test_tokens_arrive_whole_whatever_ranks_and_blocks_they_lie_in(
    start: Start, world: int, peer_world: int, size: int, peer_size: int
) -> None:
    source, target = start(A, world, size, True), start(B, peer_world, peer_size, False)
    source.mover.connect(B, target.mover.describe())
    target.mover.connect(A, source.mover.describe())
    blocks = [7, 2, 11, 4][: 4 * peer_size // size if peer_size < size else 4]
    named = source_blocks(blocks, size, peer_size)[:MAX_WRITE_BLOCKS]
    places = [9, 0, 5, 3][: len(named)]
    transfer = source.mover.write(B, np.asarray(named, np.int64), np.asarray(places, np.int64), b"t")
    (completion,) = source.wait(lambda: source.mover.poll().completions)
    assert isinstance(completion, Completion)
    assert (completion.transfer, completion.peer, completion.tag, completion.error) == (transfer, B, b"t", None)
    assert completion.num_bytes == len(places) * target.mover.describe().total_block_bytes
    assert target.wait(lambda: target.mover.poll().arrivals) == [Arrival(A, b"t")]
    if world > peer_world:
        target.mover.restore(np.asarray(places, np.int64), world // peer_world)
    num_tokens = len(places) * peer_size
    assert torch.equal(target.tokens(places), source.tokens(blocks)[:, :, :num_tokens])
    assert not target.tokens([block for block in range(NUM_BLOCKS) if block not in places]).any()


def test_ranks_of_which_neither_number_divides_the_other_are_refused(start: Start, fabric: LocalFabric) -> None:
    source = start(A, 2, 4, True)
    odd = LocalMover(fabric, torch.zeros(NUM_BLOCKS, 3, 2, 4, 2, 4), B).describe()
    three = type(odd)(**{name: getattr(odd, name) for name in odd.__struct_fields__} | {"followers": (odd, odd)})
    with pytest.raises(TransferError, match=r"is \d+ here but \d+ at peer b: neither divides the other"):
        source.mover.connect(B, three)


def test_a_write_fails_as_a_whole_when_one_rank_loses_the_peer(start: Start, fabric: LocalFabric) -> None:
    source, target = start(A, 2, 4, True), start(B, 2, 4, False)
    source.mover.connect(B, target.mover.describe())
    fabric.kill(rank_name(B, 1))
    source.mover.write(B, np.array([1, 2]), np.array([3, 4]), b"t")
    (completion,) = source.wait(lambda: source.mover.poll().completions)
    assert isinstance(completion, Completion) and completion.error == "not connected to peer b.1"


def test_disconnecting_ends_what_every_rank_has_pending(start: Start, fabric: LocalFabric) -> None:
    source, target = start(A, 2, 4, True), start(B, 4, 4, False)
    source.mover.connect(B, target.mover.describe())
    fabric.hold = True
    source.mover.write(B, np.array([1, 2]), np.array([3, 4]), b"t")
    source.mover.disconnect(B)
    (completion,) = source.wait(lambda: source.mover.poll().completions)
    assert isinstance(completion, Completion) and str(completion.error).startswith("disconnected from b")
    assert not fabric.pending
    with pytest.raises(TransferError, match="not connected to peer b"):
        source.mover.write(B, np.array([1]), np.array([3]), b"t")


@pytest.mark.parametrize(("size", "peer_size"), [(4, 4), (4, 8), (8, 4)])
@pytest.mark.parametrize(("world", "peer_world"), [(1, 1), (1, 2), (2, 1)])
def test_compressed_tokens_arrive_within_the_stated_error_and_with_fewer_bytes(
    start: Start, world: int, peer_world: int, size: int, peer_size: int
) -> None:
    source, target = start(A, world, size, True), start(B, peer_world, peer_size, False, compress=True)
    source.mover.connect(B, target.mover.describe())
    target.mover.connect(A, source.mover.describe())
    blocks = [7, 2, 11, 4]
    named = source_blocks(blocks, size, peer_size)[:MAX_WRITE_BLOCKS]
    places = [9, 0, 5, 3][: len(named)]
    source.mover.write(B, np.asarray(named, np.int64), np.asarray(places, np.int64), b"t")
    (completion,) = source.wait(lambda: source.mover.poll().completions)
    memory = target.mover.describe()
    assert isinstance(completion, Completion) and completion.error is None
    assert completion.num_bytes == len(places) * memory.total_block_bytes * memory.compressed // SLICES
    assert 0.5 < memory.compressed / SLICES < 0.7, "half, and the scales, which weigh much in blocks so small"
    target.wait(lambda: target.mover.poll().arrivals)
    target.mover.restore(np.asarray(places, np.int64), max(1, world // peer_world))
    sent = source.tokens(blocks)[:, :, : len(places) * peer_size].float()
    came = target.tokens(places).float()
    smallest_step = sent.abs().amax() / 448 * 2**-9
    assert ((came - sent).abs() <= sent.abs() * (1 / 16 + 2**-8) + smallest_step).all()
    assert ((came - sent).pow(2).mean() / sent.pow(2).mean()).sqrt() < 0.03
    assert not target.tokens([block for block in range(NUM_BLOCKS) if block not in places]).any()


def test_kv_that_cannot_be_compressed_is_refused_at_the_start(fabric: LocalFabric) -> None:
    kv = torch.zeros(4, 3, 2, 4, 2, 4, dtype=torch.int64)
    with pytest.raises(TransferError, match=r"transfer.compress halves 16-bit KV .* this is torch.int64"):
        ReblockingMover(LocalMover(fabric, kv, A), kv, MAX_WRITE_BLOCKS, compress=True)
