"""What one routing decision costs at 256 workers that hold five million different blocks, and what the index weighs.

A decision is `Router.route`: the matches of all workers, their loads and the policy. Hashing the prompt comes before
it and is shown by itself. Between two timed decisions others are looked up, so that caches are as cold as they are
in a busy gateway.
Run: PYTHONPATH=<parent of baton> python tests/bench/router_decision.py [--workers 256] [--blocks 5000000]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from baton.actors.collector import spare_startup
from baton.actors.engine.block_hash import block_hashes, root_hash
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import KVEvents, Load, PeerAddress, Role, WorkerInfo
from baton.router.config import RouterConfig
from baton.router.policies import make_policy
from baton.router.prefix_index import PrefixIndex
from baton.router.routing import RoutedWorker, Router

BLOCK_SIZE = 16
SYSTEM_BLOCKS = 64  # that every conversation starts with
NUM_DECISIONS = 1000
NUM_PROMPTS = 50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=5_000_000)
    parser.add_argument("--policies", nargs="*", default=[RouterConfig().policy, "cache_aware"])
    options = parser.parse_args()
    console = Console()
    console.print(f"load average {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    fleet = Fleet(options.workers)
    before = memory()
    fill_s = fleet.fill(options.blocks)
    spare_startup()  # as the gateway's process does
    used = memory() - before
    console.print(
        f"{fleet.num_blocks:,} blocks on {options.workers} workers: {used / 2**20:,.0f} MiB, "
        f"{used / fleet.num_blocks:.0f} bytes a block, {fill_s / fleet.num_blocks * 1e6:.2f} µs to take one in"
    )
    table = Table(
        *("pools", "policy", "tokens", "matches p50", "p99", "decision p50", "p99", "charge p50", "hashing p50"),
        title="µs of the deciding thread's CPU time",
    )
    for split in (False, True):
        fleet.split(split)
        for policy in dict.fromkeys(options.policies):
            for num_blocks in (64, 512, 8192):
                pools = "split" if split else "both"
                table.add_row(pools, policy, f"{num_blocks * BLOCK_SIZE:,}", *measure(fleet, policy, num_blocks))
    console.print(table)


def memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@dataclass
class Fleet:
    num_workers: int
    index: PrefixIndex = field(default_factory=PrefixIndex)
    workers: list[RoutedWorker] = field(default_factory=list[RoutedWorker])
    conversations: list[int] = field(default_factory=list[int])  # what some worker holds, by seed
    num_blocks: int = 0

    def fill(self, num_blocks: int) -> float:
        """Give each worker the shared start and conversations of its own; return the seconds the index took."""
        each = num_blocks // self.num_workers
        seconds = 0.0
        for i in range(self.num_workers):
            self.workers.append(a_worker(i, "both"))
            stored: dict[bytes, None] = {}
            while len(stored) < each:
                self.conversations.append(len(self.conversations))
                tokens = conversation(self.conversations[-1])[: (each + SYSTEM_BLOCKS - len(stored)) * BLOCK_SIZE]
                stored |= dict.fromkeys(block_hashes(tokens.tolist(), BLOCK_SIZE, root_hash()))
            self.num_blocks += len(stored)
            events = KVEvents(stored=tuple(stored), snapshot=True)
            incarnation = self.workers[-1].incarnation
            started = time.perf_counter()
            self.index.add(incarnation, 1 << 20)
            self.index.apply(incarnation, events)
            seconds += time.perf_counter() - started
        return seconds

    def split(self, is_split: bool) -> None:
        for i, worker in enumerate(self.workers):
            role: Role = ("prefill", "decode")[i % 2] if is_split else "both"
            worker.info = a_worker(i, role).info

    def decoders(self) -> list[RoutedWorker]:
        return [worker for worker in self.workers if worker.info.role != "prefill"]

    def prefillers(self) -> list[RoutedWorker]:
        return [worker for worker in self.workers if worker.info.role == "prefill"]


@dataclass(frozen=True)
class Pools:
    """As `Membership` has them: sorted when they change, not when they are read."""

    decode: tuple[RoutedWorker, ...]
    prefill: tuple[RoutedWorker, ...]

    def decoders(self) -> tuple[RoutedWorker, ...]:
        return self.decode

    def prefillers(self) -> tuple[RoutedWorker, ...]:
        return self.prefill


def a_worker(number: int, role: Role) -> RoutedWorker:
    return RoutedWorker(
        WorkerInfo(
            peer=PeerAddress(f"w{number}", f"10.0.0.{number}:1", f"life {number}"),
            role=role,
            model="bench",
            block_size=BLOCK_SIZE,
            num_blocks=1 << 17,
            max_context=1 << 18,
            mover="nixl",
            metrics_address="",
            pid=number,
        )
    )


def measure(fleet: Fleet, policy: str, num_blocks: int) -> list[str]:
    """Decide for prompts that go on from a conversation that some worker holds, cut at a random place."""
    rng = random.Random(2)
    pools = Pools(tuple(fleet.decoders()), tuple(fleet.prefillers()))
    router = Router(pools, fleet.index, make_policy(RouterConfig.model_validate({"policy": policy})))
    requests = [a_request(fleet, rng, num_blocks) for _ in range(NUM_PROMPTS)]
    matches, decisions, charges, hashing = [list[float]() for _ in range(4)]
    for i in range(NUM_DECISIONS):
        for worker in rng.sample(fleet.workers, 16):  # as frames come in
            worker.take_load(Load(num_running=rng.randrange(200), waiting_tokens=rng.randrange(20_000)))
        request = requests[i % NUM_PROMPTS]
        hashing.append(timed(partial(block_hashes, request.tokens, BLOCK_SIZE, root_hash())))
        hashes = block_hashes(request.tokens, BLOCK_SIZE, root_hash())
        cool(fleet, rng)
        matches.append(timed(partial(fleet.index.match_slots, hashes)))
        router.route(request)  # so that its hashes are known
        cool(fleet, rng)
        decisions.append(timed(partial(router.route, request)))
        if i % 10 == 0:
            charges.append(timed(partial(router.charge, router.route(request))))
    return [*p50_p99(matches), *p50_p99(decisions), p50_p99(charges)[0], p50_p99(hashing)[0]]


def p50_p99(seconds: list[float]) -> list[str]:
    cuts = statistics.quantiles(seconds, n=100)
    return [f"{cut * 1e6:,.0f}" for cut in (cuts[49], cuts[98])]


def conversation(seed: int) -> np.ndarray:
    """Return the tokens of a conversation: half of them are short, half as long as 128k tokens."""
    rng = np.random.default_rng(seed)
    num_tokens = (8192 if rng.random() < 0.5 else 512) * BLOCK_SIZE
    own = rng.integers(0, 50_000, num_tokens - SYSTEM_BLOCKS * BLOCK_SIZE)
    return np.concatenate([np.arange(SYSTEM_BLOCKS * BLOCK_SIZE), own])


def a_request(fleet: Fleet, rng: random.Random, num_blocks: int) -> Request:
    held = conversation(rng.choice(fleet.conversations))[: rng.randrange(num_blocks * BLOCK_SIZE)]
    new = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 50_000, num_blocks * BLOCK_SIZE - held.size)
    tokens = tuple(np.concatenate([held, new]).tolist())
    return Request(id="r", tokens=tokens, sampling=SamplingParams(max_tokens=200, seed=1))


def cool(fleet: Fleet, rng: random.Random) -> None:
    strangers = [rng.randbytes(16) for _ in range(2000)]
    for start in range(0, 2000, 10):
        fleet.index.match_all(strangers[start : start + 10])


def timed(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


if __name__ == "__main__":
    main()
