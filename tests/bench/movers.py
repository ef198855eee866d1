"""Measure a mover between two processes: GB/s, and the cost of a block. Host memory, or one GPU each.

Run: python tests/bench/movers.py [--mover nccl] [--device cuda:0,cuda:1] [--verify]
UCX_TLS stays as it is; on CPUs try UCX_TLS=tcp,self for the path without shared memory.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import numpy as np
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from mover_peer import Peer, Site, start_peer

from baton.transfer.config import MoverKind
from baton.transfer.mover import Incarnation, PlainMover
from baton.transfer.nixl_mover import set_env_defaults

OURS = Incarnation("bench")
REPEATS = 7
TOTAL_BYTES = 192 * 2**20
POLL_S = 150e-6


class Timing(NamedTuple):
    posted_s: float
    completed_s: float
    arrived_s: float


def transfer_once(mover: PlainMover, peer: Peer, source: np.ndarray, target: np.ndarray) -> Timing:
    start = time.perf_counter()
    mover.write(peer.incarnation, source, target, b"bench")
    posted = time.perf_counter()
    while not (completions := mover.poll().completions):
        time.sleep(POLL_S)
    completed = time.perf_counter()
    assert completions[0].error is None, completions[0].error
    peer.expect()
    return Timing(posted - start, completed - start, time.perf_counter() - start)


def measure(mover: PlainMover, peer: Peer, num_blocks: int, *, adjacent: bool) -> Timing:
    random = np.random.default_rng(0)
    total = peer.memory.num_blocks
    timings: list[Timing] = []
    for _ in range(REPEATS + 1):  # the first connects and is dropped
        source, target = (np.arange(num_blocks) if adjacent else random.permutation(total)[:num_blocks] for _ in "st")
        timings.append(transfer_once(mover, peer, source, target))
    return Timing(*(statistics.median(column) for column in zip(*timings[1:], strict=True)))


def report(site: Site, block_bytes: int) -> None:
    total = 2 * (TOTAL_BYTES // block_bytes)
    kv = torch.ones(total, block_bytes, dtype=torch.uint8, device=site.ours)
    mover = site.mover(kv, OURS)
    peer = start_peer(site, mover, OURS, f"peer-{block_bytes}", shape=(total, block_bytes), poll_s=POLL_S)
    num_blocks = total // 2
    for adjacent in (False, True):
        timing = measure(mover, peer, num_blocks, adjacent=adjacent)
        gb_per_s = num_blocks * block_bytes / timing.completed_s / 1e9
        print(
            f"{block_bytes:>9} {num_blocks:>6} {'adjacent' if adjacent else 'scattered':>9} "
            f"{gb_per_s:>6.2f} GB/s  {1e6 * timing.completed_s / num_blocks:>8.2f} us/block  "
            f"post {1e3 * timing.posted_s:>7.2f} ms  arrival {1e3 * timing.arrived_s:>7.2f} ms",
            flush=True,
        )
    mover.disconnect(peer.incarnation)
    peer.stop()
    mover.close()


def main(
    mover: Annotated[str, typer.Option(help="nixl, or nccl, which is gloo between CPUs")] = "nixl",
    device: Annotated[str, typer.Option(help="of both, or of each: cuda:0,cuda:1")] = "cpu",
    verify: Annotated[bool, typer.Option(help="fingerprint every block on both sides")] = False,
) -> None:
    set_env_defaults(os.environ)
    torch.set_num_threads(1)
    ours, _, theirs = device.partition(",")
    site = replace(Site(cast(MoverKind, mover), ours, theirs or ours), verify=verify)
    print(
        f"{mover}, {device}{', verified' if verify else ''}, UCX_TLS={os.environ.get('UCX_TLS', '(unset)')}, "
        f"{TOTAL_BYTES >> 20} MiB per transfer, median of {REPEATS}"
    )
    for block_bytes in (16 * 1024, 64 * 1024, 360 * 1024, 737_280, 2 * 2**20):
        report(site, block_bytes)


if __name__ == "__main__":
    typer.run(main)
