"""A decode worker's memory in a process of its own, for tests and benchmarks of movers."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from baton.transfer.config import MoverKind
from baton.transfer.factory import MoverPlace, make_plain_mover
from baton.transfer.mover import Incarnation, MemoryDescriptor, PlainMover
from baton.transfer.nixl_mover import set_env_defaults
from baton.transfer.verified_mover import VerifiedMover

ANSWER_S = 30.0


@dataclass(frozen=True)
class Site:
    """Which mover joins the two, and where each has its memory."""

    kind: MoverKind = "nixl"
    ours: str = "cpu"
    theirs: str = "cpu"
    verify: bool = False

    def mover(self, kv: torch.Tensor, name: Incarnation) -> PlainMover:
        plain = make_plain_mover(self.kind, kv, name, MoverPlace())
        return VerifiedMover(plain, kv) if self.verify else plain


def serve(pipe: Connection, site: Site, incarnation: str, num_blocks: int, block_bytes: int, poll_s: float) -> None:
    """Own a memory of zeros, report arrivals as they come, answer "read" with a block's bytes, end on "stop"."""
    torch.set_num_threads(1)
    kv = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=site.theirs)
    kv.fill_(0)  # touch every page, so that no transfer pays for page faults
    mover = site.mover(kv, Incarnation(incarnation))
    pipe.send(mover.describe())
    our_peer, memory = pipe.recv()
    mover.connect(our_peer, memory)
    pipe.send("connected")
    while True:
        for arrival in mover.poll().arrivals:
            pipe.send((arrival.peer, arrival.tag))
        if pipe.poll(poll_s):
            request = pipe.recv()
            if request == "stop":
                mover.close()
                return
            pipe.send(kv[request].cpu().numpy().tobytes())


@dataclass
class Peer:
    incarnation: Incarnation
    process: BaseProcess
    pipe: Connection
    memory: MemoryDescriptor

    def expect(self) -> object:
        assert self.pipe.poll(ANSWER_S), f"peer {self.incarnation} did not answer within {ANSWER_S} s"
        return self.pipe.recv()

    def block(self, number: int) -> object:
        self.pipe.send(number)
        return self.expect()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send("stop")
        self.process.join(timeout=10)
        self.process.kill()
        self.pipe.close()


def start_peer(
    site: Site, mover: PlainMover, ours: Incarnation, incarnation: str, *, shape: tuple[int, int], poll_s: float = 1e-3
) -> Peer:
    """Start the process with [num_blocks, block_bytes] of memory and connect both ways."""
    set_env_defaults(os.environ)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mover_peer", "nixl", "torch.distributed"])
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, site, incarnation, *shape, poll_s), daemon=True)
    process.start()
    theirs.close()
    assert pipe.poll(ANSWER_S), "the peer process did not start"
    peer = Peer(Incarnation(incarnation), process, pipe, pipe.recv())
    mover.connect(peer.incarnation, peer.memory)
    pipe.send((ours, mover.describe()))
    assert peer.expect() == "connected"
    return peer
