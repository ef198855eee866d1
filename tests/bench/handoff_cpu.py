"""Measure the NIXL mover on host memory between two processes: GB/s, and the cost of a descriptor.

Run: python tests/bench/handoff_cpu.py    (sets no UCX_TLS; try UCX_TLS=tcp,self for the path without shared memory)
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from nixl_peer import Peer, start_peer

from baton.transfer.mover import Incarnation, KVMover
from baton.transfer.nixl_mover import NixlMover, set_env_defaults

OURS = Incarnation("bench")
REPEATS = 7
TOTAL_BYTES = 192 * 2**20
POLL_S = 150e-6


class Timing(NamedTuple):
    posted_s: float
    completed_s: float
    arrived_s: float


def transfer_once(mover: KVMover, peer: Peer, operation: str, source: np.ndarray, target: np.ndarray) -> Timing:
    post = mover.write if operation == "write" else mover.read
    start = time.perf_counter()
    post(peer.incarnation, source, target, b"bench")
    posted = time.perf_counter()
    while not (completions := mover.poll().completions):
        time.sleep(POLL_S)
    completed = time.perf_counter()
    assert completions[0].error is None, completions[0].error
    peer.expect()
    return Timing(posted - start, completed - start, time.perf_counter() - start)


def measure(mover: KVMover, peer: Peer, operation: str, num_blocks: int, *, adjacent: bool) -> Timing:
    random = np.random.default_rng(0)
    total = peer.memory.num_blocks
    timings: list[Timing] = []
    for _ in range(REPEATS + 1):  # the first connects and is dropped
        source, target = (np.arange(num_blocks) if adjacent else random.permutation(total)[:num_blocks] for _ in "st")
        timings.append(transfer_once(mover, peer, operation, source, target))
    return Timing(*(statistics.median(column) for column in zip(*timings[1:], strict=True)))


def report(block_bytes: int) -> None:
    total = 2 * (TOTAL_BYTES // block_bytes)
    kv = torch.ones(total, block_bytes, dtype=torch.uint8)
    mover = NixlMover(kv, OURS)
    peer = start_peer(mover, OURS, f"peer-{block_bytes}", num_blocks=total, block_bytes=block_bytes, poll_s=POLL_S)
    num_blocks = total // 2
    for operation in ("write", "read"):
        for adjacent in (False, True):
            timing = measure(mover, peer, operation, num_blocks, adjacent=adjacent)
            gb_per_s = num_blocks * block_bytes / timing.completed_s / 1e9
            print(
                f"{block_bytes:>9} {num_blocks:>6} {'adjacent' if adjacent else 'scattered':>9} {operation:>5} "
                f"{gb_per_s:>6.2f} GB/s  {1e6 * timing.completed_s / num_blocks:>8.2f} us/descriptor  "
                f"post {1e3 * timing.posted_s:>7.2f} ms  arrival {1e3 * timing.arrived_s:>7.2f} ms",
                flush=True,
            )
    mover.disconnect(peer.incarnation)
    peer.stop()
    mover.close()


def main() -> None:
    set_env_defaults(os.environ)
    torch.set_num_threads(1)
    print(f"UCX_TLS={os.environ.get('UCX_TLS', '(unset)')}, {TOTAL_BYTES >> 20} MiB per transfer, median of {REPEATS}")
    for block_bytes in (16 * 1024, 64 * 1024, 360 * 1024, 737_280, 2 * 2**20):
        report(block_bytes)


if __name__ == "__main__":
    main()
