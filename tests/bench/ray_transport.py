"""Ray Direct Transport (tensors in object references, over NIXL) beside our mover, for the KV of one prompt.

Ray moves one whole tensor that is complete; ours writes scattered blocks in place. Each time runs from "it is ready" to
"the receiver has it and the caller knows", once warm. Ray's includes its control path, which a hand-over would take.
Run: python tests/bench/ray_transport.py [--device cuda] [--tokens 1024 --tokens 8192]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from mover_peer import Site, start_peer

from baton.transfer.mover import Incarnation
from baton.transfer.nixl_mover import set_env_defaults

BLOCK_TOKENS = 16
REPEATS = 7
POLL_S = 50e-6


class Source:
    def __init__(self, num_bytes: int, device: str) -> None:
        self._kv = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    @ray.method(tensor_transport="nixl")
    def ready(self) -> torch.Tensor:
        return self._kv


class Sink:
    def take(self, kv: torch.Tensor) -> int:
        return int(kv[-1])


def time_ray(num_bytes: int, device: str) -> float:
    num_gpus = 0.5 if device == "cuda" else 0
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus, "enable_tensor_transport": True}
    source = ray.remote(Source).options(**options).remote(num_bytes, device)
    sink = ray.remote(Sink).options(**options).remote()
    times: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        assert ray.get(sink.take.remote(source.ready.remote())) == 1
        times.append(time.perf_counter() - started)
    ray.kill(source)
    ray.kill(sink)
    return statistics.median(times[1:])


def time_ours(num_blocks: int, block_bytes: int, device: str) -> float:
    site, ours = Site("nixl", device, device), Incarnation("bench")
    kv = torch.ones(2 * num_blocks, block_bytes, dtype=torch.uint8, device=device)
    mover = site.mover(kv, ours)
    peer = start_peer(site, mover, ours, "peer", shape=tuple(kv.shape), poll_s=POLL_S)
    random, times = np.random.default_rng(0), list[float]()
    for _ in range(REPEATS + 1):
        source, target = (random.permutation(2 * num_blocks)[:num_blocks] for _ in "st")
        started = time.perf_counter()
        mover.write(peer.incarnation, source, target, b"bench")
        while not mover.poll().completions:
            time.sleep(POLL_S)
        peer.expect()
        times.append(time.perf_counter() - started)
    mover.disconnect(peer.incarnation)
    peer.stop()
    mover.close()
    return statistics.median(times[1:])


def main(
    device: Annotated[str, typer.Option(help="cpu, or cuda for one card that both share")] = "cpu",
    token_bytes: Annotated[int, typer.Option(help="of KV; SmolLM2 in float32 by default")] = 46_080,
    tokens: Annotated[list[int] | None, typer.Option(help="prompt lengths")] = None,
) -> None:
    set_env_defaults(os.environ)
    lengths = tokens or [1024, 4096]
    block_bytes = BLOCK_TOKENS * token_bytes
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    theirs = [time_ray(num // BLOCK_TOKENS * block_bytes, device) for num in lengths]
    ray.shutdown()  # before NIXL starts threads here: Ray forks
    for num, theirs_s in zip(lengths, theirs, strict=True):
        ours_s = time_ours(num // BLOCK_TOKENS, block_bytes, device)
        num_bytes = num // BLOCK_TOKENS * block_bytes
        print(
            f"{num:>6} tokens, {num_bytes / 1e6:>7.1f} MB: blocks over our mover {1e3 * ours_s:>7.1f} ms, "
            f"{num_bytes / ours_s / 1e9:>5.2f} GB/s; one tensor over Ray {1e3 * theirs_s:>7.1f} ms, "
            f"{num_bytes / theirs_s / 1e9:>5.2f} GB/s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
